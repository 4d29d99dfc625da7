"""The gradient of a tile on its way through shared memory, from the warps that multiply to those that apply the rule.

The upper 16 bits of each fp32 number are in one plane, and what else is kept in another:

    bits  low plane                          memory of a tile  relative error    whole numbers that pass
    16    none                               64 KiB            2^-8              up to 2^8
    20    4 bits of two numbers in a byte    80 KiB            2.5 * 2^-13       up to 2^12
    24    8 bits                             96 KiB            2.5 * 2^-17       up to 2^16
    32    16 bits                            128 KiB           none              all

With 16 bits the number is rounded to nearest. With 20 and 24 it is multiplied by 1 + 1.5 * 2^-(bits - 7) and then cut
off, nearly the same: of the bits - 8 significant bits that are kept, the last one is worth 2^-(bits - 9) of a number
just above a power of two, so the error is between -(4 - 1.5) and 1.5 times 2^-(bits - 7) of it. The product adds less
than one of these units to a number, so one that has no more significant bits than are kept passes unchanged; so do
infinities, zeros with their sign, and NaN as some NaN. Subnormal numbers are cut off at 2^-(117 + bits).
`gradient_bits.handed_over` is the same in PyTorch.

The planes are laid out so that neither side needs to shuffle. A thread of the matrix units holds columns c, c + 1 of
rows r, r + 8, which become four neighbouring bytes of the low plane; with 20 bits those of column c + 64 share the
bytes of column c. With 32 bits both planes have the layout of the upper one, in which a thread reads 8 columns.
"""

from __future__ import annotations

from forge_dsl.runtime.gluon_support import PUBLIC_REINTERPRET, gl, gluon


