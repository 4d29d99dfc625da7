"""Hazard: Triton compiles anew for an integer that becomes 1 or a multiple of 16 (helion#2793).

Steps 1, 2, 15, 16, 17 and any learning rate run one compiled kernel: what changes from step to step is device data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_dsl import optim, testing
from forge_dsl.testing import Case
from tests.hazards.kernels import SGD, case_of, launched, make, recorded

RULES = {name: getattr(optim, name).rule for name in ("AdamW", "NAdam", "RAdam", "Adagrad", "SGDMomentum", "Lion")}
STEPS = [1, 2, 15, 16, 17]


def numbers(launches: list[Any]) -> list[Any]:
    """Of every launch, all that Triton could specialise on: whatever is no tensor, and whether addresses align."""
    found = []
    for grid, packed, keywords in launches:
        arguments = [one for value in packed for one in (value if isinstance(value, tuple) else (value,))]
        plain = [value for value in (*arguments, *keywords.values()) if not isinstance(value, torch.Tensor)]
        aligned = [value.data_ptr() % 16 for value in arguments if isinstance(value, torch.Tensor)]
        found.append((grid, plain, aligned))
    return found


@launched
@pytest.mark.parametrize("how", ["fused", "elementwise"])
@pytest.mark.parametrize("name", RULES)
def test_no_argument_of_a_launch_changes_with_the_step_or_a_hyper(name: str, how: str) -> None:
    rule, recorders = recorded(RULES[name], dry=True)
    case = testing.cases(rule)[0]
    seen = []
    for number, step in enumerate(STEPS):
        hypers = case.hypers | {"lr": 0.1 / (number + 1)}
        if "betas" in hypers:
            hypers["betas"] = (0.5 + number / 16, 0.75)
        changed = Case(hypers, case.flags, case.switches)
        one = make(rule, changed, (16, 32, 64))
        one.problem.counters |= {"step": float(step - 1)} if rule.spec.uses_step else {}
        one.table = testing.next_table(rule, changed, one.problem)
        testing.STEPS[how](rule, changed, one.problem, one.x, one.dy, one.table, True)
        seen.append(numbers([launch for recorder in recorders.values() for launch in recorder.launches]))
        for recorder in recorders.values():
            recorder.launches.clear()
    assert seen[0] and all(launches == seen[0] for launches in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles kernels")
@pytest.mark.parametrize("how", ["fused", "elementwise", "many"])
def test_steps_and_hypers_compile_one_kernel(how: str) -> None:
    rule, case = optim.AdamW.rule, case_of(optim.AdamW.rule)
    kernels = [rule.linear_kernel, rule.elementwise_kernel, rule.many_kernel]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for number, step in enumerate(STEPS):
        changed = Case(case.hypers | {"lr": 0.1 / (number + 1), "betas": (0.5, 0.75)}, case.flags, case.switches)
        one = make(rule, changed, (16, 32, 64))
        one.problem.counters["step"] = float(step - 1)
        one.table = testing.next_table(rule, changed, one.problem)
        one.run(how)
        counts.append(compiled())
    assert counts[0] >= 1 and set(counts) == {counts[0]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles kernels")
def test_the_prologue_compiles_once_too() -> None:
    weight = torch.nn.Parameter(torch.ones(32, 32, device="cuda"))
    optimizer = optim.AdamW([weight], lr=0.1)
    kernel = optim.AdamW.rule.scalars_kernel
    counts = []
    for step in range(1, 18):
        optimizer.param_groups[0]["lr"] = 0.1 / step
        optim.adamw_linear(torch.ones(16, 32, device="cuda"), weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert counts[0] >= 1 and set(counts) == {counts[0]}


def test_a_momentum_that_crosses_zero_is_what_changes_the_variant() -> None:
    switches = SGD.switches(lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
    assert dict(zip((s.text for s in SGD.spec.switches), switches, strict=True))["momentum != 0"] is False
