"""The gradient `dY^T X` of a tile, of operands in 8 bits too: float8 codes become numbers as they are loaded.

x `[tokens, columns]` and dy `[tokens, rows]` are read in steps of BLOCK_T tokens. The sum over tokens is complete when
`gradient_tile` returns; nothing is split over tokens, so two runs agree bit for bit.

Not every GPU that the kernels run on converts float8 itself (e4m3 needs sm_89), and a byte's bits, moved to their place
in fp32, are the number up to a power of two: one path for all devices, with the bits of `Scaled.decode`.

`operands` is None for ordinary operands, else `(x_code, x_block, dy_code, dy_block)`: a code is "plain", "e4m3" or
"e5m2" (then x or dy points to bytes), a block how many columns share a scale, 0 for all of a row. `scaled` is then
`(x_scales, x_scale_token, x_scale_block, dy_scales, ...)`: pointer and strides; a plain operand's are not read.
"""

from __future__ import annotations

from forge_dsl.runtime import device_math
from forge_dsl.runtime.triton_support import tl, triton


@triton.jit
def gradient_tile(
    x,
    dy,
    scaled,
    first_row,
    first_column,
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
    operands: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """`dY^T X` from `first_row` and `first_column` on, fp32 [BLOCK_O, BLOCK_I], of operands however they are kept.

    even: no dimension needs a mask. upcast: multiply in fp32. Scales are loaded a step ahead, since they are too few to
    be pipelined.
    """
    rows = first_row + tl.arange(0, BLOCK_O)
    columns = first_column + tl.arange(0, BLOCK_I)
    x_code: tl.constexpr = "plain" if operands is None else operands[0]
    dy_code: tl.constexpr = "plain" if operands is None else operands[2]
    if operands is not None:
        x_block: tl.constexpr = operands[1]
        dy_block: tl.constexpr = operands[3]
        x_scales, x_scale_token, x_scale_block, dy_scales, dy_scale_token, dy_scale_block = scaled
    # Numbers are made in the type of the operand that is plain.
    plain: tl.constexpr = x.dtype.element_ty if x_code == "plain" else dy.dtype.element_ty
    dtype: tl.constexpr = plain if x_code == "plain" or dy_code == "plain" else tl.bfloat16
    steps = tl.arange(0, BLOCK_T).to(rows.dtype)
    # In the type of the offsets: BLOCK_T tokens may lie further apart than 32 bits reach.
    dy_stride = BLOCK_T * tl.cast(dy_token, rows.dtype)
    x_stride = BLOCK_T * tl.cast(x_token, rows.dtype)
    dy_at = dy + steps[:, None] * dy_token + rows[None, :] * dy_row
    x_at = x + steps[:, None] * x_token + columns[None, :] * x_column
    row_inside = (rows < n_rows)[None, :]
    column_inside = (columns < n_columns)[None, :]
    if x_code != "plain":
        x_scale = load_scales(
            x_scales, x_scale_token, x_scale_block, steps, tokens, first_column, n_columns, x_block, BLOCK_I
        )
    if dy_code != "plain":
        dy_scale = load_scales(
            dy_scales, dy_scale_token, dy_scale_block, steps, tokens, first_row, n_rows, dy_block, BLOCK_O
        )
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, tokens, BLOCK_T):
        if even:
            upstream = tl.load(dy_at)
            activation = tl.load(x_at)
        else:
            # The zero of a masked lane is the code of 0 as well.
            token_inside = (steps < tokens - start)[:, None]
            upstream = tl.load(dy_at, mask=token_inside & row_inside, other=0)
            activation = tl.load(x_at, mask=token_inside & column_inside, other=0)
        following = steps + start + BLOCK_T
        if dy_code != "plain":
            upstream = dequantised(upstream, dy_scale, dy_code, dtype)
            dy_scale = load_scales(
                dy_scales, dy_scale_token, dy_scale_block, following, tokens, first_row, n_rows, dy_block, BLOCK_O
            )
        if x_code != "plain":
            activation = dequantised(activation, x_scale, x_code, dtype)
            x_scale = load_scales(
                x_scales, x_scale_token, x_scale_block, following, tokens, first_column, n_columns, x_block, BLOCK_I
            )
        if upcast:
            upstream = upstream.to(tl.float32)
            activation = activation.to(tl.float32)
        total = tl.dot(tl.trans(upstream), activation, total, input_precision=precision)
        dy_at += dy_stride
        x_at += x_stride
    return total


