"""One update of one parameter: its states, its table of scalars, and the route that fits the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.extended import fingerprint
from forge_dsl.formats.operand import Operand, Scaled
from forge_dsl.runtime import coded, scaled, states, storage, trust
from forge_dsl.runtime.banded import elementwise_step_banded, linear_step_banded
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.storage import Storage
from forge_dsl.selection.choose import choose

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


def _prepare(
    optimizer: FusedOptimizer, binding: Binding
) -> tuple[list[Tensor | None], Tensor, tuple[bool, ...], Storage]:
    """States in order, table of scalars, switches, and how all is kept, for one update of this step."""
    weight, table = binding.weight, binding.table
    state = optimizer.state[weight]
    variant = table.begin(optimizer.state)
    table.show(binding.row, state)
    states.ensure(optimizer.rule, variant, weight, state, optimizer.choice)
    held = states.in_order(optimizer.rule, variant, weight, state)
    return held, table.row(binding.row), variant.switches, _kept(optimizer, binding, held, state)


def _kept(optimizer: FusedOptimizer, binding: Binding, held: list[Tensor | None], state: dict[str, Any]) -> Storage:
    """How the parameter's tensors are kept, worked out anew only when they are other tensors than before."""
    low = state.get(registry.LOW_KEY)
    if low is not None and binding.fingerprint is not None:
        expected, binding.fingerprint = binding.fingerprint, None
        if fingerprint(binding.weight) != expected:
            low.zero_()
    forget_stale_bits(binding, state)
    scales = coded.of(binding.weight).scales if binding.dtype == coded.CODES else None
    key = [id(tensor) for tensor in (*held, low, scales)]
    if binding.kept is None or binding.kept[0] != key:
        binding.kept = key, storage.in_use(optimizer.rule, optimizer.choice, binding.weight, held, state)
    return binding.kept[1]


def forget_stale_bits(binding: Binding, state: dict[str, Any]) -> None:
    """Zero the bits beside a weight that something else has written since its last update: they were another one's.

    Those of a checkpoint are checked by their fingerprint at the next update, when the model has been loaded too.
    """
    low, version = state.get(registry.LOW_KEY), binding.weight._version
    if low is not None and binding.fingerprint is None and binding.version not in (None, version):
        low.zero_()
        binding.version = version


def apply_linear(optimizer: FusedOptimizer, binding: Binding, x: Operand, dy: Operand) -> None:
    """Update a weight [out, in] from `x` [tokens, in] and `dy` [tokens, out]; the gradient is never stored.

    Called inside a backward that records no graph.
    """
    weight = coded.stored(binding.weight)
    held, table, switches, kept = _prepare(optimizer, binding)
    if weight.numel():
        exact = optimizer.arithmetic == "exact"
        like_x, like_dy = (x, dy) if isinstance(x, Tensor) and isinstance(dy, Tensor) else scaled.stand_ins(x, dy)
        on_hopper = None
        if weight.device.type == "cuda" and optimizer.schedule != "banded":
            from forge_dsl.runtime import hopper

            find = optimizer.rule, like_x, like_dy, weight, held, switches, kept
            on_hopper = hopper.find(*find, exact, optimizer.gradient_bits)
        stored = [weight, *(state for state in held if state is not None)]
        measured = not exact and set(kept.formats) == {"plain"}
        bits = optimizer.gradient_bits
        chosen = choose(optimizer.schedule, like_x, weight, stored, on_hopper is not None, measured, bits)
        if chosen == "hopper" and not trust.holds(on_hopper, optimizer.rule, like_x, weight, held, switches, kept):
            on_hopper = None
            chosen = choose(optimizer.schedule, like_x, weight, stored, False, measured, bits)
        if isinstance(x, Scaled) or isinstance(dy, Scaled):
            chosen, x, dy = scaled.prepared(chosen, optimizer.schedule, x, dy)
        if chosen == "hopper" and on_hopper is not None:
            assert isinstance(x, Tensor) and isinstance(dy, Tensor)
            on_hopper(x, dy, weight, held, table, kept)
        elif chosen == "portable":
            from forge_dsl.runtime import launch

            launch.linear_step_portable(optimizer.rule, x, dy, weight, held, table, switches, exact, kept)
        else:
            linear_step_banded(optimizer.rule, x, dy, weight, held, table, switches, exact, kept)
    torch.autograd.graph.increment_version(binding.weight)
    if binding.dtype == coded.CODES:
        torch.autograd.graph.increment_version(coded.of(binding.weight).scales)
    binding.version = binding.weight._version


@torch.no_grad()
def apply_elementwise(optimizer: FusedOptimizer, gradients: Sequence[tuple[Binding, Tensor]]) -> None:
    """Update parameters of any shape from ordinary gradients: on a GPU, one launch per variant and stored types."""
    exact = optimizer.arithmetic == "exact"
    together: dict[tuple[torch.device, tuple[bool, ...]], list[Any]] = {}
    for binding, grad in gradients:
        weight = binding.weight
        held, table, switches, kept = _prepare(optimizer, binding)
        if weight.numel() and (weight.device.type == "cuda" or optimizer.schedule == "fused"):
            from forge_dsl.runtime.launch import Item

            item = Item(weight.detach(), grad, held, table, kept)
            together.setdefault((weight.device, switches), []).append(item)
        elif weight.numel():
            elementwise_step_banded(optimizer.rule, weight.detach(), grad, held, table, switches, kept)
    for (_, switches), items in together.items():
        from forge_dsl.runtime.launch import many_step

        many_step(optimizer.rule, items, switches, exact)
    for binding, _ in gradients:
        torch.autograd.graph.increment_version(binding.weight)
        binding.version = binding.weight._version
