"""Storage formats and stochastic rounding in the registers of the Hopper kernel, bit for bit `forge_dsl.formats`.

The arithmetic is that of `device_formats`; written anew because a slice `[rows, 64]` of the epilogue has 8 neighbouring
columns of a row in a thread, so that pairs of columns, groups of four bytes and whole blocks (a row of the slice) need
no other layout and no shared memory. Codes are loaded, kept and stored as 32-bit words `[rows, 16]` of four each: as
bytes the compiler would take them apart, and hold each in a register of its own, long before they are used. What the
hardware has one instruction for stands here as assembly: byte permutes, sums rounded down, predicated sums.
`tests/formats/gluon_on_cpu.py` runs that text on a CPU.

Two rearrangements save instructions and change no bit. The xor-shift that the mixer begins with is linear, so that rows
and pairs of columns go through it before they meet. Thresholds carry the factor 2^-16 that fractions would be
multiplied by otherwise.
"""

from __future__ import annotations

from forge_dsl.runtime import device_formats
from forge_dsl.runtime.gluon_support import AVAILABLE, gl, gluon
from forge_dsl.runtime.triton_support import tl

# -------------------------------------------------------------------------------------------------------- assembly

# Two fp32 numbers in bf16 by two 16-bit draws: the draw is added to the low bits, which are then cut off. From the
# largest finite number on (0x7F7F0000) none is added, so that it does not become infinite, nor NaN another number. (As
# arithmetic makes NaN, its upper half is one.)
ROUND_BF16 = """{
    .reg .pred p, q;
    .reg .f32 c;
    .reg .b32 t, u;
    mov.b32 t, $1;
    mov.b32 u, $2;
    abs.f32 c, $1;
    setp.geu.f32 p, c, 0f7F7F0000;
    abs.f32 c, $2;
    setp.geu.f32 q, c, 0f7F7F0000;
    @!p add.u32 t, t, $3;
    @!q add.u32 u, u, $4;
    prmt.b32 $0, t, u, 0x7632;
}"""
# The two numbers of a word in fp32. Left to itself the compiler takes three instructions for bf16.
WIDEN_BF16 = """{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xFFFF0000;
}"""
WIDEN_FP16 = """{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
}"""
# Signed bytes and signed halves of a word, 256 times as large, and as they are.
SPREAD_BYTES = """{
    prmt.b32 $0, $4, 0, 0x8804;
    prmt.b32 $1, $4, 0, 0x9914;
    prmt.b32 $2, $4, 0, 0xAA24;
    prmt.b32 $3, $4, 0, 0xBB34;
}"""
SPREAD_HALVES = """{
    prmt.b32 $0, $2, 0, 0x9910;
    prmt.b32 $1, $2, 0, 0xBB32;
}"""
# Four bytes as fp32 numbers 2^23 + byte.
RAISE_BYTES = """{
    prmt.b32 $0, $4, 0x4B000000, 0x7650;
    prmt.b32 $1, $4, 0x4B000000, 0x7651;
    prmt.b32 $2, $4, 0x4B000000, 0x7652;
    prmt.b32 $3, $4, 0x4B000000, 0x7653;
}"""
# Four bytes of float8 e4m3 as fp32 numbers.
WIDEN_SIGNED = """{
    .reg .b16 a, b, c, d;
    .reg .b32 t, u;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 t, a;
    cvt.rn.f16x2.e4m3x2 u, b;
    mov.b32 {a, b}, t;
    mov.b32 {c, d}, u;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}"""
