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
    """The stored values of a slice of tensor STREAM, and what is beside them; where `even`, all of it is `inside`."""
    FORMAT: gl.constexpr = formats[STREAM]
    extra = extras[STREAM]
    base, offsets, inside, place, _row = at
    if FORMAT == "int8" or FORMAT == "fp8":
        words_at, words_there = words_of(pointer, at)
        scales_at, there = scales_of(offsets, place)
        if even:
            return gl.load(words_at), gl.load(extra + scales_at)
        else:
            return gl.load(words_at, mask=words_there, other=0), gl.load(extra + scales_at, mask=there, other=0)
    else:
        found = _load(pointer, base, offsets, inside, even)
        if FORMAT == "plain":
            return found
        else:
            return found, _load(extra, base, offsets, inside, even)


@gluon.jit
def _load(pointer, base, offsets, inside, even: gl.constexpr):
    if even:
        return gl.load(pointer + base + offsets)
    else:
        return gl.load(pointer + base + offsets, mask=inside, other=0)


@gluon.jit
def _store(pointer, base, offsets, value, inside, even: gl.constexpr):
    if even:
        gl.store(pointer + base + offsets, value)
    else:
        gl.store(pointer + base + offsets, value, mask=inside)


@gluon.jit
def widen(stored, formats: gl.constexpr, STREAM: gl.constexpr, NONNEGATIVE: gl.constexpr = False):
    """Stored values in fp32. NONNEGATIVE: of the code's two forms, the one for a domain without negative numbers."""
    FORMAT: gl.constexpr = formats[STREAM]
    if FORMAT == "plain":
        found = device_hopper_formats.widened(stored)
    elif FORMAT == "bf16+8" or FORMAT == "bf16+16":
        found = device_formats.joined(stored[0], stored[1], 8 if FORMAT == "bf16+8" else 16)
    else:
        # Scales have the layout of the slice's rows.
        layout: gl.constexpr = stored[1].type.layout.parent
        found = device_hopper_formats.decode(stored[0], stored[1], FORMAT, NONNEGATIVE, layout)
    return found


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
        masked: gl.constexpr = FORMAT != "fp8" or NONNEGATIVE
        drawn = device_hopper_formats.draws(device_formats.key_in(keys, STREAM), place[0], place[1], value, masked)
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
    """Addresses of the words of a slice of 8-bit codes, and which there are. Rows end with a whole word."""
    base, offsets, _inside, place, row = at
    first_row, first_column, shape = place
    word, _second, _third, _fourth = device_hopper_formats.in_fours(offsets)
    rows = gl.arange(0, word.shape[0], layout=gl.SliceLayout(1, word.type.layout))
    words = gl.arange(0, word.shape[1], layout=gl.SliceLayout(0, word.type.layout))
    start = (pointer + base).to(gl.pointer_type(gl.int32), bitcast=True)
    # In words, so that the compiler sees two of them to be there together.
    there = (first_row + rows < shape[0])[:, None] & (first_column // 4 + words < shape[1] // 4)[None, :]
    return start + (rows[:, None] * (row // 4) + words[None, :]), there


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
