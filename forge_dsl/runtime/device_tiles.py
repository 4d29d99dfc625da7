"""The parts of a fused kernel that no rule changes: which tile is next, and how a tile in registers is taken apart."""

from __future__ import annotations

from forge_dsl.runtime.triton_support import tl, triton


@triton.jit
def tile_position(tile, n_rows, n_columns, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows of tiles are walked column by column, so that their operands stay in L2."""
    down = tl.cdiv(n_rows, BLOCK_O)
    across = tl.cdiv(n_columns, BLOCK_I)
    per_group = GROUP * across
    first = (tile // per_group) * GROUP
    height = min(down - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def parts(tile, SLICES_O: tl.constexpr, SLICES_I: tl.constexpr):
    """The tile in SLICES_O x SLICES_I parts (1 or 2, by 1, 2 or 4), row of parts by row of parts; see `part_rows`."""
    tl.static_assert(SLICES_O == 1 or SLICES_O == 2)
    if SLICES_O == 1:
        found = column_parts(tile, SLICES_I)
    else:
        upper, lower = interleaved_rows(tile)
        found = column_parts(upper, SLICES_I) + column_parts(lower, SLICES_I)
    return found


@triton.jit
def part_rows(first, BLOCK_O: tl.constexpr, SLICES_O: tl.constexpr, part: tl.constexpr):
    """The rows of a part that begins at row `first` of parts: all, or every other group of eight."""
    rows = tl.arange(0, BLOCK_O // SLICES_O)
    if SLICES_O == 2:
        rows = (rows // 8) * 16 + rows % 8 + 8 * part
    return first + rows


@triton.jit
def interleaved_rows(tile):
    """Two halves of a tile: rows 0-7, 16-23, ... and rows 8-15, 24-31, ...

    A thread of the matrix units holds rows r and r + 8, so this split, and no other by rows, stays in registers.
    """
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    grouped = tl.permute(tl.reshape(tile, (rows // 16, 2, 8, columns)), (0, 2, 3, 1))
    upper, lower = tl.split(grouped)
    return tl.reshape(upper, (rows // 2, columns)), tl.reshape(lower, (rows // 2, columns))


@triton.jit
def column_parts(tile, SLICES_I: tl.constexpr):
    """The tile as a tuple of 1, 2 or 4 ranges of columns, from left to right."""
    tl.static_assert(SLICES_I == 1 or SLICES_I == 2 or SLICES_I == 4)
    if SLICES_I == 1:
        found = (tile,)
    elif SLICES_I == 2:
        left, right = halves(tile)
        found = (left, right)
    else:
        left, right = halves(tile)
        a, b = halves(left)
        c, d = halves(right)
        found = (a, b, c, d)
    return found


@triton.jit
def halves(tile):
    """The left and right half of a tile, without leaving registers."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, half)), (0, 2, 1)))
