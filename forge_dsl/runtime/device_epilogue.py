"""A tile of the Hopper kernel slice by slice, once its gradient is there: load weight and states, update, store.

By the warps of the epilogue (`update_slices`) and by those of the main loop, which help (`help_slices`). When, and what
the functions of the rule and `at` are, says `device_hopper`; one tensor is read and written by `device_slices`.
"""

from __future__ import annotations

from forge_dsl.runtime import device_handover, device_slices
from forge_dsl.runtime.gluon_support import barrier, gl, gluon, mbarrier


@gluon.constexpr_function
def slice_layout(rows, columns, warps, bits):
    """Which thread holds what of an epilogue slice [rows, columns]: 8 neighbouring columns each, 16 bytes of bf16.

    With a low plane of bytes a thread also holds row r + 8 beside row r, for both are in one 16-byte vector of it.
    """
    if bits in (16, 32):
        return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    free = [[row, 0] for row in (4, 16, 32, 64) if row < rows]
    count = warps.bit_length() - 1
    across = free[:count] + [[0, 0]] * (count - len(free))
    return gl.DistributedLinearLayout(registers + free[count:], lanes, across, [], [rows, columns])


@gluon.jit
def slice_origin(index, HEIGHT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """First row and column of slice `index` within its tile: down the rows first, then the next columns."""
    # Without a sign, so that a power of two divides by a shift.
    index = gl.to_tensor(index).to(gl.uint32)
    down: gl.constexpr = HEIGHT // ROWS
    return ((index % down) * ROWS).to(gl.int32), ((index // down) * COLUMNS).to(gl.int32)


@gluon.jit
def slice_at(first_row, first_column, shape, strides, offsets, rows, columns, even: gl.constexpr):
    """Where a slice is, in the weight and in a state: as `device_slices` says.

    Offsets of first elements are 64-bit. shape: rows and columns of the weight; strides: of a row, of weight and
    states. place: the slice's first row and column, and the shape.
    """
    weight_base = device_slices.product(first_row, strides[0]) + first_column
    state_base = device_slices.product(first_row, strides[1]) + first_column
    place = first_row, first_column, shape
    if even:
        return (weight_base, offsets[0], True, place, strides[0]), (state_base, offsets[1], True, place, strides[1])
    else:
        inside = (first_row + rows < shape[0])[:, None] & (first_column + columns < shape[1])[None, :]
        return (weight_base, offsets[0], inside, place, strides[0]), (state_base, offsets[1], inside, place, strides[1])


@gluon.jit
def prefetch_at(first_row, first_column, shape, strides, rows, even: gl.constexpr):
    """Where the lines of a slice begin: (offset of its first element, offsets of its rows), of weight and of a
    state."""
    if not even:
        # Beyond the border there may be no memory; any line inside will do.
        first_column = gl.where(first_column < shape[1], first_column, 0)
        rows = gl.minimum(rows, gl.maximum(shape[0] - 1 - first_row, 0))
        first_row = gl.minimum(first_row, shape[0] - 1)
    weight_base = device_slices.product(first_row, strides[0]) + first_column
    state_base = device_slices.product(first_row, strides[1]) + first_column
    return weight_base, rows * strides[0], state_base, rows * strides[1]


@gluon.jit
def slice_of(index, tile, HEIGHT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, even: gl.constexpr):
    """Where slice `index` of a tile is, as `slice_at` says.

    A tile is its first row and column, shape and strides of the matrices, offsets in a slice, its rows, its columns.
    """
    top, left, shape, strides, offsets, rows, columns = tile
    row, column = slice_origin(index, HEIGHT, ROWS, COLUMNS)
    return slice_at(top + row, left + column, shape, strides, offsets, rows, columns, even)


@gluon.jit
def slice_after(index, count, tile, next_place):
    """Slice `index` of a tile of `count`, or beyond them one of the next tile, at `next_place`; and its tile."""
    top, left, shape, strides, offsets, rows, columns = tile
    beyond = index >= count
    top = gl.where(beyond, next_place[0], top)
    left = gl.where(beyond, next_place[1], left)
    return gl.where(beyond, index - count, index), (top, left, shape, strides, offsets, rows, columns)


@gluon.jit
def update_slices(
    coming,
    planes,
    before,
    filled,
    emptied,
    phase,
    tile,
    next_place,
    count,
    s,
    keys,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    layout: gl.constexpr,
    HEIGHT: gl.constexpr,
    SLICES: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    EAGER: gl.constexpr,
    PAIRS: gl.constexpr,
    ABREAST: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """The first `count` of a tile's SLICES, one by one, as soon as each of the PARTS of its gradient is there.

    coming: the stored values of the first slice, where EAGER; returned are those of the next tile's first one.
    before: parts that lie in front of this tile's in the planes.
    """
    of_part: gl.constexpr = SLICES // PARTS
    together: gl.constexpr = 2 if PAIRS else 1
    for part in range(PARTS):
        mbarrier.wait(filled.index(before + part), phase)
        for first in range(part * of_part, gl.minimum(count, (part + 1) * of_part), together):
            for i in gl.static_range(together):
                coming = update_slice(
                    first + i,
                    coming,
                    planes,
                    before * of_part,
                    tile,
                    next_place,
                    count,
                    s,
                    keys,
                    pointers,
                    extras,
                    switches,
                    functions,
                    layout,
                    HEIGHT,
                    WARPS,
                    AHEAD,
                    EAGER,
                    i + 1 < together,
                    ABREAST,
                    exact,
                    formats,
                    draws,
                    even,
                    bits,
                )
        mbarrier.arrive(emptied.index(before + part))
    return coming


@gluon.jit
def update_slice(
    index,
    coming,
    planes,
    before,
    tile,
    next_place,
    count,
    s,
    keys,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    layout: gl.constexpr,
    HEIGHT: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    EAGER: gl.constexpr,
    FOLLOWED: gl.constexpr,
    ABREAST: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """Slice `index` of a tile: start the next one's loads, then update this one and store it.

    EAGER: its own stored values are in `coming`, and the next one's are returned; else it loads its own. FOLLOWED: the
    next one is of the same tile.
    AHEAD: how many slices ahead lines are asked for in L2, 0 for none. ABREAST: the warps wait for each other.
    before: slices that lie in front of this tile's in the planes.
    """
    fetch_slice: gl.constexpr = functions[0]
    apply: gl.constexpr = functions[1]
    prefetch_slice: gl.constexpr = functions[2]
    ROWS: gl.constexpr = planes[0].shape[1]
    COLUMNS: gl.constexpr = planes[0].shape[2]
    at = slice_of(index, tile, HEIGHT, ROWS, COLUMNS, even)
    if EAGER:
        stored = coming
        if FOLLOWED:
            later = slice_of(index + 1, tile, HEIGHT, ROWS, COLUMNS, even)
        else:
            then, its_tile = slice_after(index + 1, count, tile, next_place)
            later = slice_of(then, its_tile, HEIGHT, ROWS, COLUMNS, even)
        coming = fetch_slice(later, *pointers, extras, *switches, formats, even)
    else:
        stored = fetch_slice(at, *pointers, extras, *switches, formats, even)
    if AHEAD > 0:
        then, its_tile = slice_after(index + AHEAD, count, tile, next_place)
        row, column = slice_origin(then, HEIGHT, ROWS, COLUMNS)
        line_rows = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        lines = prefetch_at(its_tile[0] + row, its_tile[1] + column, tile[2], tile[3], line_rows, even)
        prefetch_slice(lines, *pointers, *switches)
    # Without it ptxas moves the loads down into the arithmetic, where nothing hides them.
    if ABREAST:
        barrier()
    else:
        device_slices.keep_order(tile[5])
    grad = device_handover.take_gradient(planes, before + index, layout, HEIGHT, WARPS, bits)
    apply(at, stored, grad, s, keys, *pointers, extras, *switches, exact, formats, draws, even)
    return coming


@gluon.jit
def help_slices(
    planes,
    down,
    across,
    first,
    before,
    shape,
    strides,
    table,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    SLICES: gl.constexpr,
    WARPS: gl.constexpr,
    TOGETHER: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """A tile's slices from `first` on, its gradient being there: load TOGETHER of them, then update and store.

    before: slices that lie in front of this tile's in the planes.
    """
    apply: gl.constexpr = functions[1]
    make_table: gl.constexpr = functions[3]
    make_keys: gl.constexpr = functions[4]
    ROWS: gl.constexpr = planes[0].shape[1]
    COLUMNS: gl.constexpr = planes[0].shape[2]
    layout: gl.constexpr = slice_layout(ROWS, COLUMNS, WARPS, bits)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    offsets = (
        rows[:, None] * strides[0] + columns[None, :],
        rows[:, None] * strides[1] + columns[None, :],
    )
    s = make_table(table)
    keys = make_keys(table, draws)
    tile = down * HEIGHT, across * WIDTH, shape, strides, offsets, rows, columns
    for index in range(first, SLICES, TOGETHER):
        loaded = load_slices(
            (), index, tile, pointers, extras, switches, functions, HEIGHT, ROWS, COLUMNS, TOGETHER, formats, even
        )
        barrier()
        for i in gl.static_range(TOGETHER):
            grad = device_handover.take_gradient(planes, before + index + i, layout, HEIGHT, WARPS, bits)
            at = slice_of(index + i, tile, HEIGHT, ROWS, COLUMNS, even)
            apply(at, loaded[i], grad, s, keys, *pointers, extras, *switches, exact, formats, draws, even)


@gluon.jit
def load_slices(
    loaded,
    index,
    tile,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    HEIGHT: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    COUNT: gl.constexpr,
    formats: gl.constexpr,
    even: gl.constexpr,
):
    """`loaded` and the stored values of COUNT slices from `index` on."""
    if COUNT == 0:
        return loaded
    else:
        fetch_slice: gl.constexpr = functions[0]
        at = slice_of(index, tile, HEIGHT, ROWS, COLUMNS, even)
        one = fetch_slice(at, *pointers, extras, *switches, formats, even)
        more = loaded + (one,)  # noqa: RUF005 - no starred tuples here
        return load_slices(
            more,
            index + 1,
            tile,
            pointers,
            extras,
            switches,
            functions,
            HEIGHT,
            ROWS,
            COLUMNS,
            COUNT - 1,
            formats,
            even,
        )