# A number `$1` whose code ends in bit 20, plus the draw in the lower half of `$2`, whose lower byte is repeated below,
# as the fraction below the code; then the code is the highest byte.
ROUND_CODE = """{
    .reg .b32 t, u;
    prmt.b32 t, $2, 0, 0x4100;
    shl.b32 u, $1, 4;
    add.u32 $0, u, t;
}"""
# Times 2^-126, where a number of three fraction bits is subnormal if fp32 is. The other one makes zero of subnormals.
LOWER = "mul.rn.f32 $0, $1, 0f00800000;"
LOWER_OR_ZERO = "mul.rn.ftz.f32 $0, $1, 0f00800000;"
# The lowest bytes of four words; of a block that is not finite, whose word `$5` is 0 and not -1, zeros.
PACK_BYTES = """{
    .reg .b32 t, u;
    prmt.b32 t, $1, $2, 0x0040;
    prmt.b32 u, $3, $4, 0x0040;
    prmt.b32 t, t, u, 0x5410;
    and.b32 $0, t, $5;
}"""
# The same, but 128 for zero.
PACK_BYTES_AROUND_128 = """{
    .reg .b32 t, u;
    prmt.b32 t, $1, $2, 0x0040;
    prmt.b32 u, $3, $4, 0x0040;
    prmt.b32 t, t, u, 0x5410;
    lop3.b32 $0, t, $5, 0x80808080, 0xE2;
}"""
# The highest bytes instead, and 0 for zero, with a sign in bit 7 of each: that of the numbers `$6` to `$9`.
PACK_SIGNED = """{
    .reg .b32 t, u, v;
    prmt.b32 t, $1, $2, 0x0073;
    prmt.b32 u, $3, $4, 0x0073;
    prmt.b32 t, t, u, 0x5410;
    and.b32 t, t, $5;
    prmt.b32 u, $6, $7, 0x0073;
    prmt.b32 v, $8, $9, 0x0073;
    prmt.b32 u, u, v, 0x5410;
    lop3.b32 $0, t, u, 0x80808080, 0xF8;
}"""
# The upper half of a word as the fp32 number 2^23 + half.
RAISE_UPPER = "prmt.b32 $0, $1, 0x4B000000, 0x7632;"
# 2^23 + x rounded down, whose last bits are the integer part of 0 <= x < 2^22.
RAISE_FLOOR = "add.rm.f32 $0, $1, 0f4B000000;"
# The same of the sum of x and a draw as a fraction, the draw given as 2^23 + draw. Both sums are rounded down: to
# nearest, the first one, which is 128 larger, could become the next integer.
RAISE_FLOOR_OF_SUM = """{
    .reg .f32 t;
    fma.rm.f32 t, $2, 0f37800000, $1;
    add.rm.f32 $0, t, 0f4AFFFF00;
}"""
ROOT = "sqrt.approx.ftz.f32 $0, $1;"
# x, or x + 1 where a < b; but 0 stays 0.
STEP_UP_FROM_ONE = """{
    .reg .pred p;
    setp.lt.f32 p, $2, $3;
    setp.ge.and.f32 p, $1, 0f3F800000, p;
    mov.f32 $0, $1;
    @p add.f32 $0, $0, 0f3F800000;
}"""

_text = gl.constexpr if AVAILABLE else str
_ROUND_BF16 = _text(ROUND_BF16)
_WIDEN_BF16 = _text(WIDEN_BF16)
_WIDEN_FP16 = _text(WIDEN_FP16)
_SPREAD_BYTES = _text(SPREAD_BYTES)
_SPREAD_HALVES = _text(SPREAD_HALVES)
_RAISE_BYTES = _text(RAISE_BYTES)
_WIDEN_SIGNED = _text(WIDEN_SIGNED)
_PACK_BYTES = _text(PACK_BYTES)
_PACK_BYTES_AROUND_128 = _text(PACK_BYTES_AROUND_128)
_PACK_SIGNED = _text(PACK_SIGNED)
_ROUND_CODE = _text(ROUND_CODE)
_LOWER = _text(LOWER)
_LOWER_OR_ZERO = _text(LOWER_OR_ZERO)
_RAISE_UPPER = _text(RAISE_UPPER)
_RAISE_FLOOR = _text(RAISE_FLOOR)
_RAISE_FLOOR_OF_SUM = _text(RAISE_FLOOR_OF_SUM)
_ROOT = _text(ROOT)
_STEP_UP_FROM_ONE = _text(STEP_UP_FROM_ONE)

