"""Kernels that call one function of `device_formats` on the tiles of a matrix, with masks, as an epilogue does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.formats import rounding, scale
from forge_dsl.runtime import device_formats
from forge_dsl.runtime.triton_support import AVAILABLE, tl, triton

launched = pytest.mark.skipif(not AVAILABLE, reason="needs Triton, on a GPU or in its interpreter")
ROWS, COLUMNS = 16, 128


@triton.jit
def draw_tiles(out, base, step, n_rows, n_columns, row0, column0, stream: tl.constexpr, flat: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    first = tl.program_id(1) * 128
    columns = first + tl.arange(0, 128)
    turned = device_formats.turned(tl.load(step), stream)
    key = device_formats.key_in((tl.load(base).to(tl.uint32, bitcast=True), turned, turned, turned), stream)
    if flat:
        drawn = device_formats.draw_at(key, (row0 + rows)[:, None], (column0 + columns)[None, :])
    else:
        drawn = device_formats.draws(key, row0 + rows, column0 + first, 128)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(out + rows[:, None] * n_columns + columns[None, :], drawn, mask=inside)


@triton.jit
def round_numbers(x, drawn, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rounded = device_formats.rounded_stochastic(tl.load(x + at), out.dtype.element_ty, tl.load(drawn + at))
    tl.store(out + at, rounded)


@triton.jit
def encode_tiles(
    x,
    drawn,
    codes,
    scales,
    n_rows,
    n_columns,
    FORMAT: tl.constexpr,
    NONNEGATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FLUSH: tl.constexpr,
):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    at = rows[:, None] * n_columns + columns[None, :]
    values = tl.where(inside, tl.load(x + at, mask=inside, other=float("nan")), 0.0)
    draw = tl.load(drawn + at, mask=inside, other=0)
    code, scale_bytes = device_formats.encode(values, draw, FORMAT, NONNEGATIVE, STOCHASTIC, True, FLUSH)
    tl.store(codes + at, code, mask=inside)
    blocks = tl.program_id(1) * 2 + tl.arange(0, 2)
    there = (rows < n_rows)[:, None] & (blocks < tl.cdiv(n_columns, 64))[None, :]
    tl.store(scales + blocks[None, :] * n_rows + rows[:, None], scale_bytes, mask=there)


@triton.jit
def decode_tiles(codes, scales, out, n_rows, n_columns, FORMAT: tl.constexpr, NONNEGATIVE: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    at = rows[:, None] * n_columns + columns[None, :]
    blocks = tl.program_id(1) * 2 + tl.arange(0, 2)
    there = (rows < n_rows)[:, None] & (blocks < tl.cdiv(n_columns, 64))[None, :]
    scale_bytes = tl.load(scales + blocks[None, :] * n_rows + rows[:, None], mask=there, other=127)
    code = tl.load(codes + at, mask=inside, other=0)
    tl.store(out + at, device_formats.decode(code, scale_bytes, FORMAT, NONNEGATIVE), mask=inside)


@triton.jit
def split_numbers(w, drawn, high, low, back, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    upper, rest = device_formats.split(tl.load(w + at), tl.load(drawn + at), BITS, STOCHASTIC)
    tl.store(high + at, upper)
    tl.store(low + at, rest)
    tl.store(back + at, device_formats.joined(upper, rest, BITS))


def grid(values: Tensor) -> tuple[int, int]:
    return -(-values.shape[0] // ROWS), -(-values.shape[1] // COLUMNS)


def encoded(values: Tensor, draws: Tensor | None, name: str, nonnegative: bool, flush: bool = True):
    """Codes and scales that the kernel makes, in memory poisoned before."""
    rows, columns = values.shape
    codes = torch.full((rows, columns), 77, dtype=torch.uint8, device=values.device)
    scales = torch.full((scale.count(columns), rows), 77, dtype=torch.uint8, device=values.device)
    drawn = torch.zeros_like(values, dtype=torch.int32) if draws is None else draws
    stochastic = draws is not None
    encode_tiles[grid(values)](values, drawn, codes, scales, rows, columns, name, nonnegative, stochastic, flush)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, name: str, nonnegative: bool) -> Tensor:
    out = torch.empty(codes.shape, device=codes.device)
    decode_tiles[grid(codes)](codes, scales, out, *codes.shape, name, nonnegative)
    return out


def drawn(seed: int, weight_id: int, step: int, stream: int, shape, row0: int, column0: int, flat: bool) -> Tensor:
    device = testing.device()
    base = torch.tensor([rounding.signed32(rounding.base(seed, weight_id))], dtype=torch.int32, device=device)
    steps = torch.tensor([step], device=device)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    draw_tiles[grid(out)](out, base, steps, *shape, row0, column0, stream, flat)
    return out
