"""Hazard: a tied weight stepped twice, or one contribution lost. One update from the sum of all uses."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import ADAMW, AdamW, exact_step, integers, linear, same_bits, snapshot, unchanged


def parameter(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(integers(*shape, seed=seed))


def expected(weight: torch.Tensor, grad: torch.Tensor, lr: float) -> torch.Tensor:
    hypers = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    return exact_step(ADAMW, weight, grad, zeros, hypers, {"amsgrad": False, "maximize": False})[0]


def test_two_uses_make_one_update_from_the_sum() -> None:
    weight = parameter(4, 3)
    old = weight.detach().clone()
    optimizer = AdamW([weight], lr=0.1)
    a, b = integers(5, 3, seed=1), integers(7, 3, seed=2)
    da, db = integers(5, 4, seed=3), integers(7, 4, seed=4)
    ((linear(a, weight) * da).sum() + (linear(b, weight) * db).sum()).backward()
    assert same_bits(weight.detach(), expected(old, da.T @ a + db.T @ b, 0.1))
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_a_recurrent_weight_steps_once_and_its_input_gradient_is_from_the_old_weight() -> None:
    weight = parameter(3, 3)
    old = weight.detach().clone()
    optimizer = AdamW([weight], lr=0.1)
    x = integers(2, 3, seed=5).requires_grad_()
    y = x
    for _ in range(4):
        y = linear(y, weight)
    y.sum().backward()
    reference, z = old.clone().requires_grad_(), x.detach().clone().requires_grad_()
    y = z
    for _ in range(4):
        y = torch.nn.functional.linear(y, reference)
    y.sum().backward()
    assert same_bits(x.grad, z.grad)
    assert same_bits(weight.detach(), expected(old, reference.grad, 0.1))
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_an_embedding_that_is_also_the_head_raises_before_anything_changes() -> None:
    """Two routes to one weight: the embedding's gradient is ordinary, the head's is fused."""
    weight = parameter(5, 3)
    optimizer = AdamW([("head", weight)])
    before = snapshot(optimizer)
    hidden = torch.nn.functional.embedding(torch.tensor([0, 2]), weight)
    with pytest.raises(RuntimeError, match=r"head \[5, 3\] reaches the loss through EmbeddingBackward0.*tied"):
        linear(hidden, weight).sum().backward()
    assert unchanged(optimizer, before) and weight.grad is None


def test_a_route_that_appears_later_raises_too() -> None:
    weight = parameter(5, 3)
    optimizer = AdamW([weight])
    linear(torch.ones(1, 3), weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hidden = torch.nn.functional.embedding(torch.tensor([0, 2]), weight)
    with pytest.raises(RuntimeError, match="use the fused linear function for every use of this weight, or for none"):
        linear(hidden, weight).sum().backward()


def test_two_routes_in_two_backwards_of_one_step_raise() -> None:
    weight = parameter(4, 3)
    optimizer = AdamW([weight])
    torch.nn.functional.linear(torch.ones(1, 3), weight).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="already has an ordinary gradient"):
        linear(torch.ones(1, 3), weight).sum().backward()
    assert unchanged(optimizer, before)
    optimizer.step()
    optimizer.zero_grad()
    linear(torch.ones(1, 3), weight).sum().backward()
    weight.grad = None
    torch.nn.functional.linear(torch.ones(1, 3), weight).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="also has an ordinary gradient"):
        optimizer.step()
    assert unchanged(optimizer, before)


def test_tied_embedding_with_an_ordinary_head_is_updated_in_step() -> None:
    weight = parameter(5, 3)
    old = weight.detach().clone()
    optimizer = AdamW([weight], lr=0.1)
    hidden = torch.nn.functional.embedding(torch.tensor([0, 2]), weight)
    torch.nn.functional.linear(hidden, weight).sum().backward()
    grad = weight.grad.clone()
    optimizer.step()
    assert same_bits(weight.detach(), expected(old, grad, 0.1))