@gluon.jit
def allocate_planes(
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, bits: gl.constexpr
):
    """Shared memory for the gradient of TILES tiles, a group of COLUMNS columns at each first index (with 20 bits, of
    the low plane, two of them). With 16 bits the second plane is the first."""
    groups: gl.constexpr = TILES * WIDTH // COLUMNS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    high = gl.allocate_shared_memory(gl.bfloat16, [groups, HEIGHT, COLUMNS], layout)
    if bits == 16:
        return high, high
    elif bits == 32:
        return high, gl.allocate_shared_memory(gl.int16, [groups, HEIGHT, COLUMNS], layout)
    else:
        bytes_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        shape: gl.constexpr = [groups * (bits - 16) // 8, HEIGHT // 2, 2 * COLUMNS]
        return high, gl.allocate_shared_memory(gl.uint8, shape, bytes_layout)


@gluon.jit
def in_slices(tall_planes, ROWS: gl.constexpr, bits: gl.constexpr):
    """The same memory with a slice of ROWS rows at each first index, down the rows of a column group first."""
    high, low = tall_planes
    if bits == 16:
        upper = in_parts(high, ROWS)
        return upper, upper
    elif bits == 32:
        return in_parts(high, ROWS), in_parts(low, ROWS)
    else:
        return in_parts(high, ROWS), in_parts(low, ROWS // 2)


@gluon.jit
def in_parts(plane, ROWS: gl.constexpr):
    """A plane [groups, rows, columns] as [parts, ROWS, columns]."""
    count: gl.constexpr = plane.shape[0] * plane.shape[1] // ROWS
    columns: gl.constexpr = plane.shape[2]
    dtype: gl.constexpr = plane.dtype
    layout: gl.constexpr = plane.layout
    return seen_as(plane, dtype, [count, ROWS, columns], layout)


@gluon.constexpr_function
def sharing(bits):
    """Column groups that share a low plane, and so are written together."""
    return 2 if bits == 20 else 1


@gluon.jit
def put_gradient(total, planes, first, bits: gl.constexpr):
    """Write a tile's gradient, fp32 in the layout of the matrix units, to the planes, from column group `first` on."""
    columns: gl.constexpr = total.shape[1]
    width: gl.constexpr = planes[0].shape[2]
    if columns > sharing(bits) * width:
        left, right = halves(total)
        put_gradient(left, planes, first, bits)
        put_gradient(right, planes, first + columns // 2 // width, bits)
    elif bits == 16:
        planes[0].index(first).store(total.to(planes[0].dtype))
    elif bits == 20:
        left, right = halves(total * 1.00018310546875)
        high, next_high, low = split_20(left, right)
        planes[0].index(first).store(high)
        planes[0].index(first + 1).store(next_high)
        planes[1].index(first // 2).store(fold_rows(low))
    elif bits == 24:
        high, low = split_24(total * 1.0000114440918)
        planes[0].index(first).store(high)
        planes[1].index(first).store(fold_rows(low))
    else:
        high, low = split_32(total)
        planes[0].index(first).store(high)
        planes[1].index(first).store(low)


@gluon.jit
def take_gradient(planes, index, layout: gl.constexpr, HEIGHT: gl.constexpr, WARPS: gl.constexpr, bits: gl.constexpr):
    """Slice `index`, down the rows of the tile first, of the gradient in fp32."""
    high = planes[0].index(index).load(layout)
    if bits == 16:
        grad = high.to(gl.float32)
    elif bits == 32:
        grad = join_32(high, planes[1].index(index).load(layout))
    else:
        rows: gl.constexpr = high.shape[0]
        down: gl.constexpr = HEIGHT // rows
        bytes_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        if bits == 20:
            low = planes[1].index(index // (2 * down) * down + index % down).load(bytes_layout)
        else:
            low = planes[1].index(index).load(bytes_layout)
        low = low.reshape([rows // 16, 8, 32, 2, 2]).permute(0, 3, 1, 2, 4).reshape([rows, 64])
        high = gl.convert_layout(high, low.type.layout)
        if bits == 20:
            grad = join_20(high, low, gl.where(index // down % 2 == 0, 4, 0))
        else:
            grad = join_24(high, low)
        grad = gl.convert_layout(grad, layout)
    return grad


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape([rows, 2, columns // 2]).permute(0, 2, 1).split()


@gluon.jit
def split_20(left, right):
    """Twice fp32 -> bits 31 to 16 of each (as bf16), and their bits 15 to 12 in one byte, those of `left` below."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 t0, t1, t2, t3;
            prmt.b32 $0, $5, $6, 0x7632;
            prmt.b32 $1, $7, $8, 0x7632;
            prmt.b32 $2, $9, $10, 0x7632;
            prmt.b32 $3, $11, $12, 0x7632;
            prmt.b32 t0, $5, $6, 0x0051;
            prmt.b32 t1, $7, $8, 0x0051;
            prmt.b32 t2, t0, t1, 0x5410;
            shr.u32 t2, t2, 4;
            prmt.b32 t0, $9, $10, 0x0051;
            prmt.b32 t1, $11, $12, 0x0051;
            prmt.b32 t3, t0, t1, 0x5410;
            lop3.b32 $4, t2, t3, 0x0F0F0F0F, 0xE4;
        }""",
        "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [left.to(gl.int32, bitcast=True), right.to(gl.int32, bitcast=True)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def join_20(high, low, shift):
    """The reverse of `split_20` for one of the two; bits 11 to 0 are zero. shift: 4 for `left`, 0 for `right`."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 q, t, u;
            shl.b32 q, $6, $7;
            and.b32 t, q, 0x00F000F0;
            and.b32 u, q, 0xF000F000;
            prmt.b32 $0, $4, t, 0x1045;
            prmt.b32 $1, $4, u, 0x3254;
            prmt.b32 $2, $5, t, 0x1067;
            prmt.b32 $3, $5, u, 0x3276;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r",
        [high, low, shift],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def split_24(x):
    """fp32 -> bits 31 to 16 (as bf16) and bits 15 to 8 (as bytes): five byte permutes for four numbers."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 t0, t1;
            prmt.b32 $0, $3, $4, 0x7632;
            prmt.b32 $1, $5, $6, 0x7632;
            prmt.b32 t0, $3, $4, 0x0051;
            prmt.b32 t1, $5, $6, 0x0051;
            prmt.b32 $2, t0, t1, 0x5410;
        }""",
        "=r,=r,=r,r,r,r,r",
        [x.to(gl.int32, bitcast=True)],
        dtype=(gl.bfloat16, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def join_24(high, low):
    """The reverse of `split_24`; bits 7 to 0 are zero."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 t, u;
            and.b32 t, $6, 0x00FF00FF;
            and.b32 u, $6, 0xFF00FF00;
            prmt.b32 $0, $4, t, 0x1045;
            prmt.b32 $1, $4, u, 0x3254;
            prmt.b32 $2, $5, t, 0x1067;
            prmt.b32 $3, $5, u, 0x3276;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [high, low],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def split_32(x):
    """fp32 -> bits 31 to 16 (as bf16) and bits 15 to 0: two byte permutes for two numbers."""
    return gl.inline_asm_elementwise(
        """{
            prmt.b32 $0, $2, $3, 0x7632;
            prmt.b32 $1, $2, $3, 0x5410;
        }""",
        "=r,=r,r,r",
        [x.to(gl.int32, bitcast=True)],
        dtype=(gl.bfloat16, gl.int16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def join_32(high, low):
    """The reverse of `split_32`."""
    return gl.inline_asm_elementwise(
        """{
            prmt.b32 $0, $3, $2, 0x5410;
            prmt.b32 $1, $3, $2, 0x7632;
        }""",
        "=r,=r,r,r",
        [high, low],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def fold_rows(low):
    """[rows, columns] bytes as [rows / 2, 2 columns]: rows r and r + 8 side by side, a thread's four bytes together."""
    rows: gl.constexpr = low.shape[0]
    columns: gl.constexpr = low.shape[1]
    return low.reshape([rows // 16, 2, 8, columns // 2, 2]).permute(0, 2, 3, 1, 4).reshape([rows // 2, columns * 2])


@gluon.jit
def seen_as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Another view of the same shared memory."""
    if PUBLIC_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)
