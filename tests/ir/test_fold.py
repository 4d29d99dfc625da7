"""Folding: what may be computed or left out when a program is compiled, bit for bit, and what may not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forge_dsl.ir.passes.fold import fold, round_fp32
from tests.ir.programs import build, numbers, run, same_bits, show

FOLDED = {
    "(add 1 2)": "3",
    "(sub 0.1 0.3)": "-0.200000018",  # of the fp32 numbers, not of the decimal ones
    "(mul 3e38 10)": "inf",
    "(mul 1e-30 1e-30)": "0",
    "(div 1 3)": "0.333333343",
    "(div 1 -0)": "-inf",
    "(sqrt 2)": "1.41421354",
    "(rsqrt 3)": "0.577350259",  # 1 / 1.73205078, each rounded
    "(exp (log (abs -3)))": "3",
    "(pow 2 0.5)": "1.41421354",
    "(max 1 (min 2 3))": "2",
    "(min -0 0)": "0",
    "(max -0 -0)": "0",
    "(select (isfinite inf) grad weight)": "weight",
    "(neg 0)": "-0",
    "(lt 1 2)": "true",
    "(ne 1 1)": "false",
    "(not true)": "false",
    "(neg (neg grad))": "grad",
    "(not (not (lt grad 0)))": "(lt grad 0)",
    "(mul 1 grad)": "grad",
    "(mul grad 1)": "grad",
    "(div grad 1)": "grad",
    "(mul (add 0.5 0.5) grad)": "grad",
    "(select (lt grad 0) weight weight)": "weight",
    "(choose:f weight weight)": "weight",
    "(select true grad weight)": "grad",
    "(select (lt 2 1) grad weight)": "weight",
    "(select (and true (lt grad 0)) grad weight)": "(select (lt grad 0) grad weight)",
    "(select (and (lt grad 0) false) grad weight)": "weight",
    "(select (or (lt grad 0) true) grad weight)": "grad",
    "(select (or false (lt grad 0)) grad weight)": "(select (lt grad 0) grad weight)",
}
KEPT = [
    *("(add grad 0)", "(add 0 grad)", "(sub grad 0)", "(sub grad grad)", "(mul grad 0)", "(mul 0 grad)"),
    *("(div grad grad)", "(div 0 grad)", "(mul grad -1)", "(mul grad 2)", "(div grad 2)", "(mul (mul grad 2) 0.5)"),
    *("(add (add grad 1) 2)", "(sub (add grad 1) 1)", "(mul (mul grad 2) 3)", "(neg (sub grad weight))"),
    *("(max grad grad)", "(min grad inf)", "(abs (neg grad))", "(abs (abs grad))", "(sign (sign grad))"),
    *("(select (eq grad grad) grad weight)", "(select (lt grad grad) grad weight)", "(sqrt (mul grad grad))"),
    *(
        "(pow grad 1)",
        "(add grad weight)",
        "(add weight grad)",
        "(mul grad weight)",
        "(mul weight grad)",
    ),
]


@pytest.mark.parametrize(("before", "after"), FOLDED.items(), ids=FOLDED.keys())
def test_it_folds(before: str, after: str) -> None:
    assert show(fold(build(f"weight = {before}"))) == after


@pytest.mark.parametrize("text", KEPT)
def test_it_leaves_alone_what_is_not_exact(text: str) -> None:
    assert show(fold(build(f"weight = {text}"))) == text


@pytest.mark.parametrize("text", [*FOLDED, *KEPT])
@pytest.mark.parametrize("f", [False, True])
def test_folding_changes_no_bit(text: str, f: bool) -> None:
    inputs = {"grad": numbers((500,), 1), "weight": numbers((500,), 2)}
    program = build(f"weight = {text}")
    before, after = (run(one, inputs, {}, {"f": f})["weight"] for one in (program, fold(program)))
    assert same_bits(before, after)


@pytest.mark.parametrize("code", ["add", "sub", "mul", "div", "lt", "le", "eq", "ne"])
def test_constants_are_combined_as_fp32_combines_them(code: str) -> None:
    values = [float(x) for x in numbers((24,), 3) if np.isfinite(x)]
    for a, b in itertools.product(values, values):
        program = build(f"weight = ({code} {a!r} {b!r})")
        expected = run(program, {"grad": np.zeros(1, np.float32)}, {})["weight"]
        folded = fold(program)
        assert folded.count(code) == 0
        assert same_bits(run(folded, {"grad": np.zeros(1, np.float32)}, {})["weight"], expected), (a, b)


@pytest.mark.parametrize("code", ["sqrt", "rsqrt", "abs", "sign", "neg", "exp", "log", "log1p", "expm1", "tanh"])
def test_functions_of_constants_are_rounded_once(code: str) -> None:
    for value in map(float, numbers((200,), 4)):
        program = build(f"weight = ({code} {value!r})")
        before, after = (run(one, {"grad": np.zeros(1, np.float32)}, {})["weight"] for one in (program, fold(program)))
        assert same_bits(before, after), value


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-45, 1e-46, 3.4028235e38, 3.4028236e38, 1e39, -1e39, 16777217.0, -0.0])
def test_rounding_to_fp32_is_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        assert same_bits(np.float32(round_fp32(value)), np.float32(value))


def test_equal_operations_meet_after_folding() -> None:
    program = fold(build("weight = (add (sqrt (mul 1 grad)) (sqrt grad))"))
    assert program.count("sqrt") == 1
