"""Element-wise functions for Triton kernels, each also valid in Triton's interpreter.

Plain names are the fast ones: fp32 throughout, with the bound of each in its docstring (in units of the last place of
the result). Names ending in `_exact` compute in float64 and round once: within 0.51 ulp of the true value, as the
reference in `reference_math` does. Names ending in `64` serve the per-step scalars in float64 and run on a GPU only.
"""

from __future__ import annotations

from forge_dsl.runtime.triton_support import AVAILABLE, INTERPRETED, libdevice, tl, triton

# The interpreter's own conversion from fp32 to bf16 cuts the low bits off, where the hardware rounds to nearest even.
_CUTS_BF16 = tl.constexpr(INTERPRETED) if AVAILABLE else INTERPRETED
# It has no assembler either.
_PLAIN = _CUTS_BF16


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 `x`, a block or one number, in the type it is stored in, rounded once to nearest even."""
    x = tl.cast(x, tl.float32)
    if _CUTS_BF16 and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def divide(a, b):
    """a / b within 2 ulp for |b| from 2^-126 to 2^126; beyond, where a quotient can be tiny or b subnormal, 0 or inf.

    A reciprocal, and a product that may become part of a fused multiply-add. Triton's `/` also scales both sides by
    powers of two, which takes as long again.
    """
    a = tl.cast(a, tl.float32)
    b = tl.cast(b, tl.float32)
    if _PLAIN:
        return a / b
    else:
        inverse: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return a * tl.inline_asm_elementwise(inverse, "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def minimum(a, b):
    """The smaller of two, NaN if either is. A zero is +0: which of two zeros is smaller, devices do not agree on."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL) + 0.0


@triton.jit
def maximum(a, b):
    """The larger of two, NaN if either is. A zero is +0, as of `minimum`."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL) + 0.0


@triton.jit
def sign(x):
    """-1, 0 or 1; 0 for NaN, as torch has it."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def isfinite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def exp(x):
    """Within 2 + 1.25 |x| ulp: the argument of the hardware's exp2 and log2(e) itself are rounded to fp32."""
    return tl.exp(x)


@triton.jit
def log(x):
    """Within 4 ulp, or 2^-22 absolutely near 1."""
    return tl.log(x)


@triton.jit
def log1p(x):
    """Within 10 ulp: near zero, where the hardware's logarithm has an absolute error, by the series of artanh."""
    s = x / (2.0 + x)
    q = s * s
    p = 2.0 / 13.0
    p = p * q + 2.0 / 11.0
    p = p * q + 2.0 / 9.0
    p = p * q + 2.0 / 7.0
    p = p * q + 2.0 / 5.0
    p = p * q + 2.0 / 3.0
    p = (p * q) * s + 2.0 * s
    return tl.where(tl.abs(x) < 0.5, tl.where(x == 0, x, p), tl.log(1.0 + x))


@triton.jit
def expm1(x):
    """Within 8 ulp for |x| <= 1, then as `exp`: a polynomial near zero, where exp(x) - 1 would cancel."""
    p = 1.0 / 40320.0
    p = p * x + 1.0 / 5040.0
    p = p * x + 1.0 / 720.0
    p = p * x + 1.0 / 120.0
    p = p * x + 1.0 / 24.0
    p = p * x + 1.0 / 6.0
    p = p * x + 0.5
    p = (p * x) * x + x
    return tl.where(tl.abs(x) < 0.5, p, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """Within 8 ulp."""
    e = expm1(-2.0 * tl.abs(x))
    t = -e / (e + 2.0)
    return tl.where(x < 0, -t, t)


@triton.jit
def power(x, y):
    """x ** y as torch.pow, within 4 + |y| (2 + |log2 x|) ulp; a negative base needs a whole exponent."""
    x = tl.cast(x, tl.float32)
    y = tl.cast(y, tl.float32)
    return _signed_power(x, y, tl.exp2(y * tl.log2(tl.abs(x))))


@triton.jit
def _signed_power(x, y, magnitude):
    # Choices within choices and no `|`: in the interpreter a scalar condition does not combine with a block's.
    half = y * 0.5
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(half) != half)
    endless = tl.abs(y) == float("inf")
    # The sign of a zero counts too; an infinite base has all powers, even those to a fraction.
    negative = tl.where(x == 0, 1.0 / x, x) < 0
    fraction = tl.where(tl.abs(x) == float("inf"), magnitude, tl.where(x < 0, float("nan"), magnitude))
    # Triton's unary minus is `0 - x`, which would lose the sign of a zero.
    opposite = -1.0 * magnitude
    power = tl.where(whole, tl.where(negative, tl.where(odd, opposite, magnitude), magnitude), fraction)
    power = tl.where(x == -1.0, tl.where(endless, 1.0, power), power)
    return tl.where(y == 0, 1.0, tl.where(x == 1.0, 1.0, power))


