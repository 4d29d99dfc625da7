"""One update of one parameter: its states, its table of scalars, and the route that fits the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_dsl.runtime import states
from forge_dsl.runtime.banded import elementwise_step_banded, linear_step_banded
from forge_dsl.runtime.binding import Binding

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


def choose_schedule(schedule: str, weight: Tensor, tokens: int) -> str:
    """`fused` (one kernel, the gradient in registers) or `banded`, for a weight [out, in] and its number of tokens."""
    if schedule == "auto":
        return "fused" if weight.device.type == "cuda" else "banded"
    return schedule


def _prepare(optimizer: FusedOptimizer, binding: Binding) -> tuple[list[Tensor | None], Tensor, tuple[bool, ...]]:
    """States in order, table of scalars and switches for one update of this step."""
    weight, table = binding.weight, binding.table
    state = optimizer.state[weight]
    variant = table.begin(optimizer.state)
    table.show(binding.row, state)
    states.ensure(optimizer.rule, variant, weight, state, optimizer.state_dtype or weight.dtype)
    return states.in_order(optimizer.rule, variant, weight, state), table.row(binding.row), variant.switches


@torch.no_grad()
def apply_linear(optimizer: FusedOptimizer, binding: Binding, x: Tensor, dy: Tensor) -> None:
    """Update a weight [out, in] from `x` [tokens, in] and `dy` [tokens, out]; the gradient is never stored."""
    weight = binding.weight
    held, table, switches = _prepare(optimizer, binding)
    if weight.numel():
        exact = optimizer.arithmetic == "exact"
        if choose_schedule(optimizer.schedule, weight, x.shape[0]) == "fused":
            from forge_dsl.runtime import launch

            launch.linear_step(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact)
        else:
            linear_step_banded(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact)
    torch.autograd.graph.increment_version(weight)


@torch.no_grad()
def apply_elementwise(optimizer: FusedOptimizer, binding: Binding, grad: Tensor) -> None:
    """Update a parameter of any shape from its ordinary gradient."""
    weight = binding.weight
    held, table, switches = _prepare(optimizer, binding)
    if weight.numel():
        if weight.device.type == "cuda" or optimizer.schedule == "fused":
            from forge_dsl.runtime import launch

            exact = optimizer.arithmetic == "exact"
            launch.elementwise_step(optimizer.rule, weight.detach(), grad, held, table, switches, exact)
        else:
            elementwise_step_banded(optimizer.rule, weight.detach(), grad, held, table, switches)
    torch.autograd.graph.increment_version(weight)
