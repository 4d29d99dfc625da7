"""Loading and storing a tile of a weight or a state, in whatever format it is kept, and rounding what is stored.

`formats`, `draws` (whether it is rounded stochastically), `keys` and `extras` have an entry for the weight and one for
each state; STREAM is the entry. A format is "plain" (the pointer's own type), "int8" or "fp8" (a byte and a scale per
64 columns), or, for a weight, "bf16+8" or "bf16+16" (bf16 and more bits beside it). An extra points to the scales,
uint8 [blocks, rows], or to the bits beside, which lie as the weight does; what has neither passes its own pointer.
Formats are those of `forge_dsl.formats`.

`part` is the tile: `(rows, first_column, inside, place)`, that is its rows, its first column, which of its elements
there are, and where they lie in the whole tensor, which rounding depends on: `place = (base, row_length,
block_stride)`.
Row r and column c of the matrix are row `base + r` and column c of the tensor. Where `flat`, the matrix is one row,
the whole tensor in the order of its indices: its element c is number `base + c` of a tensor with rows of `row_length`.
`block_stride` is the distance of the scales of two neighbouring blocks.
"""

from __future__ import annotations

from forge_dsl.runtime import device_formats
from forge_dsl.runtime.triton_support import tl, triton


@triton.jit
def key(table, DRAWS: tl.constexpr):
    """A word of the step's table, of those that draws begin with, or 0 where none of it is read."""
    if DRAWS:
        word = tl.load(table).to(tl.uint32, bitcast=True)
    else:
        word = 0
    return word


@triton.jit
def load(pointer, extras, at, part, formats: tl.constexpr, STREAM: tl.constexpr, NONNEGATIVE: tl.constexpr = False):
    """A tile of tensor STREAM in fp32; 0 outside the tensor. `at`: offsets of its elements."""
    FORMAT: tl.constexpr = formats[STREAM]
    extra = extras[STREAM]
    rows, first_column, inside, place = part
    if FORMAT == "plain":
        value = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    elif FORMAT == "bf16+8" or FORMAT == "bf16+16":
        high = tl.load(pointer + at, mask=inside, other=0.0)
        low = tl.load(extra + at, mask=inside, other=0)
        value = device_formats.joined(high, low, 8 if FORMAT == "bf16+8" else 16)
    else:
        codes = tl.load(pointer + at, mask=inside, other=0)
        scales_at, scales_inside = _scales(rows, first_column, inside, place)
        scales = tl.load(extra + scales_at, mask=scales_inside, other=0)
        value = tl.where(inside, device_formats.decode(codes, scales, FORMAT, NONNEGATIVE), 0.0)
    return value


@triton.jit
def store(
    pointer,
    extras,
    at,
    value,
    part,
    keys,
    formats: tl.constexpr,
    draws: tl.constexpr,
    exact: tl.constexpr,
    flat: tl.constexpr,
    STREAM: tl.constexpr,
    NONNEGATIVE: tl.constexpr = False,
):
    """Round a tile of fp32, of tensor STREAM, to its format, once, and store it."""
    FORMAT: tl.constexpr = formats[STREAM]
    DRAWS: tl.constexpr = draws[STREAM]
    # The small magnitudes of a weight are kept, whatever its format; see `device_formats.encode`.
    FLUSH: tl.constexpr = STREAM != 0
    extra = extras[STREAM]
    rows, first_column, inside, place = part
    if DRAWS:
        drawn = _draws(device_formats.key_in(keys, STREAM), rows, first_column, value.shape[1], place, flat)
    else:
        drawn = 0
    if FORMAT == "plain":
        rounded = device_formats.stored(value, pointer.dtype.element_ty, drawn, DRAWS)
        tl.store(pointer + at, rounded, mask=inside)
    elif FORMAT == "bf16+8" or FORMAT == "bf16+16":
        high, low = device_formats.split(value, drawn, 8 if FORMAT == "bf16+8" else 16, DRAWS)
        tl.store(pointer + at, high, mask=inside)
        tl.store(extra + at, low, mask=inside)
    else:
        codes, scales = device_formats.encode(
            tl.where(inside, value, 0.0), drawn, FORMAT, NONNEGATIVE, DRAWS, exact, FLUSH
        )
        tl.store(pointer + at, codes, mask=inside)
        scales_at, scales_inside = _scales(rows, first_column, inside, place)
        tl.store(extra + scales_at, scales, mask=scales_inside)


@triton.jit
def _draws(key, rows, first_column, WIDTH: tl.constexpr, place, flat: tl.constexpr):
    """16-bit draws [rows, WIDTH] for the tile."""
    base, row_length, _ = place
    if flat:
        tl.static_assert(rows.shape[0] == 1)
        # One division by 64 bits for the block, and one by 32 bits for each element.
        start = base + first_column
        first_row = start // row_length
        columns = (start - first_row * row_length).to(tl.int32) + tl.arange(0, WIDTH)
        length = tl.cast(row_length, tl.int32)
        below = columns // length
        found = device_formats.draw_at(key, (first_row + below)[None, :], (columns - below * length)[None, :])
    else:
        found = device_formats.draws(key, base + rows, first_column, WIDTH)
    return found


@triton.jit
def _scales(rows, first_column, inside, place):
    """Offsets of the tile's scales, [rows, blocks], and which of them there are."""
    block_stride = place[2]
    blocks: tl.constexpr = inside.shape[1] // 64
    block = first_column // 64 + tl.arange(0, blocks)
    there = tl.max(tl.reshape(inside.to(tl.int32), (inside.shape[0], blocks, 64)), axis=2) > 0
    return block[None, :] * block_stride + rows[:, None], there


@triton.jit
def store_keys(table, base, count, STREAMS: tl.constexpr):
    """Write what the draws of a step are made of: `rounding.words`. `base`: an int32 that holds `rounding.base`."""
    tl.store(table, base.to(tl.float32, bitcast=True))
    for stream in tl.static_range(STREAMS):
        turned = device_formats.turned(count.to(tl.int64), stream)
        tl.store(table + 1 + stream, turned.to(tl.float32, bitcast=True))
