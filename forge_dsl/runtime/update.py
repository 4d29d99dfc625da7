"""One update of one parameter: its states, its table of scalars, and the route that fits the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _increment_version

from forge_dsl.formats import registry
from forge_dsl.formats.extended import fingerprint
from forge_dsl.formats.operand import Operand, Scaled
from forge_dsl.runtime import coded, scaled, states, storage, trust
from forge_dsl.runtime.banded import elementwise_step_banded, linear_step_banded
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.direct_launch import Again
from forge_dsl.runtime.group_arguments import Variant, reader
from forge_dsl.runtime.storage import Storage
from forge_dsl.selection import choose
from forge_dsl.selection.table import Schedule

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer

_TYPE = attrgetter("dtype")


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """How a parameter's tensors are kept, as long as they lie where they lay when that was worked out.

    switches, choice  of the variant and of the optimizer that it was worked out for
    states            names of the states in order, None where the variant has none
    read, entries     what reads all tensors from `optimizer.state[p]`, and how many entries that has
    layout            of the weight and of those tensors
    """

    switches: tuple[bool, ...]
    choice: storage.Choice
    states: tuple[str | None, ...]
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    entries: int
    layout: tuple[Any, ...]
    storage: Storage

    def in_order(self, state: Mapping[str, Any]) -> list[Tensor | None]:
        """The states of `optimizer.state[p]` as kernels take them."""
        return [None if name is None else state[name] for name in self.states]


def _layout(weight: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Address, strides and type of every tensor. One that is replaced, cast or moved shows in one of them.

    Raises AttributeError or TypeError for what is no tensor, and RuntimeError for one without memory.
    """
    if weight.dtype is coded.CODES:
        tensors = (*tensors, coded.known(weight).scales)
    tensors = (weight, *tensors)
    return *map(Tensor.data_ptr, tensors), *map(Tensor.stride, tensors), *map(_TYPE, tensors)


def _take_stock(
    optimizer: FusedOptimizer, binding: Binding, variant: Variant, weight: Tensor, state: dict[str, Any]
) -> Kept:
    """How the weight and its states are kept: as before, or with the states created where there are none."""
    kept = binding.kept
    if kept is not None and kept.switches == variant.switches and kept.choice is optimizer.choice:
        try:
            if len(state) == kept.entries and kept.layout == _layout(weight, kept.read(state)):
                return kept
        except (AttributeError, KeyError, TypeError, RuntimeError):  # something else, or nothing, is where a tensor was
            pass
    rule, choice = optimizer.rule, optimizer.choice
    states.check(rule, binding.describe(), weight, state)
    if not state:
        binding.table.show(binding.row, state)
    states.ensure(rule, variant, weight, state, choice)
    held = states.in_order(rule, variant, weight, state)
    names = tuple(n if has else None for n, has in zip(rule.spec.state_names, variant.present, strict=True))
    present = [name for name in names if name is not None]
    beside = [key for key in (*map(registry.scale_key, present), registry.LOW_KEY) if state.get(key) is not None]
    read, found = reader([*present, *beside]), storage.in_use(rule, choice, weight, held, state)
    # What is None may become a tensor unnoticed: then nothing is kept.
    entries = -1 if any(value is None for value in state.values()) else len(state)
    kept = Kept(variant.switches, choice, names, read, entries, _layout(weight, read(state)), found)
    binding.kept, binding.route = kept, None
    return kept


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


def update_inside_backward(
    optimizer: FusedOptimizer, binding: Binding, weight: Tensor, x: Operand, dy: Operand
) -> None:
    """`apply_linear`, all of the weight's gradient in this step, once it is known to be right: from here on the weight
    counts as updated, and its `.grad` says so."""
    binding.gate = None
    binding.updated = True
    apply_linear(optimizer, binding, weight, x, dy)
    weight.grad = binding.placeholder(weight)


