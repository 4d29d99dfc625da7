"""The banded route: fp32 gradient bands of a few rows, each used while it is in cache, then overwritten by the next.

On a CPU the generated reference updates the band; on a GPU a library GEMM writes it and the element-wise kernel uses
it. Either way the gradient costs one band and never the size of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats import registry, rounding
from forge_dsl.formats.extended import Extended
from forge_dsl.formats.operand import Operand, Scaled
from forge_dsl.runtime import scaled
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import BLOCK_WISE, Storage, block_wise, plain

# Elements of one fp32 band: 1 MiB, so that a band and the update's temporaries stay in a core's cache.
CPU_BAND = 1 << 18
# 64 MiB on a GPU: enough rows for a GEMM at full speed, near the size of its L2 cache.
GPU_BAND = 1 << 24


def bands(*tensors: Any, elements: int = CPU_BAND) -> Iterator[tuple[Any, ...]]:
    """Views of tensors (or Nones) of one shape, cut along the longest dimension into parts of about `elements`."""
    first = next(tensor for tensor in tensors if tensor is not None)
    if first.numel() <= elements:
        if first.numel():
            yield tensors
        return
    dim = max(range(first.dim()), key=lambda d: first.shape[d])
    size = first.shape[dim]
    step = max(1, elements * size // first.numel())
    for start in range(0, size, step):
        length = min(step, size - start)
        yield tuple(None if tensor is None else tensor.narrow(dim, start, length) for tensor in tensors)


def row_bands(rows: int, columns: int, elements: int = CPU_BAND) -> Iterator[slice]:
    """Ranges of rows of a matrix, each of about `elements`."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def weight_gradient(x: Operand, dy: Operand, out: Tensor | None = None) -> Tensor:
    """`dY^T X` in fp32, from `x` [tokens, in] and `dy` [tokens, out]: never rounded to the operands' format."""
    if isinstance(x, Scaled) or isinstance(dy, Scaled):
        dtype = scaled.compute_dtype(x, dy)
        x, dy = scaled.decoded(x, dtype), scaled.decoded(dy, dtype)
    if x.device.type == "cuda" and x.dtype == dy.dtype and x.dtype in (torch.bfloat16, torch.float16):
        result: Tensor = torch.mm(dy.T, x, out_dtype=torch.float32, out=out)
        return result
    return torch.mm(dy.float().T, x.float(), out=out)


