"""Hazard: operands, weight and states of different types (autocast: fp32 weight, bf16 x and dy; and every other mix).

Each load is cast to fp32 by itself; operands of two types, or of float64, meet in fp32; no dot is TF32 (triton#2042).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import launch
from tests.hazards.kernels import ADAMW, SGD, assert_same, case_of, every_kernel, launched, make

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (17, 33, 65)


@every_kernel
@pytest.mark.parametrize(("x", "dy"), list(itertools.product((*FLOAT, torch.float64), repeat=2)), ids=str)
def test_operands_of_any_two_types(x: torch.dtype, dy: torch.dtype, how: str) -> None:
    step = make(SGD, case_of(SGD), SHAPE, x, dy)
    expected = step.expected()
    assert_same(step.run(how), expected)


@every_kernel
@pytest.mark.parametrize(("weight", "state"), list(itertools.product(FLOAT, repeat=2)), ids=str)
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_and_states_of_any_two_types(operand, weight: torch.dtype, state: torch.dtype, how: str) -> None:
    step = make(ADAMW, case_of(ADAMW, amsgrad=True), SHAPE, operand, operand, weight, state)
    expected = step.expected()
    assert_same(step.run(how), expected)


@every_kernel
def test_states_of_different_types(how: str) -> None:
    step = make(ADAMW, case_of(ADAMW, amsgrad=True), SHAPE)
    for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        state = step.problem.states[index]
        assert state is not None
        step.problem.states[index] = state.to(dtype)
    expected = step.expected()
    got = step.run(how)
    assert [tensor.dtype for tensor in got] == [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    assert_same(got, expected)


@launched
@pytest.mark.parametrize("how", ["elementwise", "many"])
@pytest.mark.parametrize("grad", FLOAT, ids=str)
def test_a_gradient_of_any_type(grad: torch.dtype, how: str) -> None:
    case = case_of(SGD)
    step = make(SGD, case, SHAPE)
    given = testing.integers((33, 65), 9, grad)
    truth = step.problem.clone()
    testing.reference_step(SGD, case, truth, given, step.table)
    if how == "many":
        items = [launch.Item(step.problem.weight, given, step.problem.states, step.table)]
        launch.many_step(SGD, items, case.switches, True)
    else:
        launch.elementwise_step(SGD, step.problem.weight, given, step.problem.states, step.table, case.switches, True)
    assert_same([t for _, t in step.problem.tensors(SGD)], [t for _, t in truth.tensors(SGD)])


@launched
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_fp32_operands_are_multiplied_as_fp32(exact: bool) -> None:
    """Against float64: TF32 keeps 11 bits of an operand, so that it would miss this bound by a factor of thousands."""
    step = make(SGD, case_of(SGD), (257, 33, 65))
    generator = torch.Generator().manual_seed(0)
    step.x = torch.randn(step.x.shape, generator=generator).to(step.x.device)
    step.dy = torch.randn(step.dy.shape, generator=generator).to(step.x.device)
    state = step.problem.states[0]
    assert state is not None
    before, (weight, momentum) = state.clone(), step.run("fused", exact)
    sizes = step.case.hypers
    gradient = step.dy.double().T @ step.x.double()
    assert sizes["weight_decay"] and sizes["momentum"]
    start = make(SGD, case_of(SGD), (257, 33, 65)).problem.weight.double()
    expected = sizes["momentum"] * before.double() + (1 - sizes["dampening"]) * (
        gradient + sizes["weight_decay"] * start
    )
    magnitude = step.dy.double().abs().T @ step.x.double().abs()
    assert ((momentum.double() - expected).abs() <= 257 * 2.0**-24 * magnitude + 2.0**-20).all()
    assert weight.isfinite().all()
