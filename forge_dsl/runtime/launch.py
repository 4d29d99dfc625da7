"""Launching the generated Triton kernels: shapes, strides, tile sizes, devices. All of it updates tensors in place.

Tile sizes follow from the operand type and the device's shared memory, so that every NVIDIA GPU from sm_80 up has a
configuration that fits. 64-bit offsets are used from 2^31 elements on, decided by the span of each tensor in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.operand import Operand, Scaled
from forge_dsl.formats.scale import BLOCK
from forge_dsl.runtime import direct_launch, scaled
from forge_dsl.runtime.devices import allows_tf32, is_capturing, on, upload
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import BLOCK_WISE, Storage, plain
from forge_dsl.runtime.tiles import Tiles, choose_tiles, multiprocessors, per_multiprocessor
from forge_dsl.runtime.triton_support import AVAILABLE, interpreted, tl
from forge_dsl.runtime.views import WIDE, as_matrices, dense_alike, in_rows, is_wide

_FLAT_BLOCK = 1024
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if AVAILABLE else {}


@dataclass(frozen=True)
class Item:
    """One parameter of `many_step`: any shape, each tensor with any strides; its row of per-step scalars, fp32."""

    weight: Tensor
    grad: Tensor
    states: list[Tensor | None]
    table: Tensor
    kept: Storage | None = None


def linear_step_portable(
    rule: Rule,
    x: Operand,
    dy: Operand,
    weight: Tensor,
    states: Sequence[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool,
    kept: Storage | None = None,
) -> direct_launch.Again | None:
    """One fused step of a linear weight: its gradient `dy^T x` exists only tile by tile, in fp32 registers.

    x [tokens, in], dy [tokens, out], weight and states [out, in], table: this weight's row of per-step scalars, fp32.
    Any strides; the states share one layout. Operands of different dtypes meet in fp32. kept: the tensors' formats and
    rounding; plain types and rounding to nearest by default.

    Operands in 8 bits become numbers of `scaled.compute_dtype` as they are loaded. Returns what makes the same launch
    again given the addresses of dy and x, with all else where it is and as it is; None where only this function can.
    """
    rows, columns = weight.shape
    if rows == 0 or columns == 0:
        return None
    given_x, given_dy = x, dy
    beside: tuple[Any, ...] | None = None
    operands: tuple[Any, ...] | None = None
    if isinstance(x, Scaled) or isinstance(dy, Scaled):
        dtype = scaled.compute_dtype(x, dy)
        x, dy, beside, operands = scaled.arguments(x, dy)
    else:
        if x.dtype != dy.dtype or x.dtype == torch.float64:
            x, dy = x.float(), dy.float()
        dtype = x.dtype
    tokens = x.shape[0]
    simulated = interpreted(rule.linear_kernel)
    present = [state for state in states if state is not None]
    kept = kept or plain(len(states))
    roomy = exact or operands is not None
    tiles = _tiles((tokens, *weight.shape), dtype, roomy, [weight, *present], kept, simulated)
    count = -(-rows // tiles.block_o) * -(-columns // tiles.block_i)
    grid = (count if simulated else min(count, multiprocessors(x.device) * per_multiprocessor(tiles)),)
    state = present[0] if present else weight
    arguments = (
        *(x, dy, weight, *states, _extras(kept, weight), beside, table, tokens, rows, columns),
        *(*x.stride(), *dy.stride(), *weight.stride(), *state.stride()),
    )
    constants = {
        **_switches(rule, switches),
        "exact": exact,
        "formats": kept.formats,
        "draws": kept.draws,
        "even": rows % tiles.block_o == 0 and columns % tiles.block_i == 0 and tokens % tiles.block_t == 0,
        "wide": any(map(is_wide, (x, dy, weight, *present, *_scales(beside)))),
        "upcast": simulated and dtype != torch.float32,
        "precision": _precision(dtype, x.device, exact),
        "operands": operands,
        "BLOCK_O": tiles.block_o,
        "BLOCK_I": tiles.block_i,
        "BLOCK_T": tiles.block_t,
        "SLICES_O": tiles.slices_o,
        "SLICES_I": tiles.slices_i,
        "GROUP": tiles.group,
    }
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, **_fusion(exact)}
    if operands is not None:
        # Otherwise ptxas may spill registers for the sake of a second program on a multiprocessor.
        options["maxnreg"] = 255
    with on(weight.device):
        again = direct_launch.launch(rule.linear_kernel, weight.device, grid, arguments, constants, options)
    # Whether fp32 may be TF32 is asked each time, and what has been cast lies elsewhere the next time.
    if again is None or dtype == torch.float32 or x is not given_x or dy is not given_dy:
        return None
    return lambda at_dy, at_x: again(at_x, at_dy)


def _tiles(
    sizes: tuple[int, int, int], dtype: torch.dtype, roomy: bool, stored: list[Tensor], kept: Storage, simulated: bool
) -> Tiles:
    """Tiles for sizes (tokens, rows, columns). stored: weight and states, whose formats may need `roomy` ones too."""
    tokens, rows, columns = sizes
    roomy = roomy or any(tensor.dtype == torch.float32 for tensor in stored) or set(kept.formats) != {"plain"}
    tiles = choose_tiles(rows, columns, tokens, dtype, roomy, stored[0].device, simulated)
    if len(stored) == 1 and tiles.slices_i == 4:
        # The weight alone fits in larger parts, and taking the tile apart by rows too would spill a register.
        tiles = replace(tiles, slices_o=1)
    if kept.block_wise and tiles.block_i // tiles.slices_i < BLOCK:
        tiles = replace(tiles, block_i=max(tiles.block_i, BLOCK), slices_i=max(tiles.block_i, BLOCK) // BLOCK)
    return tiles


def elementwise_step(
    rule: Rule,
    weight: Tensor,
    grad: Tensor,
    states: Sequence[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool,
    kept: Storage | None = None,
    first_row: int = 0,
) -> None:
    """One step of any parameter on a given gradient. weight, grad and states have one shape, each any strides.

    kept: as in `linear_step_portable`; first_row: where the weight's rows begin in the parameter, if it is a part of
    one.
    """
    if weight.numel() == 0:
        return
    kept = kept or plain(len(states))
    present = [state for state in states if state is not None]
    with on(weight.device):
        if kept.by_rows or kept.extras[0] is not None:
            # Scales beside a weight lie in rows already; bits beside it lie as it does.
            updated = [weight, *present, None if kept.formats[0] in BLOCK_WISE else kept.extras[0]]
            matrices = [in_rows(tensor) for tensor in updated]
            where = [matrices[0], in_rows(grad), *matrices[1:]]
            _elementwise_matrix(rule, where, states, table, switches, exact, kept, first_row)
            for tensor, matrix in zip(updated, matrices, strict=True):
                # Where the rows of a convolution's weight are no matrix in memory, two copies cost less than a launch
                # for each of them.
                if tensor is not None and matrix is not None and matrix.data_ptr() != tensor.data_ptr():
                    tensor.copy_(matrix.view(tensor.shape))
            return
        for flat in as_matrices(weight, grad, present):
            _elementwise_matrix(rule, [*flat, None], states, table, switches, exact, kept, 0)


def many_step(rule: Rule, items: Sequence[Item], switches: Sequence[bool], exact: bool) -> None:
    """One step of many parameters of one device and variant, in one launch for each combination of stored types.

    Parameters that are not dense, or whose states have another order in memory, get a launch of their own; so do all
    while a CUDA graph is captured, since a list of addresses that a graph reads again would not outlive this call.
    """
    together: dict[tuple[Any, ...], list[tuple[tuple[int, int], list[int]]]] = {}
    alive = []  # gradients that were copied
    capturing = is_capturing(items[0].weight.device)
    for item in items:
        kept = item.kept or plain(len(item.states))
        row = None if capturing or kept.has_extras else _one_row(item, any(kept.draws))
        if row is None:
            elementwise_step(rule, item.weight, item.grad, item.states, item.table, switches, exact, kept)
            continue
        weight, grad, *_ = row
        alive.append(grad)
        size = weight.numel()
        addresses = [*map(Tensor.data_ptr, (grad, weight, item.table, *row[2:]))]
        aligned = size % 16 == 0 and not any(address % 16 for address in addresses)
        types = tuple([None if state is None else state.dtype for state in item.states])
        key = (grad.dtype, weight.dtype, types, aligned, kept.draws)
        sizes = size, registry.matrix_shape(weight.shape)[1]
        together.setdefault(key, []).append((sizes, addresses))
    for (grad_type, weight_type, types, aligned, draws), rows in together.items():
        device = items[0].weight.device
        _launch_many(rule, rows, (grad_type, weight_type, *types), aligned, draws, switches, exact, device)


def _one_row(item: Item, in_order: bool) -> list[Tensor] | None:
    """Weight, gradient and the states that exist, all dense in the same order, or None where they are not.

    in_order: that order has to be the one of the indices.
    """
    weight = item.weight
    if weight.numel() == 0 or (in_order and (not weight.is_contiguous() or weight.numel() >= WIDE - _FLAT_BLOCK)):
        return None
    return dense_alike(weight, item.grad, [state for state in item.states if state is not None])


def _launch_many(
    rule: Rule,
    rows: list[tuple[tuple[int, int], list[int]]],
    types: tuple[torch.dtype | None, ...],
    aligned: bool,
    draws: tuple[bool, ...],
    switches: Sequence[bool],
    exact: bool,
    device: torch.device,
) -> None:
    """One launch. rows: how many elements a parameter has, and how many make a row of it; the addresses of gradient,
    weight, table and the states that exist.

    types: of gradient, weight and every state. draws: which of weight and states are rounded stochastically.
    """
    addresses = []
    for _, (grad, weight, table, *states) in rows:
        held = iter(states)
        found = [weight if kind is None else next(held) for kind in types[2:]]
        addresses.append([grad, weight, table, *found])
    sizes, places = _places(tuple([row[0] for row in rows]), device)
    names = _type_names(rule)
    with on(device):
        rule.many_kernel[(places.shape[0],)](
            upload(addresses, torch.int64, device),
            sizes,
            places,
            **_switches(rule, switches),
            exact=exact,
            formats=("plain",) * len(draws),
            draws=draws,
            **{name: _TRITON_TYPES[kind or types[1]] for name, kind in zip(names, types, strict=True)},  # type: ignore[index]
            aligned=aligned,
            BLOCK=_FLAT_BLOCK,
            num_warps=4,
            **_fusion(exact),
        )


@lru_cache(maxsize=256)
def _places(sizes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sizes [parameters, 2] and places [programs, 2] of `many_kernel`, int64 on the device."""
    blocks = torch.tensor([-(-size // _FLAT_BLOCK) for size, _ in sizes], device="cpu")
    which = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), blocks)
    first = torch.cumsum(blocks, 0) - blocks
    places = torch.stack([which, torch.arange(len(which), device="cpu") - first[which]], dim=1)
    return upload(sizes, torch.int64, device), places.to(device)


def _type_names(rule: Rule) -> tuple[str, ...]:
    """The parameters of `many_kernel` that take a type: of the gradient, the weight, and each state in order."""
    names = list(rule.many_kernel.arg_names)
    return tuple(names[names.index("draws") + 1 : names.index("aligned")])


def fill_tables(
    rule: Rule,
    hypers: Tensor,
    counters: Tensor,
    tables: Tensor,
    pending: Tensor,
    bases: Tensor,
    flags: dict[str, bool],
) -> direct_launch.Again | None:
    """The prologue of a step on a GPU: every row's per-step scalars, in float64, for its next step.

    hypers [n] float64, tuples flattened; counters and pending [rows, counters] float64: pending gets what counters
    become once the row's weight has been updated; tables [rows, stride] fp32; bases [rows] int32, what each weight's
    rounding draws from. Nothing is read back. Returns what does the same again given the addresses of hypers and
    counters, with all else where it is and as it is; None where only this function can.
    """
    values = (flags[name] for name in rule.spec.flag_names)
    arguments = (hypers, counters, tables, pending, bases, tables.stride(0), counters.shape[1], *values)
    with on(tables.device):
        return direct_launch.launch(
            rule.scalars_kernel, tables.device, (tables.shape[0],), arguments, {}, {"num_warps": 1}
        )


def _elementwise_matrix(
    rule: Rule,
    matrices: list[Any],
    states: Sequence[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool,
    kept: Storage,
    first_row: int,
) -> None:
    weight, grad, *present, low = matrices
    extras = _extras(kept, weight) if low is None else (low, *_extras(kept, weight)[1:])
    queue = iter(present)
    arguments = [None if state is None else next(queue) for state in states]
    state = present[0] if present else weight
    rows, columns = weight.shape
    block_o, block_i = (1, _FLAT_BLOCK) if rows == 1 else (8, 128)
    grid = (-(-rows // block_o) * -(-columns // block_i),)
    rule.elementwise_kernel[grid](
        grad,
        weight,
        *arguments,
        extras,
        table,
        rows,
        columns,
        first_row,
        kept.block_stride,
        *grad.stride(),
        *weight.stride(),
        *state.stride(),
        **_switches(rule, switches),
        exact=exact,
        formats=kept.formats,
        draws=kept.draws,
        wide=any(is_wide(tensor) for tensor in matrices if tensor is not None),
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=4,
        **_fusion(exact),
    )


def _extras(kept: Storage, weight: Tensor) -> tuple[Tensor, ...]:
    """What lies beside each tensor; the weight stands where there is nothing."""
    return tuple(weight if extra is None else extra for extra in kept.extras)


def _switches(rule: Rule, switches: Sequence[bool]) -> dict[str, bool]:
    return {switch.name: value for switch, value in zip(rule.spec.switches, switches, strict=True)}


def _fusion(exact: bool) -> dict[str, Any]:
    # Triton's default differs between releases, so each mode says what it needs.
    return {"enable_fp_fusion": not exact}


def _scales(beside: tuple[Any, ...] | None) -> tuple[Tensor, ...]:
    return () if beside is None else (beside[0], beside[3])


def _precision(dtype: torch.dtype, device: torch.device, exact: bool) -> str:
    if dtype != torch.float32 or exact or device.type != "cuda":
        return "ieee"
    return "tf32" if allows_tf32() else "ieee"
