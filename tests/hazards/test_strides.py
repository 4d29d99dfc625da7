"""Hazard: a non-contiguous weight, gradient or input was silently wrong. Any strides work; overlaps are refused."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import ADAMW, AdamW, exact_step, integers, linear, same_bits

HYPERS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
FLAGS = {"amsgrad": False, "maximize": False}


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.clone()


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.T.contiguous().T


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    wide = torch.full((t.shape[0] * 2, t.shape[1] * 3), float("nan"), dtype=t.dtype)
    view = wide[::2, ::3]
    view.copy_(t)
    return view


def shifted(t: torch.Tensor) -> torch.Tensor:
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    view = flat[1:].view(t.shape)
    view.copy_(t)
    return view


LAYOUTS = [contiguous, transposed, with_gaps, shifted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operands", LAYOUTS)
def test_every_layout_steps_the_same_bits(layout, operands, dtype: torch.dtype) -> None:
    start, x, dy = integers(5, 3, dtype=dtype), integers(7, 3, seed=1, dtype=dtype), integers(7, 5, seed=2, dtype=dtype)
    weight = torch.nn.Parameter(layout(start))
    optimizer = AdamW([weight], lr=0.1, stochastic_rounding=False)
    y = linear(operands(x), weight)
    y.backward(operands(dy))
    optimizer.step()
    zeros = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    expected, states, _ = exact_step(ADAMW, start, dy.float().T @ x.float(), zeros, HYPERS, FLAGS)
    assert same_bits(weight.detach(), expected)
    for name in zeros:
        assert same_bits(optimizer.state[weight][name], states[name])


def test_states_have_the_layout_of_a_dense_weight() -> None:
    weight = torch.nn.Parameter(transposed(integers(5, 3)))
    optimizer = AdamW([weight])
    linear(integers(4, 3), weight).sum().backward()
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() == (1, 5)


def test_a_loaded_state_of_another_layout_is_laid_out_anew_and_not_dropped() -> None:
    weights = [torch.nn.Parameter(layout(integers(5, 3))) for layout in (contiguous, transposed)]
    optimizers = [AdamW([weight]) for weight in weights]
    linear(integers(4, 3), weights[0]).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    weights[1].data.copy_(weights[0].data)
    assert optimizers[1].state[weights[1]]["exp_avg"].stride() == (1, 5)
    optimizers[1].state[weights[1]]["exp_avg"] = optimizers[1].state[weights[1]]["exp_avg"].contiguous()
    for optimizer, weight in zip(optimizers, weights, strict=True):
        optimizer.zero_grad()
        linear(integers(4, 3, seed=9), weight).sum().backward()
        optimizer.step()
    assert same_bits(weights[0].detach(), weights[1].detach())
    assert same_bits(*(o.state[w]["exp_avg_sq"] for o, w in zip(optimizers, weights, strict=True)))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 2, 2, 2)])
def test_other_parameters_of_any_shape_and_stride_are_updated_in_step(shape: tuple[int, ...]) -> None:
    base = integers(*(2 * size for size in shape))
    view = base[tuple(slice(None, None, 2) for _ in shape)] if shape else base
    view = view.permute(*reversed(range(len(shape)))) if len(shape) > 1 else view
    start, parameter = view.clone(), torch.nn.Parameter(view)
    optimizer = AdamW([parameter], lr=0.1)
    parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    zeros = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    expected, states, _ = exact_step(ADAMW, start, torch.full_like(start, 2.0), zeros, HYPERS, FLAGS)
    assert same_bits(parameter.detach(), expected)
    assert same_bits(optimizer.state[parameter]["exp_avg"], states["exp_avg"])


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(1, 3).expand(4, 3),
        torch.zeros(6).as_strided((3, 3), (1, 1)),
        torch.zeros(9).as_strided((3, 4), (2, 1)),
    ],
    ids=["expanded", "overlapping rows", "overlapping pairs"],
)
def test_memory_that_elements_share_is_refused_by_name(weight: torch.Tensor) -> None:
    weight = weight.detach().requires_grad_()
    with pytest.raises(ValueError, match=r"parameter head of shape \[\d, \d\].*share memory"):
        AdamW([("head", weight)])


def test_an_expanded_upstream_gradient_and_input_work() -> None:
    weight = torch.nn.Parameter(integers(4, 3))
    start = weight.detach().clone()
    optimizer = AdamW([weight], lr=0.1)
    x = integers(1, 3, seed=1).expand(6, 3)
    linear(x, weight).sum().backward()
    zeros = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    expected, _, _ = exact_step(ADAMW, start, torch.ones(4, 6) @ x, zeros, HYPERS, FLAGS)
    assert same_bits(weight.detach(), expected)
    del optimizer
