"""Hazard: a frozen weight (a LoRA base) crashed, was stepped, or cost a weight gradient. It is a plain linear."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, Linear, integers, linear, same_bits


def test_a_frozen_weight_gives_input_gradients_and_has_no_state() -> None:
    weight = torch.nn.Parameter(integers(4, 3), requires_grad=False)
    optimizer = AdamW([weight, torch.nn.Parameter(torch.zeros(1))])
    old = weight.detach().clone()
    x = integers(5, 3, seed=1).requires_grad_()
    dy = integers(5, 4, seed=2)
    y = linear(x, weight)
    assert "FusedLinear" not in str(y.grad_fn)
    (y * dy).sum().backward()
    optimizer.step()
    assert same_bits(x.grad, dy @ old) and same_bits(weight.detach(), old)
    assert weight not in optimizer.state and weight.grad is None


def test_a_weight_unfrozen_later_starts_at_step_one() -> None:
    early, late = Linear(3, 3), Linear(3, 2)
    late.requires_grad_(False)
    optimizer = AdamW([*early.parameters(), *late.parameters()])
    for step in range(1, 6):
        if step == 4:
            late.requires_grad_(True)
        late(early(torch.randn(4, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[early.weight]["step"] == 5
    assert optimizer.state[late.weight]["step"] == optimizer.state[late.bias]["step"] == 2


def test_a_weight_that_is_frozen_when_backward_runs_is_left_alone() -> None:
    """As in torch, which adds nothing to the gradient of a weight that requires none by then."""
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    x, before = torch.randn(4, 3, requires_grad=True), layer.weight.detach().clone()
    y = layer(x)
    layer.requires_grad_(False)
    y.sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before) and layer.weight.grad is None and not optimizer.state[layer.weight]
    assert torch.equal(x.grad, torch.ones(4, 2) @ before)
    layer.requires_grad_(True)
    layer(x).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 1


def test_a_weight_frozen_between_forward_and_backward_follows_its_graph() -> None:
    """As in torch, the graph was built while the weight required a gradient."""
    layer = Linear(3, 2, bias=False)
    optimizer = AdamW(layer.parameters())
    y = layer(torch.randn(4, 3))
    layer.weight.requires_grad_(False)
    layer.weight.requires_grad_(True)
    y.sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 1


class LoRA(torch.nn.Module):
    """A low-rank adapter over a frozen base, each part a linear of its own."""

    def __init__(self, base: torch.nn.Linear, linear_class: type, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = linear_class(base.in_features, rank, bias=False)
        self.up = linear_class(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


@pytest.mark.parametrize("steps", [10])
def test_adapters_over_a_frozen_base_train_as_with_torch(steps: int) -> None:
    results = []
    for linear_class, optimizer_class, more in (
        (Linear, AdamW, {}),
        (torch.nn.Linear, torch.optim.AdamW, {"foreach": False}),
    ):
        torch.manual_seed(0)
        model = LoRA(linear_class(6, 5), linear_class)
        base = model.base.weight.detach().clone()
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-3, **more)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(7, 6)).pow(2).mean().backward()
            optimizer.step()
        assert torch.equal(model.base.weight, base)
        results.append([model.down.weight.detach(), model.up.weight.detach()])
    for ours, theirs in zip(*results, strict=True):
        # 10 updates of about lr each, a few roundings of 2^-24 apart.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
