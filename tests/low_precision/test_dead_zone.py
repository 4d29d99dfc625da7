"""Changes smaller than what a format can hold are not lost: their mean arrives."""

from __future__ import annotations

import math

import pytest
import torch

from forge_dsl import testing
from tests.low_precision.common import make

STEPS = 1000


@pytest.mark.parametrize(("start", "quarter"), [(1.0, 2.0**-9), (-1.0, -(2.0**-9)), (100.0, 2.0**-3)])
def test_quarters_of_a_unit_move_a_bf16_weight_by_the_right_mean(start: float, quarter: float) -> None:
    weight = torch.nn.Parameter(torch.full((16, 64), start, dtype=torch.bfloat16, device=testing.device()))
    optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0)
    variance = 0.0
    for _ in range(STEPS):
        # The gradient follows the unit in the last place, which grows with the weight.
        size = weight.detach().float()
        unit = 2.0 ** (torch.floor(torch.log2(size.abs())) - 7)
        weight.grad = torch.full_like(weight, -quarter)
        share = (abs(quarter) / unit) % 1
        variance += (share * (1 - share) * unit * unit).mean().item()
        optimizer.step()
    moved = weight.detach().double() - start
    exact = STEPS * quarter
    # `variance` is what independent draws would add up to: five standard errors of the mean. Those here leave less.
    assert abs(moved.mean().item() - exact) < 5 * math.sqrt(variance / weight.numel())
    assert moved.std().item() < 0.4 * math.sqrt(variance)


def test_without_stochastic_rounding_such_a_weight_stands_still() -> None:
    weight = torch.nn.Parameter(torch.ones(16, 64, dtype=torch.bfloat16, device=testing.device()))
    optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0, stochastic_rounding=False)
    for _ in range(20):
        weight.grad = torch.full_like(weight, -(2.0**-9))
        optimizer.step()
    assert (weight.detach() == 1).all()


@pytest.mark.parametrize("extra_bits", [8, 16])
def test_extra_bits_hold_what_bf16_cannot(extra_bits: int) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device=testing.device()))
    optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0, extra_bits=extra_bits)
    for _ in range(64):
        weight.grad = torch.full_like(weight, -(2.0**-13))
        optimizer.step()
    # 2^-13 is a multiple of the last place of 24 bits at 1, 2^-15: nothing is rounded on the way.
    assert (weight.detach() == 1 + 64 * 2.0**-13).all()


# Relative deviation that draws leave which are hashed anew in each step, measured.
@pytest.mark.parametrize(("form", "independent"), [("bf16", 0.066), ("int8", 0.13), ("fp8", 0.13)])
def test_a_second_moment_decays_as_in_fp32(form: str, independent: float) -> None:
    ends = {}
    for state in ("fp32", form):
        weight = torch.nn.Parameter(torch.zeros(64, 64, device=testing.device()))
        optimizer = make("AdamW", [weight], lr=0.0, amsgrad=False, state_dtype={"exp_avg": "fp32", "exp_avg_sq": state})
        for step in range(STEPS + 1):
            weight.grad = torch.ones_like(weight) if step == 0 else torch.zeros_like(weight)
            optimizer.step()
        ends[state] = optimizer.decoded_state_dict()["state"][0]["exp_avg_sq"].double()
    exact = ends["fp32"].mean().item()
    assert exact == pytest.approx(0.001 * 0.999**STEPS, rel=1e-4)
    errors = ends[form] / exact - 1
    assert 0 < errors.square().mean().sqrt().item() < 0.6 * independent
    # The rate, over one time constant: up to one unit too many of 185, and in codes of the fourth root nearly none.
    assert abs(errors.mean().item()) < 0.006


@pytest.mark.parametrize("form", ["bf16", "int8", "fp8"])
def test_a_second_moment_rounded_to_nearest_sticks(form: str) -> None:
    """What the draws are for: the same decay without them ends far from the right value."""
    weight = torch.nn.Parameter(torch.zeros(64, 64, device=testing.device()))
    formats = {"exp_avg": "fp32", "exp_avg_sq": form}
    optimizer = make("AdamW", [weight], lr=0.0, amsgrad=False, state_dtype=formats, stochastic_rounding=False)
    for step in range(200):
        weight.grad = torch.ones_like(weight) if step == 0 else torch.zeros_like(weight)
        optimizer.step()
    end = optimizer.decoded_state_dict()["state"][0]["exp_avg_sq"]
    assert (end > 1.15 * 0.001 * 0.999**200).all()
