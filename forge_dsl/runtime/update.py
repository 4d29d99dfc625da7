"""One update of one parameter: its states, its table of scalars, and the route that fits the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.extended import fingerprint
from forge_dsl.formats.operand import Operand, Scaled
from forge_dsl.runtime import coded, scaled, states, storage, trust
from forge_dsl.runtime.banded import elementwise_step_banded, linear_step_banded
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.counters import Variant
from forge_dsl.runtime.storage import Storage
from forge_dsl.selection import choose
from forge_dsl.selection.table import Schedule

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer

Layout: TypeAlias = tuple[torch.dtype, tuple[int, ...], int] | None


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """How a parameter's tensors are kept, as long as they lie where they lay when that was worked out.

    switches, choice  of the variant and of the optimizer that it was worked out for
    states            names of the states in order, None where the variant has none
    beside            names of scales in `optimizer.state[p]`, and of the bits beside a weight, which may come later
    layout            of the weight, of the states, and of what is beside them
    """

    switches: tuple[bool, ...]
    choice: storage.Choice
    states: tuple[str | None, ...]
    beside: tuple[str, ...]
    layout: list[Layout]
    storage: Storage


def _layout(weight: Tensor, held: list[Tensor | None], state: dict[str, Any], beside: tuple[str, ...]) -> list[Layout]:
    """Type, strides and address of every tensor. A tensor that is replaced, cast or moved shows in one of them."""
    tensors = [weight, *held, *map(state.get, beside)]
    if weight.dtype is coded.CODES:
        tensors.append(coded.known(weight).scales)
    return [None if t is None else (t.dtype, t.stride(), t.data_ptr()) for t in tensors]


def _prepare(optimizer: FusedOptimizer, binding: Binding, weight: Tensor) -> tuple[list[Tensor | None], Tensor, Kept]:
    """States in order, table of scalars, and how all is kept, for one update of this step."""
    table = binding.table
    state = optimizer.state[weight]
    variant = table.begin(optimizer.state)
    if not state:
        table.show(binding.row, state)
    held, kept = _as_before(optimizer, binding.kept, variant, weight, state)
    if kept is None:
        held, kept = _take_stock(optimizer, variant, weight, state)
        binding.kept, binding.route = kept, None
    if registry.LOW_KEY in state:
        _check_bits(binding, weight, state)
    return held, table.row(binding.row), kept


def _as_before(
    optimizer: FusedOptimizer, kept: Kept | None, variant: Variant, weight: Tensor, state: dict[str, Any]
) -> tuple[list[Tensor | None], Kept | None]:
    """The states in order, and `kept`, or None where it no longer holds."""
    if kept is None or kept.switches != variant.switches or kept.choice is not optimizer.choice:
        return [], None
    held = [None if name is None else state.get(name) for name in kept.states]
    return held, kept if kept.layout == _layout(weight, held, state, kept.beside) else None


def _take_stock(
    optimizer: FusedOptimizer, variant: Variant, weight: Tensor, state: dict[str, Any]
) -> tuple[list[Tensor | None], Kept]:
    """The states, created where there are none, in one layout; and how all is kept."""
    rule, choice = optimizer.rule, optimizer.choice
    states.ensure(rule, variant, weight, state, choice)
    held = states.in_order(rule, variant, weight, state)
    names = tuple(n if has else None for n, has in zip(rule.spec.state_names, variant.present, strict=True))
    scales = [registry.scale_key(name) for name in names if name is not None]
    beside = (*[name for name in scales if name in state], registry.LOW_KEY)
    found = storage.in_use(rule, choice, weight, held, state)
    return held, Kept(variant.switches, choice, names, beside, _layout(weight, held, state, beside), found)


def _check_bits(binding: Binding, weight: Tensor, state: dict[str, Any]) -> None:
    """Zero the bits beside a weight that they do not belong to."""
    low = state[registry.LOW_KEY]
    if low is not None and binding.fingerprint is not None:
        expected, binding.fingerprint = binding.fingerprint, None
        if fingerprint(weight) != expected:
            low.zero_()
    forget_stale_bits(binding, state)


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
    parameter = binding.weight
    held, table, known = _prepare(optimizer, binding, parameter)
    weight = coded.stored(parameter) if parameter.dtype is coded.CODES else parameter
    was_right = parameter.dtype is coded.CODES and coded.is_intact(parameter)
    try:
        _run_linear(optimizer, binding, x, dy, weight, held, table, known)
    finally:
        # Also where memory ran out on the way: rows that were written hold codes.
        torch.autograd.graph.increment_version(parameter)
        if parameter.dtype is coded.CODES:
            torch.autograd.graph.increment_version(coded.known(parameter).scales)
            if was_right:
                coded.note_written(parameter)
    binding.version = parameter._version


def _run_linear(
    optimizer: FusedOptimizer,
    binding: Binding,
    x: Operand,
    dy: Operand,
    weight: Tensor,
    held: list[Tensor | None],
    table: Tensor,
    known: Kept,
) -> None:
    """The update by the route that fits; `weight` as kernels read and write it."""
    switches, kept = known.switches, known.storage
    if weight.numel():
        route = _route(optimizer, binding, x, dy, weight, held, table, known)
        schedule = route.schedule
        if isinstance(x, Scaled) or isinstance(dy, Scaled):
            schedule, x, dy = scaled.prepared(schedule, optimizer.schedule, x, dy)
        exact = optimizer.arithmetic == "exact"
        if schedule == "hopper":
            route.on_hopper(x, dy, weight, held, table, kept, route.addresses)
        elif schedule == "portable":
            from forge_dsl.runtime import launch

            launch.linear_step_portable(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact, kept)
        else:
            linear_step_banded(optimizer.rule, x, dy, weight.detach(), held, table, switches, exact, kept)


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """How a weight was last updated.

    key        what it was worked out from, besides the tensors that `Kept` knows
    on_hopper  the `hopper.Launch` of that schedule, and the addresses that it takes
    """

    key: tuple[Any, ...]
    schedule: Schedule
    on_hopper: Any
    addresses: Any


def _route(
    optimizer: FusedOptimizer,
    binding: Binding,
    x: Operand,
    dy: Operand,
    weight: Tensor,
    held: list[Tensor | None],
    table: Tensor,
    known: Kept,
) -> Route:
    """The last update's route, if nothing differs from which it was worked out.

    `_prepare` forgets it when the tensors of the weight are no longer where they were.
    """
    if not (isinstance(x, Tensor) and isinstance(dy, Tensor)):
        x, dy = scaled.stand_ins(x, dy)
    key = (
        x.dtype,
        dy.dtype,
        x.shape,
        x.stride(),
        dy.stride(),
        (x.data_ptr() | dy.data_ptr()) % 16,
        optimizer.schedule,
        optimizer.arithmetic,
        optimizer.gradient_bits,
        choose.age(),
    )
    route = binding.route
    if route is not None and route.key == key:
        return route
    schedule, on_hopper = _find_route(optimizer, x, dy, weight, held, known)
    addresses = None
    if on_hopper is not None:
        from forge_dsl.runtime import hopper

        addresses = hopper.addresses_of(weight, held, table, known.storage)
    route = Route(key, schedule, on_hopper, addresses)
    # A kernel that nobody could check yet, since a CUDA graph is being captured, is asked about again.
    binding.route = route if on_hopper is None or trust.is_settled(on_hopper) else None
    return route


def _find_route(
    optimizer: FusedOptimizer, x: Tensor, dy: Tensor, weight: Tensor, held: list[Tensor | None], known: Kept
) -> tuple[Schedule, Any]:
    """The schedule of an update, and its `hopper.Launch` where it takes that one."""
    rule, switches, kept = optimizer.rule, known.switches, known.storage
    exact = optimizer.arithmetic == "exact"
    on_hopper = None
    bits = optimizer.gradient_bits
    if weight.is_cuda and optimizer.schedule != "banded":
        from forge_dsl.runtime import hopper

        on_hopper = hopper.find(rule, x, dy, weight, held, switches, kept, exact, bits)
    stored = [weight, *(state for state in held if state is not None)]
    measured = not exact and set(kept.formats) == {"plain"}
    chosen = choose.choose(optimizer.schedule, x, weight, stored, on_hopper is not None, measured, bits)
    if chosen == "hopper" and not trust.holds(on_hopper, rule, x, weight, held, switches, kept):
        chosen = choose.choose(optimizer.schedule, x, weight, stored, False, measured, bits)
    return chosen, on_hopper if chosen == "hopper" else None


def _apply_zero(optimizer: FusedOptimizer, binding: Binding) -> None:
    """Update a weight in codes with the gradient zero, which is that of a linear layer without tokens.

    Codes that something else has written do not matter here, and are refused at the next use: whoever steps on zeros is
    a helper that would leave its rate of zero behind.
    """
    rows, columns = binding.shape
    dtype = coded.known(binding.weight).dtype
    x, dy = (torch.empty(0, features, dtype=dtype, device=binding.device) for features in (columns, rows))
    apply_linear(optimizer, binding, x, dy)


@torch.no_grad()
def apply_elementwise(optimizer: FusedOptimizer, gradients: Sequence[tuple[Binding, Tensor]]) -> None:
    """Update parameters of any shape from ordinary gradients: on a GPU, one launch per variant and stored types."""
    exact = optimizer.arithmetic == "exact"
    together: dict[tuple[torch.device, tuple[bool, ...]], list[Any]] = {}
    for binding, grad in gradients:
        weight = binding.weight
        if weight.dtype is coded.CODES:
            _apply_zero(optimizer, binding)
            continue
        held, table, known = _prepare(optimizer, binding, weight)
        switches, kept = known.switches, known.storage
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
        if binding.dtype is coded.CODES:
            continue
        torch.autograd.graph.increment_version(binding.weight)
        binding.version = binding.weight._version
