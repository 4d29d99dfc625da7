"""Storage formats and stochastic rounding in Triton, bit for bit what `forge_dsl.formats` computes in PyTorch.

A tile is `[R, C]` of fp32, C a multiple of 64, its first column a multiple of 64 too. Loading and storing are the
caller's: codes are uint8 `[R, C]`, scales uint8 `[R, C // 64]` (in memory `[blocks, rows]`). What lies outside the
tensor must be zero before it is encoded. `EXACT` takes the correctly rounded root; without it the hardware's
approximation moves a rounding decision with a chance of about 2^-15, and no result by more than that decision.
"""

from __future__ import annotations

from forge_dsl.runtime import device_math
from forge_dsl.runtime.triton_support import tl, triton


@triton.jit
def half_mix(word):
    """`rounding.half_mixed` of uint32."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    return word ^ (word >> 15)


@triton.jit
def mix(word):
    """`rounding.mix` of uint32."""
    word = half_mix(word) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def multiplier(stream: tl.constexpr):
    """`rounding.multiplier`: a constant, folded when the kernel is compiled."""
    if stream == 0:
        return 0x846CA68B
    else:
        return mix(tl.cast((stream * 0x9E3779B1) % 0x100000000, tl.uint32)) | 1


@triton.jit
def turned(step, stream: tl.constexpr):
    """`rounding.turned` as uint32; `step` an int64."""
    if stream % 4 == 0:
        turn: tl.constexpr = 45
    elif stream % 4 == 1:
        turn: tl.constexpr = 27
    elif stream % 4 == 2:
        turn: tl.constexpr = 47
    else:
        turn: tl.constexpr = 23
    spread = ((step >> 6) & 0xFFFFFFFF).to(tl.uint32) * 0x9E3779B1
    place = mix(spread + stream) + (step & 63).to(tl.uint32) * turn
    return (place << 26) | (spread >> 6)


@triton.jit
def key_in(keys, stream: tl.constexpr):
    """`rounding.key_in`."""
    return keys[0], multiplier(stream), keys[1 + stream]


@triton.jit
def both_draws(key, rows, pairs):
    """Draws, uint32, of the even and of the odd column of rows and pairs that broadcast; `key` as of `key_in`."""
    base, factor, offset = key
    of_row = mix(rows.to(tl.uint32) * 0x9E3779B1 + base)
    place = half_mix(of_row ^ pairs.to(tl.uint32))
    odd = (place * factor + offset) >> 16
    return (odd ^ place) & 0xFFFF, odd


@triton.jit
def draws(key, rows, first_column, COLUMNS: tl.constexpr):
    """16-bit draws, int32 `[R, COLUMNS]`, of global `rows` and of columns from `first_column` (even) on."""
    pairs = (first_column >> 1) + tl.arange(0, COLUMNS // 2)
    even, odd = both_draws(key, rows[:, None], pairs[None, :])
    return tl.reshape(tl.join(even, odd), (rows.shape[0], COLUMNS)).to(tl.int32)


@triton.jit
def draw_at(key, rows, columns):
    """The same draws for blocks of single coordinates, at one word each: for kernels that walk a tensor flat."""
    even, odd = both_draws(key, rows, columns >> 1)
    return tl.where(columns & 1 == 1, odd, even).to(tl.int32)


@triton.jit
def rounded_stochastic(x, dtype: tl.constexpr, draws):
    """`rounding.rounded_stochastic`: fp32 `x` in bf16 or fp16 by 16-bit draws, unbiased; fp32 as it is."""
    bits = x.to(tl.int32, bitcast=True)
    if dtype == tl.bfloat16:
        top = (bits & 0x7FFFFFFF) >= 0x7F7F0000
        moved = bits + tl.where(top, 0, draws)
        bits = tl.where(x == x, moved, bits | 0x400000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + (draws >> 3)) & -8192).to(tl.float32, bitcast=True)
        steps = tl.abs(x) * 16777216.0
        whole = tl.floor(steps)
        up = draws.to(tl.float32) + 0.5 < (steps - whole) * 65536.0
        small = (whole + up.to(tl.float32)) * 5.9604644775390625e-08
        rounded = tl.where(magnitude < 0x38800000, small, normal)
        rounded = tl.where(magnitude < 0x477FE000, rounded, tl.abs(x))
        half = rounded.to(tl.float16).to(tl.int16, bitcast=True)
        return (half | ((bits >> 16) & 0x8000).to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(dtype == tl.float32)
        return x


@triton.jit
def stored(x, dtype: tl.constexpr, draws, STOCHASTIC: tl.constexpr):
    """`x` in a plain type, rounded stochastically or to nearest even."""
    if STOCHASTIC:
        return rounded_stochastic(x, dtype, draws)
    else:
        return device_math.rounded(x, dtype)


@triton.jit
def decode(codes, scales, FORMAT: tl.constexpr, NONNEGATIVE: tl.constexpr):
    """fp32 `[R, C]` of uint8 codes `[R, C]` and scales `[R, C // 64]`; FORMAT "int8" or "fp8"."""
    rows: tl.constexpr = codes.shape[0]
    columns: tl.constexpr = codes.shape[1]
    exponent = scales.to(tl.int32)
    code = codes.to(tl.int32)
    # The byte as the last digits of 2^23 + byte: cheaper than a conversion, and as exact.
    number = (code | 0x4B000000).to(tl.float32, bitcast=True)
    if NONNEGATIVE:
        k = number - 8388608.0
        value = (k * k) * (k * k)
    elif FORMAT == "int8":
        k = number - 8388736.0
        value = k * tl.abs(k)
    else:
        tl.static_assert(FORMAT == "fp8")
        exponent = tl.where(exponent == 255, exponent, exponent - 7)
        value = _float_value(code & 127)
        value = (value.to(tl.int32, bitcast=True) | ((code & 128) << 24)).to(tl.float32, bitcast=True)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    blocks = tl.reshape(value, (rows, columns // 64, 64)) * factor[:, :, None]
    return tl.reshape(blocks, (rows, columns))


@triton.jit
def encode(
    x,
    draws,
    FORMAT: tl.constexpr,
    NONNEGATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EXACT: tl.constexpr,
    FLUSH: tl.constexpr = True,
):
    """Codes uint8 `[R, C]` and scales uint8 `[R, C // 64]` of fp32 `[R, C]`, zero outside the tensor.

    `draws` is not read unless STOCHASTIC. FLUSH: for signed fp8, a state's small magnitudes become zero (a weight's
    do not).
    """
    if NONNEGATIVE:
        units, scales = _scaled(x, 0x4F7C05FC, 0, True)
        code = _fourth_code(units, draws, STOCHASTIC, EXACT)
    elif FORMAT == "int8":
        units, scales = _scaled(x, 0x467C0400, 0, False)
        k = _square_code(units, draws, STOCHASTIC, EXACT)
        code = tl.where(x < 0, 128 - k, 128 + k)
    else:
        tl.static_assert(FORMAT == "fp8")
        units, scales = _scaled(x, 0x47600000, 7, False)
        code = _float_code(units, draws, STOCHASTIC, FLUSH)
        code = code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)
    return code.to(tl.uint8), scales


@triton.jit
def _scaled(x, TOP: tl.constexpr, SHIFT: tl.constexpr, NONNEGATIVE: tl.constexpr):
    """`scale.scaled`: magnitudes in units of the block's scale `[R, C]`, and the scales to store."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    # As integers: a maximum that sees NaN, and the same on every device.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if NONNEGATIVE:
        magnitude = tl.where(x < 0, 0x7FC00000, magnitude)
    largest = tl.max(tl.reshape(magnitude, (rows, columns // 64, 64)), axis=2)
    exponent = tl.maximum(((largest - TOP + 0x7FFFFF) >> 23) + 127, 1)
    finite = largest < 0x7F800000
    unit = (tl.where(finite, 254 - exponent, 0) << 23).to(tl.float32, bitcast=True)
    scales = tl.where(finite, exponent + SHIFT, 255).to(tl.uint8)
    # A block that is not finite has unit 0; infinity and NaN times 0 are NaN, so they are taken out by choice.
    blocks = tl.reshape(tl.abs(x), (rows, columns // 64, 64))
    units = tl.where(finite[:, :, None], blocks * unit[:, :, None], 0.0)
    return tl.reshape(units, (rows, columns)), scales


@triton.jit
def _root(x, EXACT: tl.constexpr):
    if EXACT:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _threshold(draws, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        return draws.to(tl.float32) + 0.5
    else:
        return 32768.0


@triton.jit
def _square_code(units, draws, STOCHASTIC: tl.constexpr, EXACT: tl.constexpr):
    """`codes.square_code`."""
    k = tl.floor(_root(units, EXACT))
    up = _threshold(draws, STOCHASTIC) * (2.0 * k + 1.0) < (units - k * k) * 65536.0
    return tl.where(k == 0, 0.0, k + up.to(tl.float32)).to(tl.int32)


@triton.jit
def _fourth_code(units, draws, STOCHASTIC: tl.constexpr, EXACT: tl.constexpr):
    """`codes.fourth_code`."""
    root = _root(_root(units, EXACT), EXACT)
    if not EXACT:
        # An approximate root beyond the largest code could step up to 256.
        root = tl.minimum(root, 255.0)
    if STOCHASTIC:
        least = 1.0 - draws.to(tl.float32) * 0.0000152587890625
    else:
        least = 0.5
    whole = tl.floor(root)
    return (whole + (root - whole >= least).to(tl.float32)).to(tl.int32)


@triton.jit
def _float_code(units, draws, STOCHASTIC: tl.constexpr, FLUSH: tl.constexpr):
    """`codes.float_code`."""
    if FLUSH:
        units = tl.where(units < 2.0, 0.0, units)
    # 2^-127: subnormal numbers of fp32 are those of the code.
    pattern = (units * 5.877471754111438e-39).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        low = (draws << 4) + ((draws >> 4) & 15)
    else:
        low = 0x7FFFF + ((pattern >> 20) & 1)
    return (pattern + low) >> 20


@triton.jit
def _float_value(code):
    """`codes.float_value`."""
    normal = ((code << 20) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.25, normal)


@triton.jit
def split(w, draws, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`extended.Extended(BITS).encode`: bf16 and int8 or int16 of fp32 `w`. `draws` is not read unless STOCHASTIC."""
    bits = w.to(tl.int32, bitcast=True)
    bits = tl.where(w == w, bits, (bits & -0x80000000) | 0x7FC00000)
    if BITS == 8:
        if STOCHASTIC:
            add = draws >> 8
        else:
            add = 0x7F + ((bits >> 8) & 1)
        magnitude = bits & 0x7FFFFFFF
        add = tl.where(magnitude >= 0x7F7FFF00, tl.where(magnitude >= 0x7F7FFF80, 0x80, 0), add)
        bits = (bits + add) & -256
    # Wraps only where the sign bit is the carry's way out, which is right in 32 bits without a sign.
    high = (bits.to(tl.uint32, bitcast=True) + 0x8000) >> 16
    low = (bits - (high << 16).to(tl.int32, bitcast=True)) >> (16 - BITS)
    if BITS == 8:
        low = low.to(tl.int8)
    else:
        tl.static_assert(BITS == 16)
        low = low.to(tl.int16)
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True), low


@triton.jit
def joined(high, low, BITS: tl.constexpr):
    """`extended.Extended(BITS).decode`: the fp32 weight of bf16 `high` and int8 or int16 `low`."""
    upper = high.to(tl.uint16, bitcast=True).to(tl.int32) << 16
    joined = upper + (low.to(tl.int32) << (16 - BITS))
    # Bits that would change the sign are those of another weight: nothing lies beyond zero.
    return tl.where((joined ^ upper) < 0, upper, joined).to(tl.float32, bitcast=True)
