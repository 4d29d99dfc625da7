"""Scalars of a step follow IEEE float64, whatever the operands: compared with torch, bit for bit."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from forge_dsl.runtime import ieee
from forge_dsl.runtime.ieee import Real

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan]
numbers = st.one_of(st.sampled_from(SPECIAL), st.floats())


def same(ours: float, theirs: float) -> bool:
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return ours == theirs and math.copysign(1, ours) == math.copysign(1, theirs)


def tensor(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow])
@given(a=numbers, b=numbers)
def test_arithmetic_is_that_of_torch(op, a: float, b: float) -> None:
    expected = op(tensor(a), tensor(b)).item()
    for left, right in ((Real(a), b), (a, Real(b)), (Real(a), Real(b))):
        result = op(left, right)
        assert type(result) is Real
        if op is operator.pow and math.isfinite(expected) and expected != 0:
            assert result == pytest.approx(expected, rel=1e-15)  # one ulp: torch's vectorised pow is not libm's
        else:
            assert same(result, expected)


@given(a=numbers, b=numbers)
def test_remainder_has_the_sign_of_the_divisor(a: float, b: float) -> None:
    result = Real(a) % b
    assert same(result, a % b if b != 0 else math.nan)


def test_division_by_zero_and_roots_of_negatives_never_raise() -> None:
    one, zero = Real(1), Real(0)
    assert one / 0 == math.inf and -one / 0 == -math.inf and one / -zero == -math.inf
    assert math.isnan(zero / 0) and math.isnan(zero % 0) and math.isnan((-one) ** 0.5)
    assert zero**-1 == math.inf and (-zero) ** -1 == -math.inf and (-zero) ** -2 == math.inf
    assert Real(10) ** 400 == math.inf and Real(-10) ** 401 == -math.inf and Real(-10) ** 400 == math.inf


UNARY = ["sqrt", "rsqrt", "exp", "log", "log1p", "expm1", "tanh", "abs", "sign"]


@pytest.mark.parametrize("name", UNARY)
@given(x=numbers)
@example(x=710.0)
@example(x=-1.0)
def test_functions_are_those_of_torch(name: str, x: float) -> None:
    expected = getattr(torch, name)(tensor(x)).item()
    result = getattr(ieee, name)(Real(x))
    assert type(result) is Real
    if math.isfinite(expected) and name not in ("abs", "sign"):
        assert result == pytest.approx(expected, rel=1e-15, abs=1e-300)  # libm against torch's vectorised functions
    elif name == "sign":
        assert result == expected
    else:
        assert same(result, expected)


@given(a=numbers, b=numbers, c=numbers)
def test_minimum_maximum_and_clamp_propagate_nan(a: float, b: float, c: float) -> None:
    def close(ours: float, theirs: float) -> bool:
        return same(ours, theirs) or ours == theirs == 0  # the sign of a zero is not defined

    assert close(ieee.minimum(a, b), torch.minimum(tensor(a), tensor(b)).item())
    assert close(ieee.maximum(a, b), torch.maximum(tensor(a), tensor(b)).item())
    assert close(ieee.maximum(a, b, c), torch.maximum(torch.maximum(tensor(a), tensor(b)), tensor(c)).item())
    assert close(ieee.clamp(a, b, c), torch.clamp(tensor(a), tensor(b), tensor(c)).item())


@given(a=st.floats(-1e6, 1e6), b=st.floats(-1e6, 1e6), w=st.floats(-2, 3))
def test_lerp_is_that_of_torch(a: float, b: float, w: float) -> None:
    assert ieee.lerp(a, b, w) == pytest.approx(torch.lerp(tensor(a), tensor(b), tensor(w)).item(), rel=1e-12, abs=1e-9)
    assert ieee.lerp(a, b, w) == a + w * (b - a) and ieee.lerp(a, b, 0.0) == a


@given(x=numbers)
def test_selection_and_comparison(x: float) -> None:
    assert ieee.isfinite(Real(x)) == math.isfinite(x)
    assert same(ieee.where(True, x, 1.0), x) and same(ieee.where(False, 1.0, x), x)
    assert (Real(x) == Real(x)) == (not math.isnan(x))
    assert same(-Real(x), -x) and same(abs(Real(x)), abs(x)) and type(-Real(x)) is Real
