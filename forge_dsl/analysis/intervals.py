"""Intervals of the extended reals with open or closed ends, and what each operation does to them.

The arithmetic is exact: that a product of positive numbers may underflow to zero is left aside.
An interval holds every value that is a number; NaN is nobody's element. So the root of [-1, 4] is [0, 2]: the caller
asks first whether the argument may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from forge_dsl.analysis import fold
from forge_dsl.spec import Range

INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`; an open end is outside."""

    low: float = -INF
    high: float = INF
    low_open: bool = False
    high_open: bool = False

    def has(self, value: float) -> bool:
        """Whether `value` is inside."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    @property
    def may_be_negative(self) -> bool:
        """Whether some value is below 0."""
        return self.low < 0

    @property
    def is_positive(self) -> bool:
        """Whether every value is above 0."""
        return self.low > 0 or (self.low == 0 and self.low_open)

    def within(self, other: Interval) -> bool:
        """Whether every value is in `other`. An infinite end that is open counts as one that is closed."""
        low = self.low > other.low or (
            self.low == other.low and (self.low_open or not other.low_open or math.isinf(self.low))
        )
        high = self.high < other.high or (
            self.high == other.high and (self.high_open or not other.high_open or math.isinf(self.high))
        )
        return low and high


ALL = Interval()
UNIT = Interval(0.0, 1.0)
NON_NEGATIVE = Interval(0.0)
POSITIVE = Interval(0.0, INF, True)


def of_range(valid: Range | None) -> Interval:
    """The interval of a declared range."""
    return ALL if valid is None else Interval(valid.low, valid.high, valid.low_open, valid.high_open)


def point(value: float) -> Interval:
    """The interval of one number."""
    return ALL if math.isnan(value) else Interval(value, value)


def hull(a: Interval, b: Interval) -> Interval:
    """The smallest interval that holds both."""
    low, low_open = min((a.low, a.low_open), (b.low, b.low_open))
    high, high_closed = max((a.high, not a.high_open), (b.high, not b.high_open))
    return Interval(low, high, low_open, not high_closed)


def meet(a: Interval, b: Interval) -> Interval:
    """What is in both; `b` if nothing is."""
    low, low_open = max((a.low, a.low_open), (b.low, b.low_open))
    high, high_closed = min((a.high, not a.high_open), (b.high, not b.high_open))
    if low > high or (low == high and (low_open or not high_closed)):
        return b
    return Interval(low, high, low_open, not high_closed)


def negate(a: Interval) -> Interval:
    """-a."""
    return Interval(-a.high, -a.low, a.high_open, a.low_open)


def add(a: Interval, b: Interval) -> Interval:
    """a + b."""
    low, high = a.low + b.low, a.high + b.high
    return _made(low, high, a.low_open or b.low_open, a.high_open or b.high_open)


def subtract(a: Interval, b: Interval) -> Interval:
    """a - b."""
    return add(a, negate(b))


def multiply(a: Interval, b: Interval) -> Interval:
    """a * b, with 0 * inf = 0: an infinite end stands for arbitrarily large numbers."""
    return _corners(a, b, _product)


def reciprocal(a: Interval) -> Interval:
    """1 / a, for an `a` that does not hold 0 inside; anything if it does."""
    if a.low >= 0 and not (a.low == 0 and not a.low_open):
        return Interval(1 / a.high, INF if a.low == 0 else 1 / a.low, a.high_open or math.isinf(a.high), a.low_open)
    if a.high <= 0 and not (a.high == 0 and not a.high_open):
        return negate(reciprocal(negate(a)))
    if a.low >= 0:
        return Interval(0.0 if math.isinf(a.high) else fold.divide(1.0, a.high), INF, a.high_open)
    return ALL


def divide(a: Interval, b: Interval) -> Interval:
    """a / b."""
    return multiply(a, reciprocal(b))


def square(a: Interval) -> Interval:
    """a * a, both factors the same value."""
    if a.low >= 0:
        return multiply(a, a)
    if a.high <= 0:
        return square(negate(a))
    high, high_closed = max((-a.low, not a.low_open), (a.high, not a.high_open))
    return Interval(0.0, high * high, False, not high_closed)


def absolute(a: Interval) -> Interval:
    """abs(a)."""
    if a.low >= 0:
        return a
    if a.high <= 0:
        return negate(a)
    high, high_closed = max((-a.low, not a.low_open), (a.high, not a.high_open))
    return Interval(0.0, high, False, not high_closed)


def sign(a: Interval) -> Interval:
    """-1, 0 or 1."""
    low = 1.0 if a.is_positive else 0.0 if a.low >= 0 else -1.0
    high = -1.0 if negate(a).is_positive else 0.0 if a.high <= 0 else 1.0
    return Interval(low, high)


def minimum(a: Interval, b: Interval) -> Interval:
    """min(a, b)."""
    return negate(maximum(negate(a), negate(b)))


def maximum(a: Interval, b: Interval) -> Interval:
    """max(a, b)."""
    low, low_open = max((a.low, a.low_open), (b.low, b.low_open))
    high, high_closed = max((a.high, not a.high_open), (b.high, not b.high_open))
    return Interval(low, high, low_open, not high_closed)


def lerp(a: Interval, b: Interval, t: Interval) -> Interval:
    """a + t * (b - a): between a and b for t in [0, 1]."""
    if not t.within(UNIT):
        return add(a, multiply(t, subtract(b, a)))
    rest = subtract(point(1.0), t)
    return meet(hull(a, b), add(multiply(rest, a), multiply(t, b)))


def increasing(function: Callable[[float], float], a: Interval, domain: Interval = ALL) -> Interval:
    """The image under an increasing function, of what lies in its domain."""
    inside = meet(a, domain)
    return _made(function(inside.low), function(inside.high), inside.low_open, inside.high_open)


def power(a: Interval, b: Interval) -> Interval:
    """a ** b, for a constant whole `b` or a base that is not negative; anything else is unknown."""
    if b.low == b.high and b.low == int_of(b.low):
        return _whole_power(a, int(b.low))
    if a.may_be_negative:
        fraction = b.low == b.high and math.isfinite(b.low) and b.low != math.floor(b.low)
        if not fraction or a.high < 0:
            return ALL
        # The rest has no real power.
        a = Interval(0.0, a.high, False, a.high_open)
    image = _corners(a, b, fold.power)
    if a.has(1.0) or b.has(0.0):
        image = hull(image, point(1.0))
    if a.is_positive:
        return meet(image, POSITIVE)
    return image if b.low >= 0 else NON_NEGATIVE


def int_of(value: float) -> float:
    """`value` if it is a whole number of moderate size, else NaN."""
    return value if abs(value) <= 1024 and value == math.floor(value) else math.nan


def _whole_power(a: Interval, exponent: int) -> Interval:
    if exponent < 0:
        return reciprocal(_whole_power(a, -exponent))
    if exponent == 0:
        return point(1.0)
    if exponent % 2 == 0:
        a = absolute(a)
    return _made(fold.power(a.low, exponent), fold.power(a.high, exponent), a.low_open, a.high_open)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _corners(a: Interval, b: Interval, function: Callable[[float, float], float]) -> Interval:
    """The hull of a function that is monotonic in each argument, from its values at the four corners."""
    corners = []
    for x, x_open in ((a.low, a.low_open), (a.high, a.high_open)):
        for y, y_open in ((b.low, b.low_open), (b.high, b.high_open)):
            value = function(x, y)
            # A closed zero factor is reached whatever the other factor does.
            reached = function is _product and ((x == 0 and not x_open) or (y == 0 and not y_open))
            corners.append((value, (x_open or y_open) and not reached))
    if any(math.isnan(value) for value, _ in corners):
        return ALL
    low, low_open = min(corners)
    high, high_closed = max((value, not is_open) for value, is_open in corners)
    return Interval(low, high, low_open, not high_closed)


def _made(low: float, high: float, low_open: bool, high_open: bool) -> Interval:
    low = -INF if math.isnan(low) else low
    high = INF if math.isnan(high) else high
    return Interval(low, high, low_open, high_open)