def apply_linear(optimizer: FusedOptimizer, binding: Binding, weight: Tensor, x: Operand, dy: Operand) -> None:
    """Update `weight` [out, in], the parameter, from `x` [tokens, in] and `dy` [tokens, out]; the gradient is never
    stored.

    Called in a step that has begun, inside a backward that records no graph, or under `torch.no_grad()`.
    """
    state, table = optimizer.state[weight], binding.table
    kept = _take_stock(optimizer, binding, table.begun(optimizer.state), weight, state)
    bits_beside = registry.LOW_KEY in state
    if bits_beside:
        _check_bits(binding, weight, state)
    row = table.row(binding.row)
    in_codes = weight.dtype is coded.CODES
    was_right = in_codes and coded.is_intact(weight)
    try:
        _run_linear(optimizer, binding, x, dy, weight, state, row, kept)
    finally:
        # Also where memory ran out on the way: rows that were written hold codes.
        _increment_version((weight,))
        if in_codes:
            _increment_version((coded.known(weight).scales,))
            if was_right:
                coded.note_written(weight)
    if bits_beside:
        binding.version = weight._version


def _run_linear(
    optimizer: FusedOptimizer,
    binding: Binding,
    x: Operand,
    dy: Operand,
    weight: Tensor,
    state: dict[str, Any],
    table: Tensor,
    known: Kept,
) -> None:
    """The update by the route that fits: the last update's, if nothing differs from which it was worked out.

    `_take_stock` forgets that one when the tensors of the weight are no longer where they were.
    """
    if in_8_bits := isinstance(x, Scaled) or isinstance(dy, Scaled):
        like_x, like_dy = scaled.stand_ins(x, dy)
    else:
        like_x, like_dy = x, dy
    at_x, at_dy = like_x.data_ptr(), like_dy.data_ptr()
    key = (
        like_x.dtype,
        like_dy.dtype,
        like_x.shape,
        like_x.stride(),
        like_dy.stride(),
        at_x % 16,
        at_dy % 16,
        optimizer.schedule,
        optimizer.arithmetic,
        optimizer.gradient_bits,
        choose.age(),
    )
    route = binding.route
    if route is not None and route.key == key:
        if route.again is not None and not in_8_bits and route.again(at_dy, at_x):
            return
    else:
        route = binding.route = None
    if not weight.numel():
        return
    held, memory, kept = known.in_order(state), coded.stored(weight), known.storage
    if route is None:
        route = Route(key, *_find_route(optimizer, like_x, like_dy, memory, held, known))
    schedule, exact, again = route.schedule, optimizer.arithmetic == "exact", None
    if in_8_bits:
        schedule, x, dy = scaled.prepared(schedule, optimizer.schedule, x, dy)
    if schedule == "hopper":
        route.on_hopper(x, dy, memory, held, table, kept)
        again = route.on_hopper.again(memory, held, table, kept)
        if not trust.is_settled(route.on_hopper):
            # A kernel that nobody could check yet, since a CUDA graph is being captured, is asked about again.
            return
    elif schedule == "portable":
        from forge_dsl.runtime import launch

        again = launch.linear_step_portable(optimizer.rule, x, dy, memory, held, table, known.switches, exact, kept)
    else:
        linear_step_banded(optimizer.rule, x, dy, memory, held, table, known.switches, exact, kept)
    binding.route = route if again is None else replace(route, again=again)


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """How a weight was last updated.

    key        what it was worked out from, besides the tensors that `Kept` knows
    on_hopper  the `hopper.Launch` of that schedule
    again      its launch on the tensors that `Kept` knows and the table, given the addresses of dy and x
    """

    key: tuple[Any, ...]
    schedule: Schedule
    on_hopper: Any
    again: Again | None = None


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
    binding.table.begin(optimizer.state)
    apply_linear(optimizer, binding, binding.weight, x, dy)


@torch.no_grad()
def apply_elementwise(optimizer: FusedOptimizer, gradients: Sequence[tuple[Binding, Tensor]]) -> None:
    """Update parameters of any shape from ordinary gradients: on a GPU, one launch per variant and stored types."""
    exact = optimizer.arithmetic == "exact"
    together: dict[tuple[torch.device, tuple[bool, ...]], list[Any]] = {}
    for binding, grad in gradients:
        weight = binding.held
        if weight.dtype is coded.CODES:
            _apply_zero(optimizer, binding)
            continue
        state = optimizer.state[weight]
        known = _take_stock(optimizer, binding, binding.table.begun(optimizer.state), weight, state)
        if registry.LOW_KEY in state:
            _check_bits(binding, weight, state)
        held, table = known.in_order(state), binding.table.row(binding.row)
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
    written = [(binding, binding.held) for binding, _ in gradients if binding.dtype is not coded.CODES]
    _increment_version([weight for _, weight in written])
    for binding, weight in written:
        binding.version = weight._version
