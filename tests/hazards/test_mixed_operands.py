"""Hazard: operands, weight and states of different types (autocast: fp32 weight, bf16 x and dy; and every other mix).

Each load is cast to fp32 by itself; operands of two types, or of float64, meet in fp32; no dot is TF32 (triton#2042).
"""

from __future__ import annotations

import itertools

import pytest
import torch

import forge_dsl
from forge_dsl import testing
from forge_dsl.runtime import launch
from tests.hazards.kernels import ADAMW, SGD, Step, assert_same, case_of, every_kernel, launched, make

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (17, 33, 65)
# Gradient, state and weight each meet a number of the rule first. Triton gives such a product the type of what was
# loaded, and the number too, which bf16 and fp16 do not have: so what is loaded has to be fp32 by then.
CONSTANTS = """optimizer Constants

hyper lr = 0.1 in [0, inf)

state slow

update:
  g      = 0.7 * grad
  slow   = 0.9 * slow + 0.3 * g
  weight = 0.8 * weight - lr * slow
"""


@every_kernel
@pytest.mark.parametrize(("x", "dy"), list(itertools.product((*FLOAT, torch.float64), repeat=2)), ids=str)
def test_operands_of_any_two_types(x: torch.dtype, dy: torch.dtype, how: str) -> None:
    step = make(SGD, case_of(SGD), SHAPE, x, dy)
    expected = step.expected()
    assert_same(step.run(how), expected)


@pytest.mark.parametrize("how", [pytest.param("fused", marks=launched), "banded"])
@pytest.mark.parametrize(("x", "dy"), list(itertools.product((*FLOAT, torch.float64), repeat=2)), ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_random_operands_of_any_two_types_keep_their_bits(
    exact: bool, x: torch.dtype, dy: torch.dtype, how: str
) -> None:
    """Small integers fit into every type; random numbers show an operand that meets the other in a smaller one.

    The bound: a product of two numbers in fp32 and its place in a sum of T are rounded at most T + 1 times by 2^-24 of
    the sum of magnitudes; float64 operands are rounded once each before; the rule, which is here the momentum times
    1 - dampening, is three roundings more. fp16 in the place of fp32 would be 2^-12 off in every operand, some forty
    times the bound.
    """
    tokens, rows, columns = SHAPE
    step = make(SGD, case_of(SGD), SHAPE)
    generator = torch.Generator().manual_seed(0)
    step.x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64).to(step.x.device, x)
    step.dy = torch.randn(tokens, rows, generator=generator, dtype=torch.float64).to(step.x.device, dy)
    momentum = step.problem.states[0]
    assert momentum is not None
    step.problem.weight.zero_()
    momentum.zero_()
    _, got = step.run(how, exact)
    share = 1 - step.case.hypers["dampening"]
    truth = share * (step.dy.double().T @ step.x.double())
    magnitude = share * (step.dy.double().abs().T @ step.x.double().abs())
    assert ((got.double() - truth).abs() <= (tokens + 6) * 2.0**-24 * magnitude).all()


def with_constants(weight: torch.dtype, state: torch.dtype) -> Step:
    """A step of the rule with numbers of its own, on a random weight and state of these types."""
    rule = forge_dsl.load(CONSTANTS).RULE
    return make(rule, testing.cases(rule)[0], SHAPE, weight=weight, state=state)


@every_kernel
@pytest.mark.parametrize(("weight", "state"), list(itertools.product(FLOAT, repeat=2)), ids=str)
def test_a_number_in_a_rule_has_not_the_type_of_what_is_loaded(
    weight: torch.dtype, state: torch.dtype, how: str
) -> None:
    step = with_constants(weight, state)
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
@pytest.mark.parametrize("rule", ["SGDMomentum", "Constants"])
def test_a_gradient_of_any_type(rule: str, grad: torch.dtype, how: str) -> None:
    step = make(SGD, case_of(SGD), SHAPE) if rule == "SGDMomentum" else with_constants(torch.float32, torch.float32)
    given = torch.randn((33, 65), generator=torch.Generator().manual_seed(9)).to(step.x.device, grad)
    truth = step.problem.clone()
    testing.reference_step(step.rule, step.case, truth, given.float(), step.table)
    weight, states, switches = step.problem.weight, step.problem.states, step.case.switches
    if how == "many":
        launch.many_step(step.rule, [launch.Item(weight, given, states, step.table)], switches, True)
    else:
        launch.elementwise_step(step.rule, weight, given, states, step.table, switches, True)
    assert_same([t for _, t in step.problem.tensors(step.rule)], [t for _, t in truth.tensors(step.rule)])


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
