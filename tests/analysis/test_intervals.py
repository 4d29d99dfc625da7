"""Intervals hold every value that the operation can have."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forge_dsl.analysis import fold
from forge_dsl.analysis import intervals as iv
from forge_dsl.analysis.intervals import Interval

INF = math.inf
ends = st.sampled_from([-INF, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, INF])


@st.composite
def inside(draw: st.DrawFn) -> tuple[Interval, float]:
    """An interval and a finite value in it."""
    low, high = sorted((draw(ends), draw(ends)))
    interval = Interval(low, high, draw(st.booleans()), draw(st.booleans()))
    value = draw(st.floats(max(low, -1e3), min(high, 1e3)) if low <= 1e3 and high >= -1e3 else st.just(low))
    # Underflow is left aside.
    assume(interval.has(value) and math.isfinite(value) and (value == 0 or abs(value) > 1e-50))
    return interval, value


def almost(interval: Interval, value: float) -> bool:
    """Whether `value` is inside, up to the rounding of one operation at an end."""
    if math.isnan(value) or interval.has(value):
        return True
    slack = 1e-9 * max(1.0, abs(value))
    return interval.low - slack <= value <= interval.high + slack and value != 0.0


PAIRS: dict[str, tuple[Callable[[Interval, Interval], Interval], Callable[[float, float], float]]] = {
    "add": (iv.add, fold.BINARY["+"]),
    "subtract": (iv.subtract, fold.BINARY["-"]),
    "multiply": (iv.multiply, fold.BINARY["*"]),
    "divide": (iv.divide, fold.divide),
    "power": (iv.power, fold.power),
    "minimum": (iv.minimum, fold.minimum),
    "maximum": (iv.maximum, fold.maximum),
    "hull": (iv.hull, lambda a, b: a),
}


@pytest.mark.parametrize("name", PAIRS)
def test_binary_operations(name: str) -> None:
    image, function = PAIRS[name]

    @given(inside(), inside())
    def holds(a: tuple[Interval, float], b: tuple[Interval, float]) -> None:
        result = function(a[1], b[1])
        assume(math.isfinite(result) and (result != 0 or name != "power"))
        assert almost(image(a[0], b[0]), result)

    holds()


@given(inside())
def test_unary_operations(a: tuple[Interval, float]) -> None:
    interval, value = a
    assert iv.negate(interval).has(-value)
    assert iv.absolute(interval).has(abs(value))
    assert almost(iv.square(interval), value * value)
    if value != 0 and math.isfinite(1 / value):
        assert almost(iv.reciprocal(interval), 1 / value)


@given(inside(), inside(), inside())
def test_lerp(a: tuple[Interval, float], b: tuple[Interval, float], t: tuple[Interval, float]) -> None:
    assert almost(iv.lerp(a[0], b[0], t[0]), a[1] + t[1] * (b[1] - a[1]))


@given(inside(), inside())
def test_meet_holds_what_is_in_both(a: tuple[Interval, float], b: tuple[Interval, float]) -> None:
    if b[0].has(a[1]):
        assert iv.meet(a[0], b[0]).has(a[1])


@pytest.mark.parametrize(
    ("a", "b", "within"),
    [
        (Interval(0.0, 1.0), Interval(0.0, 1.0), True),
        (Interval(0.0, 1.0), Interval(0.0, 1.0, True), False),
        (Interval(0.0, 1.0, True), Interval(0.0, 1.0, True), True),
        (Interval(0.0, INF), Interval(0.0, INF, False, True), True),
        (Interval(-1.0, 1.0), Interval(0.0, 1.0), False),
    ],
)
def test_within(a: Interval, b: Interval, within: bool) -> None:
    assert a.within(b) is within


def test_a_decay_to_the_step_is_below_one() -> None:
    beta, step = Interval(0.0, 1.0, False, True), Interval(1.0, INF, False, True)
    assert iv.subtract(iv.point(1.0), iv.power(beta, step)) == Interval(0.0, 1.0, True, False)
    assert iv.power(iv.point(0.9), step) == Interval(0.0, 0.9, True, False)
