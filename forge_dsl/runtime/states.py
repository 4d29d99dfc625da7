"""Optimizer state tensors: how they come to be, and where they lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_dsl.runtime.banded import bands
from forge_dsl.runtime.counters import Variant
from forge_dsl.runtime.rule import Rule


@torch.no_grad()
def create(rule: Rule, name: str, weight: Tensor, hypers: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The state `name` with its initial value, in the weight's layout, rounded once to `dtype`."""
    (state,) = (state for state in rule.spec.states if state.name == name)
    if state.zero:
        return torch.zeros_like(weight, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    tensor = torch.empty_like(weight, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    for part, piece in bands(tensor, weight.detach()):
        part.copy_(rule.initial_state(name, piece, **hypers))
    return tensor


def ensure(rule: Rule, variant: Variant, weight: Tensor, state: dict[str, Any], dtype: torch.dtype) -> None:
    """Create the states that this variant has and `optimizer.state[p]` lacks."""
    for name, present in zip(rule.spec.state_names, variant.present, strict=True):
        if present and state.get(name) is None:
            state[name] = create(rule, name, weight, variant.hypers, dtype)


def in_order(rule: Rule, variant: Variant, weight: Tensor, state: dict[str, Any]) -> list[Tensor | None]:
    """The tensors of `spec.states`, None where the variant has none. The kernels read all of them with one layout."""
    names = [name for name, present in zip(rule.spec.state_names, variant.present, strict=True) if present]
    if any(state[name].stride() != state[names[0]].stride() for name in names[1:]):
        for name in names:
            state[name] = laid_out(state[name], weight)
    return [
        state[name] if present else None for name, present in zip(rule.spec.state_names, variant.present, strict=True)
    ]


@torch.no_grad()
def laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy of a loaded state on the weight's device and in its layout, bit for bit."""
    copy = torch.empty_like(weight, dtype=tensor.dtype, requires_grad=False, memory_format=torch.preserve_format)
    return copy.copy_(tensor.detach())