# ----------------------------------------------------------------------------------------------- stochastic rounding


@gluon.jit
def draws(key, first_row, first_column, like, FORM: gl.constexpr = "number"):
    """16-bit draws, int32 `[rows, columns]` in the layout of `like`, which begins at a global row and (even) column.

    FORM: "number"; "raised", the fp32 number 2^23 + draw; or "loose", where upper halves of even columns are anything.
    """
    base, factor, offset = key
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    half, _other = like.reshape([rows, columns // 2, 2]).split()
    layout: gl.constexpr = half.type.layout
    of_row = (first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))).to(gl.uint32)
    of_row = device_formats.mix(of_row * 0x9E3779B1 + base)
    pair = ((first_column >> 1) + gl.arange(0, columns // 2, layout=gl.SliceLayout(0, layout))).to(gl.uint32)
    place = (of_row ^ (of_row >> 16))[:, None] ^ (pair ^ (pair >> 16))[None, :]
    place = place * 0x7FEB352D
    place = place ^ (place >> 15)
    odd = place * factor + offset
    if FORM == "raised":
        odd = gl.inline_asm_elementwise(_RAISE_UPPER, "=r,r", [odd], dtype=gl.uint32, is_pure=True, pack=1)
    else:
        odd = odd >> 16
    if FORM == "loose":
        even = odd ^ place
    else:
        even = odd ^ (place & 0xFFFF)
    both = gl.join(even, odd).reshape([rows, columns]).to(gl.int32)
    return gl.convert_layout(both, like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def form_of_draws(form, nonnegative):
    """In which form `encode` and `rounded_stochastic` take draws for a storage format."""
    if form not in ("int8", "fp8"):
        return "number"
    return "raised" if form == "int8" or nonnegative else "loose"


@gluon.jit
def rounded_stochastic(x, dtype: gl.constexpr, draws):
    """fp32 `x` in a plain type, by 16-bit draws."""
    if dtype == gl.bfloat16:
        found = gl.inline_asm_elementwise(
            _ROUND_BF16, "=r,f,f,r,r", [x, draws], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        found = device_formats.rounded_stochastic(x, dtype, draws)
    return found


@gluon.jit
def widened(words, dtype: gl.constexpr, layout: gl.constexpr):
    """Numbers of a plain type, 16-bit ones two in a word, in fp32 `[rows, 64]` in `layout`."""
    if dtype == gl.bfloat16:
        found = _from_pairs(words, _WIDEN_BF16, layout)
    elif dtype == gl.float16:
        found = _from_pairs(words, _WIDEN_FP16, layout)
    else:
        found = words
    return found


@gluon.jit
def joined(upper, words, BITS: gl.constexpr):
    """The fp32 weight of a bf16 number, `upper` in fp32, and its further bits, four or two in a word."""
    layout: gl.constexpr = upper.type.layout
    if BITS == 8:
        low = _from_fours(words, _SPREAD_BYTES, layout).to(gl.int32, bitcast=True)
    else:
        low = _from_pairs(words, _SPREAD_HALVES, layout).to(gl.int32, bitcast=True)
    upper = upper.to(gl.int32, bitcast=True)
    both = upper + low
    # Bits that would change the sign are those of another weight: nothing lies beyond zero.
    return gl.where((both ^ upper) < 0, upper, both).to(gl.float32, bitcast=True)


# ------------------------------------------------------------------------------------------------ blocks of 64 columns


@gluon.jit
def in_words(x, EACH: gl.constexpr):
    """The columns of `[rows, 64]` that lie in a word beside each other, EACH of them, 2 or 4."""
    if EACH == 4:
        return in_fours(x)
    else:
        return x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()


@gluon.jit
def in_fours(x):
    """The columns 4 i, 4 i + 1, 4 i + 2, 4 i + 3 of `[rows, 64]`, each `[rows, 16]`: the four bytes of a word."""
    rows: gl.constexpr = x.shape[0]
    words: gl.constexpr = x.shape[1] // 4
    even, odd = x.reshape([rows, words, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@gluon.jit
def decode(words, scales, FORMAT: gl.constexpr, NONNEGATIVE: gl.constexpr, layout: gl.constexpr):
    """fp32 `[rows, 64]` in `layout` of codes, words `[rows, 16]`, and scales int32 `[rows]`; FORMAT "int8" or "fp8"."""
    return in_units(words, FORMAT, NONNEGATIVE, layout) * units(scales)[:, None]


@gluon.jit
def in_units(words, FORMAT: gl.constexpr, NONNEGATIVE: gl.constexpr, layout: gl.constexpr):
    """The same in units of each row's scale."""
    if NONNEGATIVE:
        k = _from_fours(words, _RAISE_BYTES, layout) - 8388608.0
        value = (k * k) * (k * k)
    elif FORMAT == "int8":
        k = _from_fours(words, _RAISE_BYTES, layout) - 8388736.0
        value = k * gl.abs(k)
    else:
        value = _from_fours(words, _WIDEN_SIGNED, layout)
    return value


@gluon.jit
def units(scales):
    """Scales int32 `[rows]` as the powers of two that they stand for, fp32; infinite for a row that was not finite."""
    return (scales << 23).to(gl.float32, bitcast=True)


@gluon.jit
def encode(
    x,
    draws,
    FORMAT: gl.constexpr,
    NONNEGATIVE: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    EXACT: gl.constexpr,
    FLUSH: gl.constexpr = True,
):
    """Codes, words `[rows, 16]`, and scales uint8 `[rows]` of fp32 `[rows, 64]`, zero outside the tensor.

    `draws` is not read unless STOCHASTIC; in signed fp8 their upper halves may be anything. FLUSH: there, small
    magnitudes become zero, as a state's do.
    """
    if NONNEGATIVE:
        # -0 becomes 0, for as a number without sign it is a large one.
        x = x + 0.0
        units, finite, scales = _scaled(x, 0x4F7C05FC, 0, True)
        root = _root(_root(units, EXACT), EXACT)
        # Approximate or not, the root of the largest is 255 (`tests/gpu`), so that no draw makes it 256.
        if STOCHASTIC:
            raised = draws.to(gl.float32, bitcast=True)
        else:
            raised = gl.full_like(root, 8421376.0)
        raised = gl.inline_asm_elementwise(
            _RAISE_FLOOR_OF_SUM, "=f,f,f", [root, raised], dtype=gl.float32, is_pure=True, pack=1
        )
        codes = _to_words(raised, finite, _PACK_BYTES)
    elif FORMAT == "int8":
        units, finite, scales = _scaled(x, 0x467C0400, 0, False)
        k = _float_by(_RAISE_FLOOR, _root(units, EXACT)) - 8388608.0
        least = _threshold(draws, units, STOCHASTIC) * (2.0 * k + 1.0)
        k = _step_up(_STEP_UP_FROM_ONE, k, least, units - k * k)
        sign = x.to(gl.int32, bitcast=True) & -0x80000000
        k = (k.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
        codes = _to_words(k + 8388736.0, finite, _PACK_BYTES_AROUND_128)
    else:
        units, finite, scales = _scaled(x, 0x47600000, 7, False, 253)
        codes = _float_code(units, draws, STOCHASTIC, FLUSH)
        words = in_fours(codes) + (_of_words(finite, codes),) + in_fours(x.to(gl.int32, bitcast=True))  # noqa: RUF005
        codes = gl.inline_asm_elementwise(
            _PACK_SIGNED, "=r,r,r,r,r,r,r,r,r,r", words, dtype=gl.int32, is_pure=True, pack=1
        )
    return codes, scales


@gluon.jit
def _scaled(x, TOP: gl.constexpr, SHIFT: gl.constexpr, NONNEGATIVE: gl.constexpr, ONE: gl.constexpr = 254):
    """Magnitudes in units of each row's scale; which rows are finite (the units of others may be NaN); the scales.

    ONE: 254, or 253 for halves of those units.
    """
    if NONNEGATIVE:
        # As a number without sign, a negative one is larger than infinity.
        largest = gl.max(x.to(gl.uint32, bitcast=True), axis=1)
        finite = largest < 0x7F800000
        largest = largest.to(gl.int32, bitcast=True)
    else:
        largest = gl.reduce(gl.abs(x), 1, _larger).to(gl.int32, bitcast=True)
        finite = largest < 0x7F800000
    exponent = gl.maximum(((largest - TOP + 0x7FFFFF) >> 23) + 127, 1)
    unit = (gl.where(finite, ONE - exponent, 0) << 23).to(gl.float32, bitcast=True)
    scales = gl.where(finite, exponent + SHIFT, 255).to(gl.uint8)
    return gl.abs(x) * unit[:, None], finite, scales


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _threshold(draws, like, STOCHASTIC: gl.constexpr):
    """(draw + 0.5) / 2^16, or a half for each number of `like`."""
    if STOCHASTIC:
        # Exact, fused or not: a multiple of 2^-17 below 1.
        found = draws.to(gl.float32, bitcast=True) * 0.0000152587890625 - 127.99999237060547
    else:
        found = gl.full_like(like, 0.5)
    return found


@gluon.jit
def _float_code(halves, draws, STOCHASTIC: gl.constexpr, FLUSH: gl.constexpr):
    """The code of a number, given its half, in the highest byte."""
    lowered = _float_by(_LOWER_OR_ZERO if FLUSH else _LOWER, halves).to(gl.int32, bitcast=True)
    if STOCHASTIC:
        found = gl.inline_asm_elementwise(_ROUND_CODE, "=r,r,r", [lowered, draws], dtype=gl.int32, is_pure=True, pack=1)
    else:
        found = (lowered + 0x7FFFF + ((lowered >> 20) & 1)) << 4
    return found


@gluon.jit
def _root(x, EXACT: gl.constexpr):
    if EXACT:
        return gl.sqrt_rn(x)
    else:
        return _float_by(_ROOT, x)


@gluon.jit
def _float_by(ASSEMBLY: gl.constexpr, x):
    return gl.inline_asm_elementwise(ASSEMBLY, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _step_up(ASSEMBLY: gl.constexpr, x, a, b):
    return gl.inline_asm_elementwise(ASSEMBLY, "=f,f,f,f", [x, a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _from_fours(words, ASSEMBLY: gl.constexpr, layout: gl.constexpr):
    """fp32 `[rows, 64]` in `layout`, four of each word of `[rows, 16]`."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        ASSEMBLY,
        "=f,=f,=f,=f,r",
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    joined = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([words.shape[0], words.shape[1] * 4])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def _from_pairs(words, ASSEMBLY: gl.constexpr, layout: gl.constexpr):
    """fp32 `[rows, 64]` in `layout`, two of each word of `[rows, 32]`."""
    first, second = gl.inline_asm_elementwise(
        ASSEMBLY, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    joined = gl.join(first, second).reshape([words.shape[0], words.shape[1] * 2])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def _to_words(x, finite, ASSEMBLY: gl.constexpr):
    """The lowest byte of each of `[rows, 64]`, four in a word `[rows, 16]`."""
    words = in_fours(x.to(gl.int32, bitcast=True)) + (_of_words(finite, x),)  # noqa: RUF005
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,r,r", words, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _of_words(finite, like):
    """-1 for each word of a row that is finite, else 0; `like` `[rows, 64]`."""
    word, _second, _third, _fourth = in_fours(like)
    flags = gl.convert_layout(gl.where(finite, -1, 0), gl.SliceLayout(1, word.type.layout), assert_trivial=True)
    return flags[:, None].broadcast_to(word.shape)
