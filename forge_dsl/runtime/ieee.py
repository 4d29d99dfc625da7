"""IEEE float64 arithmetic for the scalars of a step: what a device computes where Python raises or turns complex."""

from __future__ import annotations

import math

Number = float | int


class Real(float):
    """A float64 whose operators follow IEEE 754: `1 / 0` is inf, `0 / 0` and `(-1) ** 0.5` are NaN, overflow is inf.

    Results stay `Real`. `%` has Python's sign convention, as the language has.
    """

    __slots__ = ()

    def __add__(self, other: Number) -> Real:
        return Real(float(self) + float(other))

    def __radd__(self, other: Number) -> Real:
        return Real(float(other) + float(self))

    def __sub__(self, other: Number) -> Real:
        return Real(float(self) - float(other))

    def __rsub__(self, other: Number) -> Real:
        return Real(float(other) - float(self))

    def __mul__(self, other: Number) -> Real:
        return Real(float(self) * float(other))

    def __rmul__(self, other: Number) -> Real:
        return Real(float(other) * float(self))

    def __truediv__(self, other: Number) -> Real:
        return _divide(float(self), float(other))

    def __rtruediv__(self, other: Number) -> Real:
        return _divide(float(other), float(self))

    def __mod__(self, other: Number) -> Real:
        return _remainder(float(self), float(other))

    def __rmod__(self, other: Number) -> Real:
        return _remainder(float(other), float(self))

    def __pow__(self, other: Number, modulus: None = None) -> Real:
        return _power(float(self), float(other))

    def __rpow__(self, other: Number, modulus: None = None) -> Real:
        return _power(float(other), float(self))

    def __neg__(self) -> Real:
        return Real(-float(self))

    def __pos__(self) -> Real:
        return self

    def __abs__(self) -> Real:
        return Real(math.fabs(self))


NAN = Real(math.nan)
INF = Real(math.inf)


def _divide(a: float, b: float) -> Real:
    if b != 0:
        return Real(a / b)
    if a == 0 or math.isnan(a):
        return NAN
    return Real(math.copysign(math.inf, a) * math.copysign(1.0, b))


def _remainder(a: float, b: float) -> Real:
    return Real(a % b) if b != 0 else NAN


def _power(base: float, exponent: float) -> Real:
    try:
        return Real(math.pow(base, exponent))
    except ValueError:
        if base != 0:
            return NAN
    except OverflowError:
        pass
    odd = exponent % 2 == 1
    return Real(math.copysign(math.inf, base)) if odd else INF


def sqrt(x: Number) -> Real:
    """Square root; NaN below zero, and -0 stays -0."""
    return Real(math.sqrt(x)) if x >= 0 else NAN


def rsqrt(x: Number) -> Real:
    """`1 / sqrt(x)`, infinite at zero with the sign of the zero."""
    return _divide(1.0, sqrt(x))


def exp(x: Number) -> Real:
    """Exponential; infinite where it overflows."""
    try:
        return Real(math.exp(x))
    except OverflowError:
        return INF


def log(x: Number) -> Real:
    """Natural logarithm; -inf at zero, NaN below."""
    if x > 0:
        return Real(math.log(x))
    return Real(-math.inf) if x == 0 else NAN


def log1p(x: Number) -> Real:
    """`log(1 + x)`; -inf at -1, NaN below."""
    if x > -1:
        return Real(math.log1p(x))
    return Real(-math.inf) if x == -1 else NAN


def expm1(x: Number) -> Real:
    """`exp(x) - 1`; infinite where it overflows."""
    try:
        return Real(math.expm1(x))
    except OverflowError:
        return INF


def tanh(x: Number) -> Real:
    """Hyperbolic tangent."""
    return Real(math.tanh(x))


def abs(x: Number) -> Real:
    """Magnitude."""
    return Real(math.fabs(x))


def sign(x: Number) -> Real:
    """-1, 0 or 1; 0 for NaN, as `torch.sign`."""
    return Real((x > 0) - (x < 0))


def minimum(first: Number, *others: Number) -> Real:
    """The least of two or more numbers; NaN if any is."""
    result = Real(first)
    for other in others:
        if not result <= other:
            result = NAN if math.isnan(result) else Real(other)
    return result


def maximum(first: Number, *others: Number) -> Real:
    """The greatest of two or more numbers; NaN if any is."""
    result = Real(first)
    for other in others:
        if not result >= other:
            result = NAN if math.isnan(result) else Real(other)
    return result


def clamp(x: Number, low: Number, high: Number) -> Real:
    """`min(max(x, low), high)`: `high` wins where the bounds cross, and NaN in any argument is NaN."""
    return minimum(maximum(x, low), high)


def lerp(start: Number, end: Number, weight: Number) -> Real:
    """`start + weight (end - start)`, as the language defines it and the device computes it."""
    a, b, w = Real(start), Real(end), Real(weight)
    return a + w * (b - a)


def isfinite(x: Number) -> bool:
    """Whether `x` is neither infinite nor NaN."""
    return math.isfinite(x)


def where(condition: bool, a: Number, b: Number) -> Real:
    """`a` if the condition holds, else `b`."""
    return Real(a) if condition else Real(b)
