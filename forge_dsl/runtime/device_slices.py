"""Loading and storing one tensor's slice in the Hopper kernel, in whatever format the tensor is kept.

A slice is a block `[rows, 64]` of a tile, so that one of its rows is a block of an 8-bit format. STREAM is the tensor's
place in `extras`, `formats`, `draws` and `keys`: 0 for the weight, then each state; see `device_storage`. `at` is
`(offset of the slice's first element, offsets within, which of them there are, place, elements between rows)`, and
place `(first row, first column, shape of the matrix)`. Another storage format is another branch in `fetch`, `widen` and
`store`.
"""

from __future__ import annotations

from forge_dsl.runtime import device_formats, device_hopper_formats, device_math
from forge_dsl.runtime.gluon_support import AVAILABLE, gl, gluon

# Columns of a slice: 128 bytes of bf16, a row of the swizzled planes.
COLUMNS = gl.constexpr(64) if AVAILABLE else 64


@gluon.jit
def fetch(pointer, extras, at, formats: gl.constexpr, even: gl.constexpr, STREAM: gl.constexpr):
    """The stored values of a slice of tensor STREAM, and what is beside them; where `even`, all of it is `inside`.

    In words of 32 bits: narrower ones are taken apart only where they are used. The compiler would move each to a
    register of its own, and wait for it, before the slice in front of it is updated.
    """
    FORMAT: gl.constexpr = formats[STREAM]
    extra = extras[STREAM]
    if FORMAT == "plain":
        return load(pointer, at, even)
    elif FORMAT == "int8" or FORMAT == "fp8":
        scales_at, there = scales_of(at[1], at[3])
        return load(pointer, at, even), load_byte(extra + scales_at, there, even)
    else:
        return load(pointer, at, even), load(extra, at, even)


@gluon.jit
def load(pointer, at, even: gl.constexpr):
    """A slice of a tensor as words `[rows, columns of a word]`."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        base, offsets, inside, _place, _row = at
        address = pointer + base + offsets
    else:
        address, inside = words_of(pointer, at)
    if even:
        return gl.load(address)
    else:
        return gl.load(address, mask=inside, other=0)


@gluon.jit
def load_byte(address, there, even: gl.constexpr):
    """Bytes in 32 bits each; 0 where none is."""
    if even:
        return gl.inline_asm_elementwise(
            "ld.global.b8 $0, [$1];", "=r,l", [address.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            """{
                .reg .pred p;
                setp.ne.b32 p, $2, 0;
                mov.b32 $0, 0;
                @p ld.global.b8 $0, [$1];
            }""",
            "=r,l,r",
            [address.to(gl.int64), there.to(gl.int32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _store(pointer, base, offsets, value, inside, even: gl.constexpr):
    if even:
        gl.store(pointer + base + offsets, value)
    else:
        gl.store(pointer + base + offsets, value, mask=inside)


@gluon.jit
def widen(pointer, at, stored, formats: gl.constexpr, STREAM: gl.constexpr, NONNEGATIVE: gl.constexpr = False):
    """Stored words in fp32. NONNEGATIVE: of the code's two forms, the one for a domain without negative numbers."""
    FORMAT: gl.constexpr = formats[STREAM]
    dtype: gl.constexpr = pointer.dtype.element_ty
    layout: gl.constexpr = at[1].type.layout
    if FORMAT == "plain":
        found = device_hopper_formats.widened(stored, dtype, layout)
    elif FORMAT == "bf16+8" or FORMAT == "bf16+16":
        upper = device_hopper_formats.widened(stored[0], dtype, layout)
        found = device_hopper_formats.joined(upper, stored[1], 8 if FORMAT == "bf16+8" else 16)
    else:
        found = device_hopper_formats.decode(stored[0], stored[1], FORMAT, NONNEGATIVE, layout)
    return found


@gluon.jit
def widen_for(
    pointer,
    at,
    stored,
    formats: gl.constexpr,
    STREAM: gl.constexpr,
    s,
    FACTORS: gl.constexpr,
    exact: gl.constexpr,
    NONNEGATIVE: gl.constexpr = False,
):
    """The same of a tensor that is read only as a factor of scalars, those at places FACTORS of `s`; and `s`.

    Codes stay in units of their blocks, and the scalars take the units in, one product for a row of the slice. A unit
    is a power of two, so that nothing is rounded otherwise, unless a product is subnormal.
    """
    FORMAT: gl.constexpr = formats[STREAM]
    layout: gl.constexpr = at[1].type.layout
    if exact or not (FORMAT == "int8" or FORMAT == "fp8"):
        return widen(pointer, at, stored, formats, STREAM, NONNEGATIVE), s
    else:
        unit = device_hopper_formats.units(stored[1])[:, None]
        return device_hopper_formats.in_units(stored[0], FORMAT, NONNEGATIVE, layout), _times(s, FACTORS, unit)


