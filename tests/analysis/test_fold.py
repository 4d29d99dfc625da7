"""Scalar arithmetic is IEEE float64 and never raises."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_dsl.analysis.builtins import BUILTINS
from forge_dsl.analysis.fold import BINARY, FUNCTIONS, NotConstant, evaluate, fold_scalar
from forge_dsl.language import syntax
from forge_dsl.language.parser import parse

INF, NAN = math.inf, math.nan


def value(text: str, **env: float | bool) -> float | bool:
    (statement,) = parse(f"optimizer X\nupdate:\n  weight = {text}").update
    assert isinstance(statement, syntax.Assign)
    return evaluate(statement.value, env)


def same(a: float, b: float) -> bool:
    return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", INF),
        ("-1 / 0", -INF),
        ("1 / -0", -INF),
        ("0 / 0", NAN),
        ("inf - inf", NAN),
        ("0 * inf", NAN),
        ("9 ** 9 ** 9", INF),
        ("(-9) ** 99999", -INF),
        ("(-8) ** (1 / 3)", NAN),
        ("0 ** 0", 1.0),
        ("0 ** -1", INF),
        ("(-0) ** -1", -INF),
        ("(-0) ** -2", INF),
        ("2 ** -1", 0.5),
        ("sqrt(-1)", NAN),
        ("sqrt(-0)", -0.0),
        ("rsqrt(0)", INF),
        ("rsqrt(4)", 0.5),
        ("log(0)", -INF),
        ("log(-1)", NAN),
        ("log1p(-1)", -INF),
        ("log1p(-2)", NAN),
        ("exp(1000)", INF),
        ("exp(-inf)", 0.0),
        ("expm1(1000)", INF),
        ("tanh(inf)", 1.0),
        ("sign(-3)", -1.0),
        ("sign(0 / 0)", 0.0),
        ("min(1, 0 / 0)", NAN),
        ("max(0 / 0, 1)", NAN),
        ("max(1, 2, 3)", 3.0),
        ("clamp(5, 0, 1)", 1.0),
        ("clamp(0 / 0, 0, 1)", NAN),
        ("lerp(1, 3, 0.5)", 2.0),
        ("7 % 3", 1.0),
        ("-7 % 3", 2.0),
        ("7 % 0", NAN),
        ("inf % 3", NAN),
        ("1 if 2 > 1 else 1 / 0", 1.0),
        ("where(1 > 2, 1, 4)", 4.0),
    ],
)
def test_values(text: str, expected: float) -> None:
    assert same(float(value(text)), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("not 1 > 2 and true", True),
        ("false or 1 != 1", False),
        ("isfinite(1e308 * 10)", False),
        ("0 / 0 == 0 / 0", False),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert value(text) is expected


def test_names() -> None:
    assert value("a * 2 if f else 0", a=3, f=True) == 6.0
    with pytest.raises(NotConstant) as caught:
        value("a + b", a=1)
    assert isinstance(caught.value.node, syntax.Name) and caught.value.node.id == "b"


@pytest.mark.parametrize("text", ["norm(1)", "sqrt(1, 2)", "max(1)", "first(m)", "a.T", "a[0]", "a @ b", "(1, 2)"])
def test_what_is_not_scalar_arithmetic_has_no_value(text: str) -> None:
    with pytest.raises(NotConstant):
        value(text, a=1, b=2)


floats = st.floats(allow_nan=True, allow_infinity=True)


@given(st.sampled_from(sorted(FUNCTIONS)), st.lists(floats, min_size=3, max_size=3))
def test_functions_never_raise(name: str, args: list[float]) -> None:
    assert isinstance(FUNCTIONS[name](*args[: BUILTINS[name].min_args]), float | bool)


@given(st.sampled_from(sorted(BINARY)), floats, floats)
def test_operators_never_raise(op: str, a: float, b: float) -> None:
    assert isinstance(BINARY[op](a, b), float)


def test_every_function_of_numbers_can_be_folded() -> None:
    assert set(FUNCTIONS) == set(BUILTINS) - {"where", "first"}


def test_a_condition_folds_to_a_number() -> None:
    assert fold_scalar(syntax.Boolean(True), {}) == 1.0
