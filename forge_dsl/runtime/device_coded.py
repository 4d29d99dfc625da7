"""Decoding a weight of fp8 codes into numbers, in one kernel: a byte read and two (or four) written for each."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_dsl.formats import scale
from forge_dsl.runtime import device_formats, device_math
from forge_dsl.runtime.devices import on
from forge_dsl.runtime.triton_support import tl, triton

_ROWS, _COLUMNS = 16, 256


@triton.jit
def decode_matrix(codes, scales, out, rows, columns, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """out [rows, columns] of uint8 codes of that shape and scales uint8 [blocks, rows], all dense; a tile each."""
    across = tl.cdiv(columns, BLOCK_I)
    tile = tl.program_id(0)
    row = (tile // across) * BLOCK_O + tl.arange(0, BLOCK_O)
    first_column = (tile % across) * BLOCK_I
    column = first_column + tl.arange(0, BLOCK_I)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    block = first_column // 64 + tl.arange(0, BLOCK_I // 64)
    there = (row < rows)[:, None] & (block * 64 < columns)[None, :]
    exponents = tl.load(scales + block.to(tl.int64)[None, :] * rows + row[:, None], mask=there, other=127)
    numbers = device_formats.decode(tl.load(codes + at, mask=inside, other=0), exponents, "fp8", False)
    tl.store(out + at, device_math.rounded(numbers, out.dtype.element_ty), mask=inside)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [rows, columns] of contiguous uint8 codes [rows, columns] and scales [ceil(columns / 64), rows]."""
    rows, columns = codes.shape
    assert codes.is_contiguous() and scales.is_contiguous() and tuple(scales.shape) == (scale.count(columns), rows)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if out.numel():
        grid = (-(-rows // _ROWS) * -(-columns // _COLUMNS),)
        with on(codes.device):
            decode_matrix[grid](codes, scales, out, rows, columns, BLOCK_O=_ROWS, BLOCK_I=_COLUMNS, num_warps=4)
    return out