@gluon.jit
def _times(s, FACTORS: gl.constexpr, unit):
    """The scalars, those at places FACTORS times `unit`."""
    if len(FACTORS) == 0:
        return s
    else:
        place: gl.constexpr = FACTORS[0]
        product = s[:place] + (s[place] * unit,) + s[place + 1 :]  # noqa: RUF005
        return _times(product, FACTORS[1:], unit)


@gluon.jit
def store(
    pointer,
    extras,
    at,
    value,
    keys,
    formats: gl.constexpr,
    draws: gl.constexpr,
    exact: gl.constexpr,
    even: gl.constexpr,
    STREAM: gl.constexpr,
    NONNEGATIVE: gl.constexpr = False,
):
    """Write a slice of tensor STREAM, rounded once: by draws, or to nearest."""
    FORMAT: gl.constexpr = formats[STREAM]
    DRAWS: gl.constexpr = draws[STREAM]
    extra = extras[STREAM]
    base, offsets, inside, place, _row = at
    dtype: gl.constexpr = pointer.dtype.element_ty
    if DRAWS and (FORMAT != "plain" or dtype != gl.float32):
        key = device_formats.key_in(keys, STREAM)
        form: gl.constexpr = device_hopper_formats.form_of_draws(FORMAT, NONNEGATIVE)
        drawn = device_hopper_formats.draws(key, place[0], place[1], value, form)
    else:
        drawn = 0
    if FORMAT == "plain":
        if DRAWS:
            rounded = device_hopper_formats.rounded_stochastic(value, dtype, drawn)
        else:
            rounded = device_math.rounded(value, dtype)
        _store(pointer, base, offsets, rounded, inside, even)
    elif FORMAT == "bf16+8" or FORMAT == "bf16+16":
        rounded, low = device_formats.split(value, drawn, 8 if FORMAT == "bf16+8" else 16, DRAWS)
        _store(extra, base, offsets, low, inside, even)
        _store(pointer, base, offsets, rounded, inside, even)
    else:
        if not even:
            value = gl.where(inside, value, 0.0)
        # A state's small magnitudes become zero, a weight's do not.
        words, scales = device_hopper_formats.encode(value, drawn, FORMAT, NONNEGATIVE, DRAWS, exact, STREAM != 0)
        words_at, words_there = words_of(pointer, at)
        scales_at, there = scales_of(offsets, place)
        if even:
            gl.store(extra + scales_at, scales)
            gl.store(words_at, words)
        else:
            gl.store(extra + scales_at, scales, mask=there)
            gl.store(words_at, words, mask=words_there)


@gluon.jit
def keep_order(like):
    """Keep the compiler from moving accesses to memory across this place; the threads of a warp wait for each other."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [like], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def product(a, b):
    """Of two numbers from 0 to 2^31, in 64 bits: one instruction, for they have no sign to extend."""
    return (a.to(gl.uint32).to(gl.uint64) * b.to(gl.uint32).to(gl.uint64)).to(gl.int64)


@gluon.jit
def words_of(pointer, at):
    """Addresses of the 32-bit words of a slice of a narrower type, and which there are.

    Rows of bytes end with a whole word; those of 16-bit numbers begin 16 bytes apart, so that the last word is theirs.
    """
    base, offsets, _inside, place, row = at
    first_row, first_column, shape = place
    each: gl.constexpr = 32 // pointer.dtype.element_ty.primitive_bitwidth
    word = device_hopper_formats.in_words(offsets, each)[0]
    rows = gl.arange(0, word.shape[0], layout=gl.SliceLayout(1, word.type.layout))
    words = gl.arange(0, word.shape[1], layout=gl.SliceLayout(0, word.type.layout))
    start = (pointer + base).to(gl.pointer_type(gl.int32), bitcast=True)
    # In words, so that the compiler sees several of them to be there together.
    last = shape[1] - shape[1] // 2 if each == 2 else shape[1] // 4
    there = (first_row + rows < shape[0])[:, None] & (first_column // each + words < last)[None, :]
    return start + (rows[:, None] * (row // each) + words[None, :]), there


@gluon.jit
def scales_of(like, place):
    """Offsets of the scales of a slice in the layout of `like`, which has a block in each row; and which there are."""
    first_row, first_column, shape = place
    rows = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))
    offsets = product(first_column.to(gl.uint32) // like.shape[1], shape[0]) + first_row + rows
    return offsets, (first_row + rows < shape[0]) & (first_column < shape[1])


@gluon.jit
def prefetch(pointer, base, rows):
    """Ask L2 for the lines of one tensor's slice, whose rows begin at offsets `rows` from `base`."""
    line: gl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth
    for part in gl.static_range((COLUMNS + line - 1) // line):
        address = (pointer + base + rows + part * line).to(gl.int64)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
        )
