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


@gluon.constexpr_function
def in_codes(formats):
    """Whether a tensor is kept in 8-bit codes."""
    return any(form in ("int8", "fp8") for form in formats)


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
def update_slices(
    planes,
    down,
    across,
    count,
    shape,
    strides,
    s,
    keys,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    filled,
    phase,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    EAGER: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """The first `count` slices of tile (down, across), one by one, once its gradient is there: load, update, store.

    AHEAD: how many slices ahead lines are asked for in L2, 0 for none. EAGER: the loads of the next slice are issued
    before the arithmetic of this one, those of the first before the wait for the gradient.
    """
    fetch_slice: gl.constexpr = functions[0]
    apply: gl.constexpr = functions[1]
    prefetch_slice: gl.constexpr = functions[2]
    ROWS: gl.constexpr = planes[0].shape[1]
    COLUMNS: gl.constexpr = planes[0].shape[2]
    layout: gl.constexpr = slice_layout(ROWS, COLUMNS, WARPS, bits)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    offsets = (
        rows[:, None] * strides[0] + columns[None, :],
        rows[:, None] * strides[1] + columns[None, :],
    )
    line_rows = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    top = down * HEIGHT
    left = across * WIDTH
    row, column = slice_origin(0, HEIGHT, ROWS, COLUMNS)
    at = slice_at(top + row, left + column, shape, strides, offsets, rows, columns, even)
    if EAGER:
        coming = fetch_slice(at, *pointers, extras, *switches, formats, even)
    mbarrier.wait(filled, phase)
    for index in range(count):
        now = top + row, left + column
        row, column = slice_origin(gl.minimum(index + 1, count - 1), HEIGHT, ROWS, COLUMNS)
        if EAGER:
            stored = coming
            at = slice_at(top + row, left + column, shape, strides, offsets, rows, columns, even)
            coming = fetch_slice(at, *pointers, extras, *switches, formats, even)
        else:
            at = slice_at(now[0], now[1], shape, strides, offsets, rows, columns, even)
            stored = fetch_slice(at, *pointers, extras, *switches, formats, even)
        if AHEAD > 0:
            row_ahead, column_ahead = slice_origin(gl.minimum(index + AHEAD, count - 1), HEIGHT, ROWS, COLUMNS)
            lines = prefetch_at(top + row_ahead, left + column_ahead, shape, strides, line_rows, even)
            prefetch_slice(lines, *pointers, *switches)
        # Without it ptxas moves the loads down into the arithmetic, where nothing hides them. The warps need not wait
        # for each other, which costs 2 % where memory is the limit; where arithmetic is, they do better abreast.
        if AHEAD > 0 and not in_codes(formats):
            device_slices.keep_order(rows)
        else:
            barrier()
        grad = device_handover.take_gradient(planes, index, layout, HEIGHT, WARPS, bits)
        at = slice_at(now[0], now[1], shape, strides, offsets, rows, columns, even)
        apply(at, stored, grad, s, keys, *pointers, extras, *switches, exact, formats, draws, even)


@gluon.jit
def help_slices(
    planes,
    down,
    across,
    first,
    shape,
    strides,
    table,
    pointers,
    extras,
    switches,
    functions: gl.constexpr,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
    TOGETHER: gl.constexpr,
    exact: gl.constexpr,
    formats: gl.constexpr,
    draws: gl.constexpr,
    even: gl.constexpr,
    bits: gl.constexpr,
):
    """The slices from `first` on of a tile whose gradient is there: load TOGETHER of them, then update and store."""
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
    top = down * HEIGHT
    left = across * WIDTH
    s = make_table(table)
    keys = make_keys(table, draws)
    tile = top, left, shape, strides, offsets, rows, columns
    for index in range(first, planes[0].shape[0], TOGETHER):
        loaded = load_slices(
            (), index, tile, pointers, extras, switches, functions, HEIGHT, ROWS, COLUMNS, TOGETHER, formats, even
        )
        barrier()
        for i in gl.static_range(TOGETHER):
            grad = device_handover.take_gradient(planes, index + i, layout, HEIGHT, WARPS, bits)
            row, column = slice_origin(index + i, HEIGHT, ROWS, COLUMNS)
            at = slice_at(top + row, left + column, shape, strides, offsets, rows, columns, even)
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
        top, left, shape, strides, offsets, rows, columns = tile
        row, column = slice_origin(index, HEIGHT, ROWS, COLUMNS)
        at = slice_at(top + row, left + column, shape, strides, offsets, rows, columns, even)
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