@triton.jit
def exp_exact(x):
    """exp, rounded once."""
    return tl.exp(tl.cast(x, tl.float64)).to(tl.float32)


@triton.jit
def log_exact(x):
    """log, rounded once."""
    return tl.log(tl.cast(x, tl.float64)).to(tl.float32)


@triton.jit
def log1p_exact(x):
    """log(1 + x), rounded once."""
    return _log1p_wide(tl.cast(x, tl.float64)).to(tl.float32)


@triton.jit
def expm1_exact(x):
    """exp(x) - 1, rounded once."""
    return _expm1_wide(tl.cast(x, tl.float64)).to(tl.float32)


@triton.jit
def tanh_exact(x):
    """tanh, rounded once."""
    return _tanh_wide(tl.cast(x, tl.float64)).to(tl.float32)


@triton.jit
def power_exact(x, y):
    """x ** y as torch.pow, rounded once."""
    x = tl.cast(x, tl.float64)
    y = tl.cast(y, tl.float64)
    return _signed_power(x, y, tl.exp(y * tl.log(tl.abs(x)))).to(tl.float32)


@triton.jit
def _log1p_wide(x):
    u = 1.0 + x
    corrected = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, corrected))


@triton.jit
def _expm1_wide(x):
    # Kahan: (u - 1) x / log(u) with u = exp(x), the rounding of u being common to both.
    u = tl.exp(x)
    corrected = (u - 1.0) * (x / tl.log(u))
    ordinary = tl.where((u == 0.0) | (u == float("inf")), u - 1.0, corrected)
    return tl.where(u == 1.0, x, ordinary)


@triton.jit
def _tanh_wide(x):
    e = _expm1_wide(-2.0 * tl.abs(x))
    t = -e / (e + 2.0)
    return tl.where(x < 0, -t, t)


@triton.jit
def power64(x, y):
    """x ** y in float64."""
    return libdevice.pow(tl.cast(x, tl.float64), tl.cast(y, tl.float64))


@triton.jit
def remainder64(x, y):
    """x % y in float64 with the sign of y, as Python has it."""
    x = tl.cast(x, tl.float64)
    y = tl.cast(y, tl.float64)
    r = libdevice.fmod(x, y)
    return tl.where((r != 0) & ((y < 0) != (r < 0)), r + y, r)


@triton.jit
def minimum64(a, b):
    """The smaller of two in float64, NaN if either is."""
    a = tl.cast(a, tl.float64)
    b = tl.cast(b, tl.float64)
    return tl.where((a <= b) | (a != a), a, b)


@triton.jit
def maximum64(a, b):
    """The larger of two in float64, NaN if either is."""
    a = tl.cast(a, tl.float64)
    b = tl.cast(b, tl.float64)
    return tl.where((a >= b) | (a != a), a, b)


@triton.jit
def clamp64(x, low, high):
    """`x` between `low` and `high` in float64."""
    return minimum64(maximum64(x, low), high)


@triton.jit
def lerp64(start, end, fraction):
    """`start + fraction (end - start)` in float64."""
    return start + fraction * (end - start)


@triton.jit
def rsqrt64(x):
    """1 / sqrt(x) in float64."""
    return 1.0 / tl.sqrt(tl.cast(x, tl.float64))


@triton.jit
def sign64(x):
    """-1, 0 or 1 in float64; 0 for NaN."""
    return tl.cast(sign(x), tl.float64)


@triton.jit
def log1p64(x):
    """log(1 + x) in float64."""
    return libdevice.log1p(tl.cast(x, tl.float64))


@triton.jit
def expm164(x):
    """exp(x) - 1 in float64."""
    return libdevice.expm1(tl.cast(x, tl.float64))


@triton.jit
def tanh64(x):
    """tanh in float64."""
    return libdevice.tanh(tl.cast(x, tl.float64))
