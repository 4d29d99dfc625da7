"""Hazard: operands, weights and states of different formats. Casts as autocast makes them; each store rounds once."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import ADAMW, AdamW, Linear, exact_step, integers, linear, same_bits

HYPERS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
FLAGS = {"amsgrad": False, "maximize": False}
HALF = [torch.bfloat16, torch.float16]


def oracle(start: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, state_dtype: torch.dtype):
    """The reference on the exact gradient of the operands as they are, never rounded to their format."""
    zeros = {name: torch.zeros(start.shape, dtype=state_dtype) for name in ("exp_avg", "exp_avg_sq")}
    return exact_step(ADAMW, start, dy.float().T @ x.float(), zeros, HYPERS, FLAGS)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("state_dtype", [*HALF, torch.float32, None])
def test_weights_and_states_of_any_format(dtype: torch.dtype, state_dtype: torch.dtype | None) -> None:
    start, x, dy = integers(5, 3, dtype=dtype), integers(7, 3, seed=1, dtype=dtype), integers(7, 5, seed=2, dtype=dtype)
    weight = torch.nn.Parameter(start.clone())
    optimizer = AdamW([weight], lr=0.1, state_dtype=state_dtype, stochastic_rounding=False)
    linear(x, weight).backward(dy)
    expected, states, _ = oracle(start, x, dy, state_dtype or dtype)
    assert same_bits(weight.detach(), expected)
    for name, state in states.items():
        assert same_bits(optimizer.state[weight][name], state)


def test_the_gradient_is_not_rounded_to_bfloat16() -> None:
    """257 has no bfloat16; with lr=1 and a rule that shows the gradient, its last bit is visible in an fp32 state."""
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = AdamW([weight], betas=(0.0, 0.0), state_dtype=torch.float32)
    x = torch.ones(257, 1, dtype=torch.bfloat16)
    linear(x, weight).backward(torch.ones(257, 1, dtype=torch.bfloat16))
    assert optimizer.state[weight]["exp_avg"].item() == 257.0


@pytest.mark.parametrize("cast", HALF)
@pytest.mark.parametrize("backward_inside", [True, False])
def test_fp32_weight_under_autocast(cast: torch.dtype, backward_inside: bool) -> None:
    start, x, dy = integers(5, 3), integers(7, 3, seed=1).requires_grad_(), integers(7, 5, seed=2)
    weight, bias = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.ones(5))
    optimizer = AdamW([weight, bias], lr=0.1)
    with torch.autocast("cpu", dtype=cast):
        y = linear(x, weight, bias)
        assert y.dtype == cast and torch.equal(y, torch.nn.functional.linear(x, weight, bias))
        if backward_inside:
            y.backward(dy.to(cast))
    if not backward_inside:
        y.backward(dy.to(cast))
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, dy @ start)
    assert bias.grad.dtype == torch.float32 and torch.equal(bias.grad, dy.sum(0))
    expected, states, _ = oracle(start, x.detach(), dy, torch.float32)
    assert same_bits(weight.detach(), expected)
    assert same_bits(optimizer.state[weight]["exp_avg_sq"], states["exp_avg_sq"])


@pytest.mark.parametrize("frozen_input", [True, False])
def test_backward_under_an_autocast_that_forward_was_not_under(frozen_input: bool) -> None:
    start, x, dy = integers(5, 3) / 3, integers(7, 3, seed=1) / 3, integers(7, 5, seed=2)
    results = []
    for inside in (True, False):
        weight, bias = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.ones(5))
        optimizer = AdamW([weight, bias], lr=0.1)
        leaf = x.clone().requires_grad_(not frozen_input)
        y = linear(leaf, weight, bias)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            y.backward(dy)
        results.append((leaf.grad, bias.grad, weight.detach(), optimizer.state[weight]["exp_avg"]))
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or same_bits(a, b)


def test_fp32_activations_into_a_bf16_weight_under_autocast() -> None:
    start, x, dy = integers(5, 3, dtype=torch.bfloat16), integers(7, 3, seed=1), integers(7, 5, seed=2)
    weight = torch.nn.Parameter(start.clone())
    optimizer = AdamW([weight], lr=0.1, state_dtype=torch.float32, stochastic_rounding=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x, weight).backward(dy.bfloat16())
    expected, _, _ = oracle(start, x, dy, torch.float32)
    assert same_bits(weight.detach(), expected)
    del optimizer


def test_saved_activations_have_the_format_of_autocast() -> None:
    saved: list[torch.Tensor] = []
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = AdamW([weight])

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(torch.randn(7, 3), weight)
    assert [t.dtype for t in saved] == [torch.bfloat16, torch.float32]
    assert saved[1].data_ptr() == weight.data_ptr(), "the old weight is saved as an alias, not as a copy"
    y.sum().backward()
    del optimizer


def test_uses_of_one_weight_in_two_formats_are_one_update() -> None:
    start, x, dy = integers(5, 3), integers(7, 3, seed=1), integers(7, 5, seed=2)
    weight = torch.nn.Parameter(start.clone())
    optimizer = AdamW([weight], lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = linear(x, weight)
    ((low.float() * dy).sum() + (linear(x, weight) * dy).sum()).backward()
    expected, _, _ = oracle(start, torch.cat([x, x]), torch.cat([dy, dy]), torch.float32)
    assert same_bits(weight.detach(), expected)
    del optimizer


def test_disagreeing_formats_without_autocast_are_named() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    with pytest.raises(
        RuntimeError, match=r"x of shape \[4, 3\] is torch.bfloat16, weight of shape \[2, 3\] \(.*\) is torch.float32"
    ):
        layer(torch.randn(4, 3, dtype=torch.bfloat16))
    layer.bias.data = layer.bias.data.bfloat16()
    with pytest.raises(RuntimeError, match=r"bias of shape \[2\] is torch.bfloat16"):
        layer(torch.randn(4, 3))
    del optimizer


def test_a_model_cast_after_its_optimizer_was_built_raises_before_anything_changes() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.named_parameters())
    layer.bfloat16()
    old = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight \[2, 3\] was torch.float32.*build the optimizer after"):
        layer(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
    assert same_bits(layer.weight.detach(), old) and layer.weight not in optimizer.state
