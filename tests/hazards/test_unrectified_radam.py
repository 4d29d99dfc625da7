"""Hazard: with beta2 up to 2/3 RAdam's variance is never rectified, and the branch not taken is no number.

`rho` stays below `rho_inf = 2 / (1 - beta2) - 1`, which is 5 at 2/3 and 4 at 0.6, where the rectification divides by
zero; below that it takes the root of a negative number. A select leaves it alone; a product with a mask would not.
"""

from __future__ import annotations

import pytest
import torch

from forge_dsl import testing
from forge_dsl.optim import RAdam, radam_linear
from forge_dsl.testing import Case
from tests.hazards.kernels import case_of, every_kernel

RULE = RAdam.rule
# 0.7 is rectified from the tenth step on: the other side of the same comparison.
every_beta2 = pytest.mark.parametrize("beta2", [0.0, 0.5, 0.6, 2 / 3, 0.7])


def case_with(beta2: float) -> Case:
    """RAdam with this beta2, a decay and an `eps` that can be seen."""
    found = case_of(RULE)
    return Case(found.hypers | {"betas": (0.9, beta2), "eps": 1e-3}, found.flags, found.switches)


def rectified(case: Case, step: int) -> bool:
    """Whether the table of this step says so."""
    problem = testing.make_problem(RULE, case, (1, 1), torch.float32, torch.float32, 0)
    problem.counters["step"] = step - 1.0
    return bool(testing.next_table(RULE, case, problem)[RULE.spec.table.index("rectified")])


@every_beta2
def test_up_to_two_thirds_no_step_is_rectified(beta2: float) -> None:
    found = [step for step in range(1, 21) if rectified(case_with(beta2), step)]
    assert found == ([] if beta2 < 0.7 else list(range(10, 21)))


@every_kernel
@every_beta2
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_twenty_steps_follow_torch(exact: bool, beta2: float, how: str) -> None:
    testing.assert_near_torch(RULE, case_with(beta2), how, exact)


@every_beta2
def test_twenty_steps_inside_backward_follow_torch(beta2: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    arguments = {"lr": 0.01, "betas": (0.9, beta2), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = RAdam([ours], **arguments)
    oracle = torch.optim.RAdam([theirs], foreach=False, **arguments)
    for _ in range(20):
        x = torch.randn(9, 7, generator=generator)
        for weight, linear in ((ours, radam_linear), (theirs, torch.nn.functional.linear)):
            linear(x, weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
        oracle.zero_grad()
    # Steps of lr times a bounded moment, from gradients that differ by the order of sums of nine: 20 times 64 roundings
    # of a change below 0.1, and one of a weight below 4 in each step.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=20 * 2.0**-24 * (64 * 0.1 + 4))
