"""Blocks of 64 columns and their power-of-two scale, one byte each (ue8m0 of the OCP microscaling specification).

A scale byte `b` stands for `2^(b - 127)`; 255 marks a block that held something that is not finite. A power of two
makes every scaling exact, so nothing is divided and no device can differ, and it leaves the grid of a block where it
is until the largest magnitude crosses a power of two, so that a value which did not change is stored again as it was.
(In one block of a hundred the largest is rounded down across such a power, and the block gets finer codes next time.)
Measured against fp32 and bf16 scales: `benchmarks/state_formats.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
NOT_FINITE = 255


class Blocks(NamedTuple):
    """A matrix in blocks of 64 columns, the last one filled up with zeros."""

    values: Tensor  # fp32 [rows, blocks, 64]
    scales: Tensor  # int32 [rows, blocks]


def count(columns: int) -> int:
    """Blocks in a row."""
    return -(-columns // BLOCK)


def in_blocks(matrix: Tensor) -> Tensor:
    """`[rows, columns]` as `[rows, blocks, 64]`; what lies beyond the last column is zero."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, count(columns) * BLOCK - columns))
    return padded.reshape(rows, count(columns), BLOCK)


def scaled(values: Tensor, top: int, least: int, nonnegative: bool) -> Blocks:
    """Magnitudes in units of the block's scale, at most the number whose fp32 pattern is `top`; see `scale_of`.

    A block that is not finite (or, in a domain without negative numbers, has one) becomes zeros under `NOT_FINITE`.
    """
    blocks = in_blocks(values.to(torch.float32))
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    if nonnegative:
        magnitude = torch.where(blocks < 0, 0x7FC00000, magnitude)
    scales = scale_of(magnitude.amax(2), top, least)
    unit = ((254 - scales).clamp(min=1) << 23).view(torch.float32)
    finite = (scales != NOT_FINITE)[:, :, None]
    units = torch.where(finite, blocks.abs() * unit[:, :, None], 0.0)
    return Blocks(units, scales)


def scale_of(largest: Tensor, top: int, least: int) -> Tensor:
    """The least scale byte from `least` on under which fp32 pattern `largest` is at most pattern `top`.

    Positive fp32 numbers are ordered as their patterns, and 2^23 further in the pattern is twice the number.
    """
    exponent = (largest - top + 0x7FFFFF) >> 23
    scales = (exponent + 127).clamp(min=least)
    return torch.where(largest < 0x7F800000, scales, NOT_FINITE)


def stored(scales: Tensor) -> Tensor:
    """Scale bytes as they lie in memory: uint8 `[blocks, rows]`, so that a tile of rows reads them side by side."""
    return scales.to(torch.uint8).t().contiguous()


def factors(scales: Tensor, shift: int) -> Tensor:
    """Stored scales as fp32 `2^(b - shift - 127)`, `[rows, blocks, 1]`; infinite for a block that was not finite."""
    exponent = scales.t().to(torch.int32)
    exponent = torch.where(exponent == NOT_FINITE, exponent, exponent - shift)
    return (exponent << 23).view(torch.float32)[:, :, None]
