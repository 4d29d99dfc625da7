"""The gradient of a tile on its way through shared memory, from the warps that multiply to those that apply the rule.

The upper 16 bits of each fp32 number are in one plane, and with `bits=24` the next 8 in another: 96 KiB for a tile of
128 x 256. The number is rounded nearly to nearest (multiplied by 1 + 1.5 * 2^-17, then cut off), with a relative error
of at most 2.5 * 2^-17; infinities, NaN, zeros and whole numbers up to 2^16 pass unchanged. With `bits=16` there is one
plane, of bf16, rounded to nearest.

The planes are laid out so that neither side needs to shuffle: a thread of the matrix units holds columns c, c + 1 of
rows r, r + 8, which become four neighbouring bytes of the low plane.
"""

from __future__ import annotations

from forge_dsl.runtime.gluon_support import PUBLIC_REINTERPRET, gl, gluon


@gluon.jit
def put_gradient(total, planes, first: gl.constexpr, bits: gl.constexpr):
    """Write a tile's gradient, fp32 in the layout of the matrix units, to the planes, from column group `first` on."""
    columns: gl.constexpr = total.shape[1]
    rows: gl.constexpr = total.shape[0]
    width: gl.constexpr = planes[0].shape[2]
    if columns == width:
        if bits == 16:
            planes[0].index(first).store(total.to(planes[0].dtype))
        else:
            # 1 + 1.5 * 2^-17: what is cut off then is nearly rounded to nearest.
            high, low = split_bits(total * 1.0000114440918)
            planes[0].index(first).store(high)
            planes[1].index(first).store(fold_rows(low))
    else:
        left, right = total.reshape([rows, 2, columns // 2]).permute(0, 2, 1).split()
        put_gradient(left, planes, first, bits)
        put_gradient(right, planes, first + columns // 2 // width, bits)


@gluon.jit
def take_gradient(planes, index, layout: gl.constexpr, WARPS: gl.constexpr, bits: gl.constexpr):
    """Slice `index` of the gradient in fp32."""
    high = planes[0].index(index).load(layout)
    if bits == 16:
        grad = high.to(gl.float32)
    else:
        rows: gl.constexpr = high.shape[0]
        bytes_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        low = planes[1].index(index).load(bytes_layout)
        low = low.reshape([rows // 16, 8, 32, 2, 2]).permute(0, 3, 1, 2, 4).reshape([rows, 64])
        high = gl.convert_layout(high, low.type.layout)
        grad = gl.convert_layout(join_bits(high, low), layout)
    return grad


@gluon.jit
def split_bits(x):
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
def join_bits(high, low):
    """The reverse of `split_bits`; bits 7 to 0 are zero."""
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
