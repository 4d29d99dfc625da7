"""The first-use check of the kernel for Hopper on one: it passes, compiles nothing of its own, and is done once."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch

from forge_dsl import optim, testing
from forge_dsl.runtime import hopper, launch, trust
from forge_dsl.runtime.linear import fused_linear
from tests.dispatch import linear_step
from tests.gpu import kept

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper, reason="needs a GPU of compute capability 9.0")]

NAMES = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_KINDS", {})
    monkeypatch.setattr(trust, "_HELD", weakref.WeakSet())


def problem_of(rule: Any, rows: int = 2304, columns: int = 2048, tokens: int = 512, state: torch.dtype = BF16) -> Any:
    case = testing.cases(rule)[0]
    x, dy = (torch.randn(tokens, side, device="cuda", dtype=BF16) for side in (columns, rows))
    problem = testing.make_problem(rule, case, (rows, columns), BF16, state, 0)
    return case, x, dy, problem, testing.next_table(rule, case, problem)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_passes_without_a_warning(name: str) -> None:
    rule = getattr(optim, name).rule
    for rows, columns, tokens, state in ((2304, 2048, 512, BF16), (2304, 2048, 2048, FP32), (2312, 2056, 100, BF16)):
        case, x, dy, problem, _ = problem_of(rule, rows, columns, tokens, state)
        found = hopper.find(rule, x, dy, problem.weight, problem.states, case.switches)
        assert found is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trust.holds(found, rule, x, problem.weight, problem.states, case.switches)


@pytest.mark.parametrize("columns", [2048, 2056])
@pytest.mark.parametrize(
    ("weight", "state"),
    [("bf16", "int8"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "int8"), ("bf16+8", "fp8"), ("bf16+16", "fp32")],
)
def test_every_format_passes_without_a_warning(weight: str, state: str, columns: int) -> None:
    rule = optim.AdamW.rule
    for case in (testing.cases(rule)[0], testing.cases(rule)[-1]):
        held = kept.make(rule, case, (2304, columns), weight, state)
        x, dy = (torch.randn(512, side, device="cuda", dtype=BF16) for side in (columns, 2304))
        found = hopper.find(rule, x, dy, held.weight, held.states, case.switches, held.storage)
        assert found is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trust.holds(found, rule, x, held.weight, held.states, case.switches, held.storage)


def test_the_check_compiles_the_kernel_that_is_used_and_no_other() -> None:
    rule = optim.AdamW.rule
    case, x, dy, problem, table = problem_of(rule)
    compiled: list[object] = []
    linear_step(rule, x, dy, problem.weight, problem.states, table, case.switches, False)
    cached = rule.hopper_kernel.device_caches[torch.cuda.current_device()][0]
    compiled.extend(cached)
    found = hopper.find(rule, x, dy, problem.weight, problem.states, case.switches)
    assert found is not None
    hopper.linear_step_hopper(rule, x, dy, problem.weight, problem.states, table, case.switches)
    trust.disagreement(rule, x, problem.weight, problem.states, case.switches, found.constants)
    assert list(cached) == compiled


@pytest.mark.parametrize("rounding", [False, True])
def test_no_step_after_the_first_waits_for_the_device(rounding: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(2304, 2048, device="cuda", dtype=BF16))
    optimizer = optim.AdamW([weight], stochastic_rounding=rounding)
    x = torch.randn(512, 2048, device="cuda", dtype=BF16)

    def step() -> None:
        fused_linear(x, weight, None, optim.AdamW).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert list(trust._KINDS.values()) == [True]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(trust._KINDS) == 1


def test_a_wrong_kernel_leaves_the_weight_to_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = optim.AdamW.rule
    case, x, dy, ours, table = problem_of(rule)
    portable = ours.clone()
    plan = trust._launch
    # The table of another step: a right kernel with wrong numbers.
    monkeypatch.setattr(trust, "_launch", lambda r, x, dy, p, t, *more: plan(r, x, dy, p, 1.1 * t, *more))
    with pytest.warns(
        RuntimeWarning, match="the portable one is: on a small random weight .* differ from the reference"
    ):
        linear_step(rule, x, dy, ours.weight, ours.states, table, case.switches, False)
    launch.linear_step_portable(rule, x, dy, portable.weight, portable.states, table, case.switches, False)
    for (name, a), (_, b) in zip(ours.tensors(rule), portable.tensors(rule), strict=True):
        testing.assert_same_bits(a, b, name)


def test_a_capture_before_any_check_goes_on_unchecked_and_the_next_launch_is_checked() -> None:
    rule = optim.AdamW.rule
    case, x, dy, problem, table = problem_of(rule)
    found = hopper.find(rule, x, dy, problem.weight, problem.states, case.switches)
    assert found is not None
    hopper.linear_step_hopper(rule, x, dy, problem.weight, problem.states, table, case.switches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear_step(rule, x, dy, problem.weight, problem.states, table, case.switches, False)
    assert not trust._KINDS
    linear_step(rule, x, dy, problem.weight, problem.states, table, case.switches, False)
    assert list(trust._KINDS.values()) == [True]
