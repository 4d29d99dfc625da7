"""Hazard: the centered second moment, a difference of two nearly equal numbers, rounds to a negative one.

Of constant gradients g both `square_avg` and `grad_avg ** 2` tend to g². torch's centered RMSprop takes the root of
what rounding leaves between them, and the weight can be NaN after a thousand steps. Here the variance is at least 0.
"""

from __future__ import annotations

import pytest
import torch

from forge_dsl.optim import RMSprop, rmsprop_linear
from tests.hazards.kernels import assert_same, case_of, every_kernel, make

RULE = RMSprop.rule
GRADIENTS = torch.linspace(0.05, 1.0, 96)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "ordinary"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_constant_gradients_of_a_long_run_leave_the_weight_a_number(momentum: float, fused: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, len(GRADIENTS)))
    optimizer = RMSprop([weight], lr=1e-4, centered=True, momentum=momentum)
    linear = rmsprop_linear if fused else torch.nn.functional.linear
    negative = torch.zeros(len(GRADIENTS), dtype=torch.bool)
    for _ in range(1500):
        linear(GRADIENTS[None, :], weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[weight]
        negative |= (state["square_avg"] - state["grad_avg"] ** 2 < 0)[0]
    assert negative.any(), "no variance was negative; the test shows nothing"
    assert weight.isfinite().all()


@every_kernel
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_a_negative_variance_counts_as_zero(exact: bool, how: str) -> None:
    """The first moment of gradients that are all 2 is 2, and the second one is 2⁻¹⁸ short of 4: v is -2⁻¹⁸ alpha."""
    step = make(RULE, case_of(RULE, centered=True), (1, 33, 65))
    step.x.fill_(1)
    step.dy.fill_(2)
    step.problem.weight.zero_()  # and with it what weight decay adds to the gradient
    names = RULE.spec.state_names
    for name, start in {"square_avg": 4 - 2.0**-18, "grad_avg": 2.0}.items():
        state = step.problem.states[names.index(name)]
        assert state is not None
        state.fill_(start)
    expected = step.expected()
    got = step.run(how, exact)
    weight, square_avg, *_, grad_avg = got
    assert (square_avg.double() - grad_avg.double() ** 2 < 0).all(), "the variance is not negative; nothing is shown"
    assert all(tensor.isfinite().all() for tensor in got) and weight.abs().min() > 0
    if exact:
        assert_same(got, expected)
