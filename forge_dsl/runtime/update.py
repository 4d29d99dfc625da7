"""One update of one parameter: its states, its table of scalars, and the route that fits the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.runtime import states, trust
from forge_dsl.runtime.banded import elementwise_step_banded, linear_step_banded
from forge_dsl.runtime.binding import Binding
from forge_dsl.selection.choose import choose

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


def _prepare(optimizer: FusedOptimizer, binding: Binding) -> tuple[list[Tensor | None], Tensor, tuple[bool, ...]]:
    """States in order, table of scalars and switches for one update of this step."""
    weight, table = binding.weight, binding.table
    state = optimizer.state[weight]
    variant = table.begin(optimizer.state)
    table.show(binding.row, state)
    states.ensure(optimizer.rule, variant, weight, state, optimizer.state_dtype or weight.dtype)
    return states.in_order(optimizer.rule, variant, weight, state), table.row(binding.row), variant.switches


def apply_linear(optimizer: FusedOptimizer, binding: Binding, x: Tensor, dy: Tensor) -> None:
    """Update a weight [out, in] from `x` [tokens, in] and `dy` [tokens, out]; the gradient is never stored.

    Called inside a backward that records no graph.
    """
    weight = binding.weight
    held, table, switches = _prepare(optimizer, binding)
    if weight.numel():
        exact = optimizer.arithmetic == "exact"
        on_hopper = None
        if weight.device.type == "cuda" and optimizer.schedule != "banded" and not exact:
            from forge_dsl.runtime import hopper

            on_hopper = hopper.find(optimizer.rule, x, dy, weight, held, switches)
        stored = [weight, *(state for state in held if state is not None)]
        chosen = choose(optimizer.schedule, x, weight, stored, on_hopper is not None, exact)
        if chosen == "hopper" and not trust.holds(on_hopper, optimizer.rule, x, weight, held, switches):
            on_hopper = None
            chosen = choose(optimizer.schedule, x, weight, stored, False, exact)
        if chosen == "hopper" and on_hopper is not None:
            on_hopper(x, dy, weight.detach(), held, table)
        elif chosen == "portable":
            from forge_dsl.runtime import launch

            launch.linear_step_portable(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact)
        else:
            linear_step_banded(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact)
    torch.autograd.graph.increment_version(weight)


@torch.no_grad()
def apply_elementwise(optimizer: FusedOptimizer, gradients: Sequence[tuple[Binding, Tensor]]) -> None:
    """Update parameters of any shape from ordinary gradients: on a GPU, one launch per variant and stored types."""
    exact = optimizer.arithmetic == "exact"
    together: dict[tuple[torch.device, tuple[bool, ...]], list[Any]] = {}
    for binding, grad in gradients:
        weight = binding.weight
        held, table, switches = _prepare(optimizer, binding)
        if weight.numel() and (weight.device.type == "cuda" or optimizer.schedule == "fused"):
            from forge_dsl.runtime.launch import Item

            item = Item(weight.detach(), grad, held, table)
            together.setdefault((weight.device, switches), []).append(item)
        elif weight.numel():
            elementwise_step_banded(optimizer.rule, weight.detach(), grad, held, table, switches)
    for (_, switches), items in together.items():
        from forge_dsl.runtime.launch import many_step

        many_step(optimizer.rule, items, switches, exact)
    for binding, _ in gradients:
        torch.autograd.graph.increment_version(binding.weight)
