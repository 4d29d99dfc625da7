"""The banded route: fp32 gradient bands of a few rows, each used while it is in cache, then overwritten by the next.

On a CPU the generated reference updates the band; on a GPU a library GEMM writes it and the element-wise kernel uses
it. Either way the gradient costs one band and never the size of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_dsl.runtime.rule import Rule

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


def weight_gradient(x: Tensor, dy: Tensor, out: Tensor | None = None) -> Tensor:
    """`dY^T X` in fp32, from `x` [tokens, in] and `dy` [tokens, out]: never rounded to the operands' format."""
    if x.device.type == "cuda" and x.dtype == dy.dtype and x.dtype in (torch.bfloat16, torch.float16):
        result: Tensor = torch.mm(dy.T, x, out_dtype=torch.float32, out=out)
        return result
    return torch.mm(dy.float().T, x.float(), out=out)


@torch.no_grad()
def linear_step_banded(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: list[Tensor | None],
    table: Tensor,
    switches: tuple[bool, ...],
    exact: bool,
) -> None:
    """Update `weight` [out, in] and its states in place from `x` [tokens, in] and `dy` [tokens, out], band by band.

    `states` are in the order of `spec.states`, None where the variant has none; `table` is one fp32 row of scalars.
    """
    if weight.numel() == 0:
        return
    out_features, in_features = weight.shape
    on_gpu = weight.device.type == "cuda"
    rows = min(out_features, max(1, (GPU_BAND if on_gpu else CPU_BAND) // in_features))
    if not on_gpu and rows < out_features:
        x = x.float()
    buffer = torch.empty(rows, in_features, dtype=torch.float32, device=weight.device)
    for start in range(0, out_features, rows):
        part = slice(start, min(start + rows, out_features))
        gradient = weight_gradient(x, dy[:, part], out=buffer[: part.stop - part.start])
        piece = [None if state is None else state[part] for state in states]
        if on_gpu:
            from forge_dsl.runtime import launch

            launch.elementwise_step(rule, weight[part], gradient, piece, table, switches, exact)
        else:
            _apply(rule, weight[part], gradient, piece, table, switches)


@torch.no_grad()
def elementwise_step_banded(
    rule: Rule, weight: Tensor, grad: Tensor, states: list[Tensor | None], table: Tensor, switches: tuple[bool, ...]
) -> None:
    """Update a parameter of any shape and strides, and its states, in place from a gradient of its shape, on a CPU."""
    for part in bands(weight, grad, *states):
        _apply(rule, part[0], part[1], list(part[2:]), table, switches)


def _apply(
    rule: Rule, weight: Tensor, grad: Tensor, states: list[Tensor | None], table: Tensor, switches: tuple[bool, ...]
) -> None:
    """The reference on one band: loads widen to fp32, each store rounds once."""
    names = rule.spec.state_names
    held = {name: state for name, state in zip(names, states, strict=True) if state is not None}
    wide = {name: state.float() for name, state in held.items()}
    scalars = table[: len(rule.spec.table)]
    new_weight, new_states = rule.reference(weight.float(), grad.float(), wide, scalars, *switches)
    weight.copy_(new_weight)
    for name, state in held.items():
        state.copy_(new_states[name])
