"""Saving and loading: torch's layout, every dtype kept bit for bit, and everything checked before anything changes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.extended import fingerprint
from forge_dsl.runtime import arguments, entries, states, storage, torch_layout
from forge_dsl.runtime.arguments import host_value
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.counters import StepTable
from forge_dsl.runtime.entries import FINGERPRINT, ROUNDING

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that fits: the groups' new arguments, the entry of each parameter, and entries of anything else."""

    groups: list[dict[str, Any]]
    entries: dict[int, dict[str, Any]]
    others: dict[Any, Any]


def exported(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict in torch.optim's layout: counts copied out of the tables, torch's switches in the groups."""
    copies = {id(table): table.counters.to("cpu", copy=True) for table in _tables(optimizer)}
    # torch keeps no entry for a parameter without states, as under plain SGD.
    packed = {key: entry for key, entry in state_dict["state"].items() if entry}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        binding = optimizer.binding_of(parameter)
        counters = copies[id(binding.table)]
        if index in packed:
            counts = binding.table.saved_counters(binding.row, packed[index], counters)
            packed[index] = {**packed[index], **counts}
        rounding = _rounding(optimizer, binding, packed.get(index, {}), counters)
        if rounding:
            packed[index] = {**packed.get(index, {}), **rounding}
    _warn_of_torch(optimizer)
    found = torch_layout.counterpart(optimizer.rule.spec)
    neutral = found.neutral if found is not None else {}
    groups = [{**neutral, **group} for group in state_dict["param_groups"]]
    return {**state_dict, "state": packed, "param_groups": groups}


def _rounding(
    optimizer: FusedOptimizer, binding: Binding, entry: dict[str, Any], counters: Tensor
) -> dict[str, Tensor]:
    """What rounding needs to go on: where its draws are, and which weight the bits beside it belong to."""
    names = optimizer.rule.spec.state_names
    kept = storage.in_use(optimizer.rule, optimizer.choice, binding.weight, [entry.get(n) for n in names], entry)
    updates = int(counters[binding.row, binding.table.count_column])
    found = {}
    if any(kept.draws) and updates:
        found[ROUNDING] = torch.tensor([*binding.table.seeds[binding.row], updates], device="cpu")
    if registry.LOW_KEY in entry:
        of = binding.fingerprint  # of a checkpoint whose model may not have been loaded yet
        found[FINGERPRINT] = torch.tensor(fingerprint(binding.weight) if of is None else of, device="cpu")
    return found


def decoded(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An exported state dict with every block-wise state in fp32, and without what only this package reads."""
    spec = optimizer.rule.spec
    found = {}
    for key, entry in state_dict["state"].items():
        plain = {name: value for name, value in entry.items() if name not in (ROUNDING, FINGERPRINT, registry.LOW_KEY)}
        for state in spec.states:
            scales = plain.pop(registry.scale_key(state.name), None)
            if scales is not None:
                plain[state.name] = entries.decode(plain[state.name], scales, state)
        if plain:
            found[key] = plain
    return {**state_dict, "state": found}


def _warn_of_torch(optimizer: FusedOptimizer) -> None:
    """Say once of codes, and once of wider numbers, what torch.optim would make of them: it casts all states but `step`
    to the parameter's dtype.
    """
    found = torch_layout.counterpart(optimizer.rule.spec)
    if found is None:
        return
    names = {*optimizer.rule.spec.state_names, *(scalar.name for scalar in optimizer.rule.spec.scalars)}
    for binding in optimizer.bindings():
        state = optimizer.state.get(binding.weight, {})
        for name in sorted(names & state.keys()):
            held = state[name].dtype
            if registry.scale_key(name) in state:
                what = "codes"
                message = (
                    f"in 8-bit codes, which torch.optim.{found.name} would take for numbers: give it "
                    "optimizer.decoded_state_dict()"
                )
            elif binding.dtype not in (held, torch.float32, CODES):
                what = "numbers"
                message = (
                    f"in {held}, and the parameter is {binding.dtype}: loaded here it keeps every bit, but torch.optim."
                    f"{found.name} would round it to the parameter's dtype"
                )
            else:
                continue
            if what not in optimizer.warned_of:
                optimizer.warned_of.add(what)
                warnings.warn(f"the state dict holds {name!r} of {binding.describe()} {message}", stacklevel=4)


def _tables(optimizer: FusedOptimizer) -> list[StepTable]:
    return list({id(binding.table): binding.table for binding in optimizer.bindings()}.values())


def read(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> Loaded:
    """Check a state dict against the optimizer; raises ValueError that names what does not fit."""
    saved_groups, saved_states = _parts(state_dict)
    groups = optimizer.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, expected {len(groups)}"
        )
    fitted = [_fit_group(optimizer, i, group, saved_groups[i]) for i, group in enumerate(groups)]
    held: dict[int, dict[str, Any]] = {}
    keys: dict[Any, Tensor] = {}
    for group, saved, new in zip(groups, saved_groups, fitted, strict=True):
        present = _present(optimizer, new)
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if key in keys:
                raise ValueError(
                    f"loaded state dict gives one entry, {key!r}, to {optimizer.describe(keys[key])} and to "
                    f"{optimizer.describe(parameter)}; expected one for each"
                )
            keys[key] = parameter
            held[id(parameter)] = entries.fit(optimizer, parameter, saved_states.get(key), present)
    entries.check_positions(optimizer, held)
    others = {key: value for key, value in saved_states.items() if key not in keys}
    return Loaded(fitted, held, others)


def _parts(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """The groups, copied, and the states of a state dict; raises ValueError for anything else."""
    is_dict = isinstance(state_dict, dict)
    groups, held = (state_dict.get(key) if is_dict else None for key in ("param_groups", "state"))
    if not isinstance(groups, list | tuple) or not isinstance(held, dict):
        what = (", ".join(map(repr, state_dict)) or "an empty one") if is_dict else type(state_dict).__name__
        raise ValueError(
            f"this is no optimizer's state dict: expected a dict of 'state' and 'param_groups', got {what[:200]}. Give "
            "what optimizer.state_dict() returned, which a checkpoint of a training run often holds under 'optimizer'"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"loaded state dict: parameter group {index} has no list of 'params'")
    return [deepcopy(group) for group in groups], held


def _fit_group(optimizer: FusedOptimizer, index: int, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The group with the checkpoint's arguments."""
    if len(saved["params"]) != len(group["params"]):
        raise ValueError(
            f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group {index}: "
            f"{len(saved['params'])} parameters, expected {len(group['params'])}"
        )
    for ours, theirs in zip(group.get("param_names", ()), saved.get("param_names", ()), strict=False):
        if ours != theirs:
            raise ValueError(f"loaded state dict has parameter {theirs!r} where group {index} has {ours!r}")
    spec = optimizer.rule.spec
    missing = [name for name in spec.hyper_names if name not in saved]
    if missing:
        raise ValueError(
            f"loaded state dict is not one of {spec.name}: parameter group {index} lacks {', '.join(missing)}"
        )
    try:
        kept = torch_layout.without_switches(spec, saved)
    except ValueError as error:
        raise ValueError(f"loaded state dict, parameter group {index}: {error}") from None
    new = {**{name: group[name] for name in spec.flag_names}, **kept, "params": group["params"]}
    if "param_names" in group:
        new["param_names"] = group["param_names"]
    try:
        arguments.check_hypers(optimizer.rule, new, running=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"loaded state dict, parameter group {index}: {error}") from None
    return new


def _present(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, bool]:
    """Which states the group's variant has."""
    rule = optimizer.rule
    hypers = {name: host_value(group[name]) for name in rule.spec.hyper_names}
    switches = rule.switches(**hypers, **{name: group[name] for name in rule.spec.flag_names})
    return dict(zip(rule.spec.state_names, rule.present(*switches), strict=True))


@torch.no_grad()
def install(optimizer: FusedOptimizer, loaded: Loaded) -> None:
    """Replace the optimizer's groups and states by a checkpoint that fits."""
    for group, new in zip(optimizer.param_groups, loaded.groups, strict=True):
        group.clear()
        group.update(new)
    optimizer.state = defaultdict(dict, loaded.others)
    optimizer.loaded_amid_step = any(binding.updated for binding in optimizer.bindings())
    for table in _tables(optimizer):
        table.reset()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            binding = optimizer.binding_of(parameter)
            binding.updated = False
            state: dict[str, Any] = {}
            entry = dict(loaded.entries[id(parameter)])
            position, of = entry.pop(ROUNDING, None), entry.pop(FINGERPRINT, None)
            for key, value in entry.items():
                if key == registry.LOW_KEY:
                    state[key] = states.beside(parameter, value.dtype).copy_(value)
                elif isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = states.laid_out(value, parameter)
                else:
                    state[key] = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
            binding.table.adopt(binding.row, state)
            binding.kept, binding.version = None, None
            binding.fingerprint = None if of is None else int(of)
            if position is not None:
                seed, weight_id, updates = position.tolist()
                binding.table.set_seed(binding.row, seed, weight_id)
                binding.table.set_updates(binding.row, updates)
            if state:
                optimizer.state[parameter] = state
    _part_draws(optimizer)


def _part_draws(optimizer: FusedOptimizer) -> None:
    """Give a weight that had not begun another number if the checkpoint's weights have taken the one it was made with.

    Each weight of an optimizer draws its own bits, and a checkpoint may hold the weights in another order.
    """
    taken: set[tuple[int, int]] = set()
    later: list[Binding] = []
    for binding in optimizer.bindings():
        place = binding.table.seeds[binding.row]
        if optimizer.state.get(binding.weight) and place not in taken:
            taken.add(place)
        else:
            later.append(binding)
    for binding in later:
        seed, number = binding.table.seeds[binding.row]
        while (seed, number) in taken:
            number += 1
        taken.add((seed, number))
        if binding.table.seeds[binding.row] != (seed, number):
            binding.table.set_seed(binding.row, seed, number)
