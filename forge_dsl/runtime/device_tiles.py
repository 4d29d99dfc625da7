"""The parts of a fused kernel that no rule changes: which tile is next, and its gradient `dY^T X` in fp32 registers.

x `[tokens, columns]` and dy `[tokens, rows]` are read in steps of BLOCK_T tokens. The sum over tokens is complete when
`gradient_tile` returns; nothing is split over tokens, so two runs agree bit for bit.
"""

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
def gradient_tile(
    x,
    dy,
    rows,
    columns,
    tokens,
    n_rows,
    n_columns,
    x_token,
    x_column,
    dy_token,
    dy_row,
    even: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """`dY^T X` at `rows` x `columns`, fp32. `even`: no dimension needs a mask. `upcast`: multiply in fp32."""
    steps = tl.arange(0, BLOCK_T).to(rows.dtype)
    dy_at = dy + steps[:, None] * dy_token + rows[None, :] * dy_row
    x_at = x + steps[:, None] * x_token + columns[None, :] * x_column
    row_inside = (rows < n_rows)[None, :]
    column_inside = (columns < n_columns)[None, :]
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, tokens, BLOCK_T):
        if even:
            upstream = tl.load(dy_at)
            activation = tl.load(x_at)
        else:
            token_inside = (steps < tokens - start)[:, None]
            upstream = tl.load(dy_at, mask=token_inside & row_inside, other=0.0)
            activation = tl.load(x_at, mask=token_inside & column_inside, other=0.0)
        if upcast:
            upstream = upstream.to(tl.float32)
            activation = activation.to(tl.float32)
        total = tl.dot(tl.trans(upstream), activation, total, input_precision=precision)
        dy_at += BLOCK_T * dy_token
        x_at += BLOCK_T * x_token
    return total


@triton.jit
def halves(tile):
    """The left and right half of a tile, without leaving registers."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, half)), (0, 2, 1)))


@triton.jit
def column_slices(tile, SLICES: tl.constexpr):
    """The tile as a tuple of 1, 2 or 4 slices of columns, from left to right."""
    if SLICES == 1:
        parts = (tile,)
    elif SLICES == 2:
        left, right = halves(tile)
        parts = (left, right)
    else:
        tl.static_assert(SLICES == 4)
        left, right = halves(tile)
        a, b = halves(left)
        c, d = halves(right)
        parts = (a, b, c, d)
    return parts