@triton.jit
def load_scales(
    scales,
    token_stride,
    block_stride,
    token,
    tokens,
    first_column,
    n_columns,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scales of tokens `token` and WIDTH columns from `first_column` on, [tokens, scales of that range]; else 0.

    WIDTH is a multiple of BLOCK or divides it, and `first_column` is a multiple of WIDTH.
    """
    inside = (token < tokens)[:, None]
    if BLOCK == 0:
        at = token[:, None] * token_stride
    else:
        count: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        block = first_column // BLOCK + tl.arange(0, count)
        at = token[:, None] * token_stride + block[None, :] * block_stride
        inside = inside & (block * BLOCK < n_columns)[None, :]
    return tl.load(scales + at, mask=inside, other=0)


@triton.jit
def dequantised(codes, scales, CODE: tl.constexpr, dtype: tl.constexpr):
    """Bytes [T, C] and scales [T, n] as numbers [T, C]: the product in fp32, rounded once to `dtype`."""
    value = number(codes, CODE)
    factors = factor(scales)
    T: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    n: tl.constexpr = scales.shape[1]
    if n == 1:
        value = value * factors
    else:
        blocks = tl.reshape(value, (T, n, C // n)) * factors[:, :, None]
        value = tl.reshape(blocks, (T, C))
    return device_math.rounded(value, dtype)


@triton.jit
def number(codes, CODE: tl.constexpr):
    """float8 codes, as bytes, in fp32: exponent and fraction at their place there, times a power of two. Exact."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    sign = (code & 0x80) << 24
    if CODE == "e4m3":
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, sign | (magnitude << 20))
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        tl.static_assert(CODE == "e5m2")
        bits = sign | (magnitude << 21)
        bits = tl.where(magnitude >= 0x7C, bits | 0x7F800000, bits)
        value = bits.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
    return value


@triton.jit
def factor(scales):
    """Scales in fp32: as they are, or of a byte b the number 2^(b - 127), of 255 NaN."""
    if scales.dtype == tl.float32:
        found = scales
    else:
        exponent = scales.to(tl.int32)
        bits = tl.where(exponent == 255, 0x7FC00000, tl.maximum(exponent << 23, 0x00400000))
        found = bits.to(tl.float32, bitcast=True)
    return found


@triton.jit
def decode_kernel(
    codes,
    scales,
    numbers,
    tokens,
    n_columns,
    code_token,
    code_column,
    scale_token,
    scale_block,
    first_column,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`Scaled.decode`: numbers [tokens, n_columns - first_column], contiguous, of columns from `first_column` on."""
    tile = tl.program_id(0).to(tl.int64)
    start = first_column // WIDTH * WIDTH
    across = tl.cdiv(n_columns - start, WIDTH)
    token = tile // across * BLOCK_T + tl.arange(0, BLOCK_T)
    first = start + tile % across * WIDTH
    columns = first + tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & ((columns >= first_column) & (columns < n_columns))[None, :]
    found = tl.load(codes + token[:, None] * code_token + columns[None, :] * code_column, mask=inside, other=0)
    factors = load_scales(scales, scale_token, scale_block, token, tokens, first, n_columns, BLOCK, WIDTH)
    value = dequantised(found, factors, CODE, numbers.dtype.element_ty)
    at = token[:, None] * (n_columns - first_column) + (columns - first_column)[None, :]
    tl.store(numbers + at, value, mask=inside)
