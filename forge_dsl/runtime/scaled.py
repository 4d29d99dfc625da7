"""Operands in 8 bits on their way to a kernel: the type they are computed in, and who decodes them, and when.

The portable kernel can dequantise them as it loads them, and needs no memory for it; but each program that reads an
element dequantises it anew, which takes 2.4 to 4.7 times as long on an H200 as decoding it once (`fp8_operands.py`). So
that is what `schedule="fused"` does, and otherwise they are decoded first. The kernel for Hopper gets its operands by
TMA as they are, and a library's matrix product takes 16 or 32 bits: for these they are decoded first always, dy of
the banded schedule only for the rows of its band, x once for all bands (a band's sum over tokens is one matrix product,
which parts of x would split and so round otherwise, and every band would decode all of x again).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats.operand import CODES, Operand, Scaled
from forge_dsl.runtime import device_operands
from forge_dsl.runtime.devices import on
from forge_dsl.runtime.triton_support import AVAILABLE
from forge_dsl.selection.table import Schedule

_DECODE_TILE = (16, 128)


def dequantises_on_load(schedule: Schedule, asked: str) -> bool:
    """Whether the portable kernel takes operands in 8 bits as they are, and dequantises them as it loads them.

    schedule: the one that would be chosen for the same operands in 16 bits; asked: the optimizer's. False: they are
    decoded first, into temporaries, and updated by that schedule.
    """
    return schedule == "portable" and asked == "fused"


def compute_dtype(x: Operand, dy: Operand) -> torch.dtype:
    """The type that operands are dequantised to: that of the one which is not in 8 bits, else bfloat16."""
    plain = next((operand for operand in (x, dy) if isinstance(operand, Tensor)), None)
    if plain is None:
        return torch.bfloat16
    return plain.dtype if plain.dtype in (torch.bfloat16, torch.float16) else torch.float32


def stand_ins(x: Operand, dy: Operand) -> tuple[Tensor, Tensor]:
    """Tensors without memory that look as the operands will once they are decoded."""
    dtype = compute_dtype(x, dy)

    def shown(operand: Operand) -> Tensor:
        return operand if isinstance(operand, Tensor) else torch.empty(operand.shape, dtype=dtype, device="meta")

    return shown(x), shown(dy)


def prepared(schedule: Schedule, asked: str, x: Operand, dy: Operand) -> tuple[Schedule, Operand, Operand]:
    """The schedule to take instead of `schedule`, chosen for `stand_ins`, and the operands as that one takes them.

    asked: the optimizer's schedule, "auto", "fused" or "banded".
    """
    if dequantises_on_load(schedule, asked):
        return "portable", x, dy
    if schedule == "banded":
        return schedule, x, dy
    dtype = compute_dtype(x, dy)
    return schedule, decoded(x, dtype), decoded(dy, dtype)


def decoded(operand: Operand, dtype: torch.dtype, columns: slice | None = None) -> Tensor:
    """`Scaled.decode`, by a kernel on a GPU; a plain operand as it is. columns: a range of columns."""
    if isinstance(operand, Tensor):
        return operand if columns is None else operand[:, columns]
    if operand.device.type == "cuda" and AVAILABLE:
        return decoded_by_kernel(operand, dtype, columns)
    return operand.decode(dtype, columns)


def decoded_by_kernel(operand: Scaled, dtype: torch.dtype, columns: slice | None = None) -> Tensor:
    """`Scaled.decode` in one launch, on a GPU or in Triton's interpreter."""
    tokens, features = operand.shape
    start, stop, _ = (columns or slice(None)).indices(features)
    numbers = torch.empty(tokens, max(0, stop - start), dtype=dtype, device=operand.device)
    if numbers.numel():
        block_t, width = _DECODE_TILE
        count = -(-tokens // block_t) * -(-(stop - start // width * width) // width)
        codes, scales = operand.codes.view(torch.uint8), _loadable(operand.scales)
        with on(codes.device):
            device_operands.decode_kernel[(count,)](
                codes,
                scales,
                numbers,
                tokens,
                stop,
                *codes.stride(),
                *scales.stride(),
                start,
                CODE=CODES[operand.codes.dtype],
                BLOCK=operand.block,
                BLOCK_T=block_t,
                WIDTH=width,
                num_warps=4,
            )
    return numbers


def arguments(x: Operand, dy: Operand) -> tuple[Tensor, Tensor, tuple[Any, ...], tuple[Any, ...]]:
    """x and dy as a kernel is given them, then its `scaled` and its `operands`; see `device_operands`."""
    dtype = compute_dtype(x, dy)
    given, scaled, kinds = [], [], []
    for operand in (x, dy):
        if isinstance(operand, Scaled):
            scales = _loadable(operand.scales)
            given.append(operand.codes.view(torch.uint8))
            scaled += [scales, *scales.stride()]
            kinds += [CODES[operand.codes.dtype], operand.block]
        else:
            given.append(operand.to(dtype))
            scaled += [given[-1], 0, 0]
            kinds += ["plain", 0]
    return given[0], given[1], tuple(scaled), tuple(kinds)


def _loadable(scales: Tensor) -> Tensor:
    """Scales in a type that every Triton knows: powers of two are bytes."""
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
