"""Whatever the program: passes keep its value, bit for bit in exact arithmetic, within roundings in fast."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_dsl.analysis.fold import fold_scalar
from forge_dsl.ir.names import Namer
from forge_dsl.ir.passes.dead import remove_dead
from forge_dsl.ir.passes.fast import hoist_factors, share_reciprocals
from forge_dsl.ir.passes.fold import fold
from forge_dsl.ir.passes.specialise import specialise
from forge_dsl.ir.program import Program
from tests.ir.programs import build, numbers, run, same_bits

UNARY = ["neg", "sqrt", "rsqrt", "abs", "sign"]
BINARY = ["add", "sub", "mul", "div", "min", "max"]
COMPARE = ["lt", "le", "gt", "ge", "eq", "ne"]
CONSTANTS = ["0", "-0", "1", "-1", "2", "0.1", "inf", "1e-40", "3e38"]
SWITCHES = ["f", "g"]


def applied(codes: Iterable[str], *arguments: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from(list(codes)), *arguments).map(lambda parts: f"({' '.join(parts)})")


def choices(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return applied([f"choose:{name}" for name in SWITCHES], inner, inner)


def selections(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    conditions = st.recursive(
        applied(COMPARE, inner, inner) | applied(["isfinite"], inner) | st.sampled_from(["true", "false"]),
        lambda conditions: applied(["and", "or"], conditions, conditions) | applied(["not"], conditions),
        max_leaves=3,
    )
    return applied(["select"], conditions, inner, inner)


def exact(program: Program, switches: dict[str, bool]) -> Program:
    return remove_dead(fold(specialise(remove_dead(fold(program)), switches, frozenset())))


ANY = st.recursive(
    st.sampled_from(["grad", "weight", "m", "$a", "$b", *CONSTANTS]),
    lambda inner: applied(UNARY, inner) | applied(BINARY, inner, inner) | selections(inner) | choices(inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(ANY, ANY, st.booleans(), st.booleans())
def test_exact_passes_change_no_bit(weight: str, state: str, f: bool, g: bool) -> None:
    program = build(f"weight = {weight}", f"m = {state}")
    inputs = {name: numbers((64,), seed) for seed, name in enumerate(("grad", "weight", "m"))}
    slots, switches = {"a": 0.1, "b": -3.0}, {"f": f, "g": g}
    before = run(program, inputs, slots, switches)
    after = run(exact(program, switches), inputs, slots)
    for name, value in before.items():
        # What is not written keeps its value.
        assert same_bits(value, after.get(name, inputs[name])), name


@settings(max_examples=200, deadline=None)
@given(ANY)
def test_folding_twice_is_folding_once(text: str) -> None:
    once = fold(build(f"weight = {text}"))
    assert fold(once) == once


@settings(max_examples=200, deadline=None)
@given(ANY, st.booleans(), st.booleans())
def test_no_pass_adds_operations(text: str, f: bool, g: bool) -> None:
    program = build(f"weight = {text}")
    assert len(exact(program, {"f": f, "g": g}).ops) <= len(program.ops)


# Nothing cancels, and no comparison could turn a rounding into another branch.
POSITIVE = st.recursive(
    st.sampled_from(["grad", "weight", "m", "$a", "$b", "$c", "2", "0.1"]),
    lambda inner: applied(["sqrt", "rsqrt"], inner) | applied(["mul", "div", "add"], inner, inner) | choices(inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(POSITIVE, POSITIVE)
@example("grad", "(div 2 (div $a 0.1))")
def test_fast_passes_stay_within_roundings(weight: str, state: str) -> None:
    """Re-association shows as one rounding an operation at most: in float64, in which this runs, and in fp32 where two
    constants have met and become one.
    """
    program = fold(build(f"weight = {weight}", f"m = {state}"))
    rng = np.random.default_rng(0)
    inputs = {name: rng.uniform(0.5, 2.0, 32) for name in ("grad", "weight", "m")}
    env = {"a": 0.7, "b": 1.3, "c": 1.1}
    fast = remove_dead(fold(share_reciprocals(hoist_factors(program, Namer(set(env))))))
    met = {op.attr for op in fast.ops if op.code == "const"} - {op.attr for op in program.ops if op.code == "const"}
    bound = 4 * (len(program.ops) + len(fast.ops)) * 2.0**-53 + 4 * len(program.ops) * 2.0**-24 * bool(met)
    for f in (False, True):
        switches = {"f": f, "g": not f}
        before = run(program, inputs, env, switches)
        after = run(fast, inputs, {slot.name: fold_scalar(slot.expr, env) for slot in fast.slots}, switches)
        for name, value in after.items():
            finite = np.isfinite(before[name]) & (before[name] < 1e300) & (before[name] > 1e-300)
            np.testing.assert_allclose(
                np.broadcast_to(value, (32,))[finite], np.broadcast_to(before[name], (32,))[finite], rtol=bound
            )


@settings(max_examples=200, deadline=None)
@given(POSITIVE)
def test_fast_passes_add_no_division(text: str) -> None:
    program = fold(build(f"weight = {text}"))
    fast = remove_dead(share_reciprocals(hoist_factors(program, Namer({"a", "b", "c"}))))
    assert fast.count("div", "rcp") <= program.count("div", "rcp")