@torch.no_grad()
def linear_step_banded(
    rule: Rule,
    x: Operand,
    dy: Operand,
    weight: Tensor,
    states: list[Tensor | None],
    table: Tensor,
    switches: tuple[bool, ...],
    exact: bool,
    kept: Storage | None = None,
) -> None:
    """Update `weight` [out, in] and its states in place from `x` [tokens, in] and `dy` [tokens, out], band by band.

    `states` are in the order of `spec.states`, None where the variant has none; `table` is one fp32 row of scalars.
    kept: the tensors' formats and rounding; plain types and rounding to nearest by default. Of operands in 8 bits, x is
    decoded once, and dy band by band.
    """
    if weight.numel() == 0:
        return
    kept = kept or plain(len(states))
    dtype = scaled.compute_dtype(x, dy)
    if isinstance(x, Scaled):
        x = scaled.decoded(x, dtype)
    out_features, in_features = weight.shape
    on_gpu = weight.device.type == "cuda"
    rows = min(out_features, max(1, (GPU_BAND if on_gpu else CPU_BAND) // in_features))
    if not on_gpu and rows < out_features:
        x = x.float()
    buffer = torch.empty(rows, in_features, dtype=torch.float32, device=weight.device)
    for start in range(0, out_features, rows):
        part = slice(start, min(start + rows, out_features))
        upstream = scaled.decoded(dy, dtype, part)
        gradient = weight_gradient(x, upstream, out=buffer[: part.stop - part.start])
        piece = [None if state is None else state[part] for state in states]
        if on_gpu:
            from forge_dsl.runtime import launch

            launch.elementwise_step(rule, weight[part], gradient, piece, table, switches, exact, kept.rows(part), start)
        else:
            numbers = None
            if any(kept.draws):
                numbers = _numbers(part, in_features, weight.device)
            _apply(rule, weight[part], gradient, piece, table, switches, kept.rows(part), numbers)


@torch.no_grad()
def elementwise_step_banded(
    rule: Rule,
    weight: Tensor,
    grad: Tensor,
    states: list[Tensor | None],
    table: Tensor,
    switches: tuple[bool, ...],
    kept: Storage | None = None,
) -> None:
    """Update a parameter of any shape and strides, and its states, in place from a gradient of its shape, on a CPU."""
    kept = kept or plain(len(states))
    if not weight.numel():
        return
    rows, columns = registry.matrix_shape(weight.shape)
    if kept.block_wise:
        # Block-wise states are contiguous, and so are the weight and what lies beside it.
        kept = kept.by_matrix(rows, columns)
        matrices = [None if t is None else t.reshape(rows, columns) for t in (weight, grad, *states)]
        for part in row_bands(rows, columns):
            cut = [None if t is None else t[part] for t in matrices]
            numbers = _numbers(part, columns, weight.device)
            _apply(rule, cut[0], cut[1], cut[2:], table, switches, kept.rows(part), numbers)  # type: ignore[arg-type]
        return
    low = kept.extras[0]
    places = _places(weight) if any(kept.draws) else (None, None)
    for piece, gradient, beside, row, column, *held in bands(weight, grad, low, *places, *states):
        where = None if row is None else (row, column)
        part_kept = Storage(kept.formats, kept.draws, (beside, *kept.extras[1:]))
        _apply(rule, piece, gradient, held, table, switches, part_kept, where)


def _numbers(rows: slice, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of rows [rows, 1] and of columns [1, columns]."""
    return (
        torch.arange(rows.start, rows.stop, device=device)[:, None],
        torch.arange(columns, device=device)[None, :],
    )


def _places(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every element, as views of the weight's shape that take the memory of one row."""
    if weight.dim() < 2:
        columns = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
        return torch.zeros((), dtype=torch.int64, device=weight.device).expand(weight.shape), columns
    first, rest = weight.shape[0], weight.shape[1:]
    row, column = _numbers(slice(0, first), weight.numel() // first, weight.device)
    return row.view(first, *(1 for _ in rest)).expand(weight.shape), column.view(1, *rest).expand(weight.shape)


def _apply(
    rule: Rule,
    weight: Tensor,
    grad: Tensor,
    states: list[Tensor | None],
    table: Tensor,
    switches: tuple[bool, ...],
    kept: Storage,
    numbers: tuple[Tensor, Tensor] | None,
) -> None:
    """The reference on one band: loads widen to fp32, each store rounds once.

    numbers: row and column of every element in the whole parameter, where rounding depends on them.
    """
    spec = rule.spec
    tensors = {"weight": weight, **dict(zip(spec.state_names, states, strict=True))}
    domains = [False, *(state.nonnegative for state in spec.states)]
    order = list(enumerate(tensors.items()))
    wide = {
        name: tensor.float() if kept.formats[i] == "plain" else _decoded(tensor, kept, i, domains[i])
        for i, (name, tensor) in order
        if tensor is not None
    }
    new_weight, new = rule.reference(wide.pop("weight"), grad.float(), wide, table[: len(spec.table)], *switches)
    new["weight"] = new_weight
    for i, (name, tensor) in order:
        if tensor is not None:
            draws = None
            if kept.draws[i] and numbers is not None and (kept.formats[i] != "plain" or tensor.dtype != torch.float32):
                words = [word & 0xFFFFFFFF for word in table[len(spec.table) :].view(torch.int32).tolist()]
                draws = rounding.draws_at(rounding.key_in(words, i), *numbers)
            _store(tensor, new[name], kept, i, domains[i], draws)


def _decoded(tensor: Tensor, kept: Storage, index: int, nonnegative: bool) -> Tensor:
    extra = kept.extras[index]
    assert extra is not None
    if kept.formats[index] in BLOCK_WISE:
        return block_wise(kept.formats[index], nonnegative, index == 0).decode(tensor, extra)
    return Extended(8 * extra.element_size()).decode(tensor, extra)


def _store(tensor: Tensor, value: Tensor, kept: Storage, index: int, nonnegative: bool, draws: Tensor | None) -> None:
    extra = kept.extras[index]
    # A rule may give all coordinates one number.
    value = value.expand(tensor.shape)
    if extra is None:
        tensor.copy_(value if draws is None else rounding.rounded_stochastic(value, tensor.dtype, draws))
    elif kept.formats[index] in BLOCK_WISE:
        codes, scales = block_wise(kept.formats[index], nonnegative, index == 0).encode(value, draws)
        assert scales is not None
        tensor.copy_(codes)
        extra.copy_(scales)
    else:
        high, low = Extended(8 * extra.element_size()).encode(value, draws)
        tensor.copy_(high)
        extra.copy_(low)
