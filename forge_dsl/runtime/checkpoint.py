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
from forge_dsl.runtime import arguments, states, storage, torch_layout
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.counters import StepTable, host_value
from forge_dsl.spec import StateSpec

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


# Names of entries beside torch's: seed, weight and updates of stochastic rounding (int64 [3]), and which weight the
# bits of `weight_low` belong to.
ROUNDING, FINGERPRINT = "rounding", "weight_fingerprint"


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
    _warn_of_rounding(optimizer)
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
        found[ROUNDING] = torch.tensor([*binding.table.seeds[binding.row], updates])
    if registry.LOW_KEY in entry:
        of = binding.fingerprint  # of a checkpoint whose model may not have been loaded yet
        found[FINGERPRINT] = torch.tensor(fingerprint(binding.weight) if of is None else of)
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
                plain[state.name] = _decode(plain[state.name], scales, state)
        if plain:
            found[key] = plain
    return {**state_dict, "state": found}


def _decode(codes: Tensor, scales: Tensor, state: StateSpec) -> Tensor:
    codec = storage.block_wise(storage.code_name(scales), state.nonnegative)
    matrix = codes.reshape(registry.matrix_shape(codes.shape))
    return codec.decode(matrix, scales.view(torch.uint8)).view(codes.shape)


def _warn_of_rounding(optimizer: FusedOptimizer) -> None:
    """Say once per optimizer what torch.optim would round, which casts all but `step` to the parameter's dtype."""
    found = torch_layout.counterpart(optimizer.rule.spec)
    if found is None or optimizer.warned_of_rounding:
        return
    names = {*optimizer.rule.spec.state_names, *(scalar.name for scalar in optimizer.rule.spec.scalars)}
    for binding in optimizer.bindings():
        state = optimizer.state.get(binding.weight, {})
        for name in sorted(names & state.keys()):
            held = state[name].dtype
            if registry.scale_key(name) in state:
                optimizer.warned_of_rounding = True
                warnings.warn(
                    f"the state dict holds {name!r} of {binding.describe()} in 8-bit codes, which torch.optim."
                    f"{found.name} would take for numbers: give it optimizer.decoded_state_dict()",
                    stacklevel=4,
                )
                return
            if binding.dtype not in (held, torch.float32, CODES):
                optimizer.warned_of_rounding = True
                warnings.warn(
                    f"the state dict holds {name!r} of {binding.describe()} in {held}, and the parameter "
                    f"is {binding.dtype}: loaded here it keeps every bit, but torch.optim.{found.name} would round "
                    "it to the parameter's dtype",
                    stacklevel=4,
                )
                return


def _tables(optimizer: FusedOptimizer) -> list[StepTable]:
    return list({id(binding.table): binding.table for binding in optimizer.bindings()}.values())


def read(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> Loaded:
    """Check a state dict against the optimizer; raises ValueError that names what does not fit."""
    saved_groups = deepcopy(state_dict["param_groups"])
    groups = optimizer.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, expected {len(groups)}"
        )
    fitted = [_fit_group(optimizer, i, group, saved_groups[i]) for i, group in enumerate(groups)]
    entries: dict[int, dict[str, Any]] = {}
    keys = set()
    for group, saved, new in zip(groups, saved_groups, fitted, strict=True):
        present = _present(optimizer, new)
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            keys.add(key)
            entry = state_dict["state"].get(key) or {}
            entries[id(parameter)] = _fit_entry(optimizer, parameter, entry, present)
    others = {key: value for key, value in state_dict["state"].items() if key not in keys}
    return Loaded(fitted, entries, others)


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
    arguments.check_hypers(optimizer.rule, new)
    return new


def _present(optimizer: FusedOptimizer, group: dict[str, Any]) -> dict[str, bool]:
    """Which states the group's variant has."""
    rule = optimizer.rule
    hypers = {name: host_value(group[name]) for name in rule.spec.hyper_names}
    switches = rule.switches(**hypers, **{name: group[name] for name in rule.spec.flag_names})
    return dict(zip(rule.spec.state_names, rule.present(*switches), strict=True))


def _fit_entry(
    optimizer: FusedOptimizer, parameter: Tensor, entry: dict[str, Any], present: dict[str, bool]
) -> dict[str, Any]:
    """One parameter's entry: numbers as floats, tensors as they are. Empty for a parameter that has not begun."""
    spec = optimizer.rule.spec
    name = optimizer.describe(parameter)
    table = optimizer.binding_of(parameter).table
    held = {key: value for key, value in entry.items() if value is not None}
    if not held and not any(s.begins == "construction" and present[s.name] for s in spec.states):
        return {}
    fitted: dict[str, Any] = {}
    for key in table.visible:
        if key == "step" and key not in held and not spec.reads_step:
            # Other implementations of such a rule, like lion-pytorch, keep no count, and the rule needs none.
            held[key] = 0.0
        if key not in held:
            raise ValueError(f"loaded state dict lacks {key!r} of {name}")
        value = held[key]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"loaded state dict: {key!r} of {name} has shape {list(value.shape)}, expected one number")
        fitted[key] = float(value)
    for state in spec.states:
        value = held.get(state.name)
        if value is None:
            if present[state.name] and state.name not in spec.first:
                raise ValueError(f"loaded state dict lacks {state.name!r} of {name}")
            continue
        scales = held.get(registry.scale_key(state.name))
        if scales is not None:
            fitted |= _fit_blocks(parameter, name, state, value, scales)
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dtype not in arguments.DTYPES:
            got = f"{list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"loaded state dict: {state.name!r} of {name} is {got}; expected a floating-point tensor of shape "
                f"{list(parameter.shape)}"
            )
        fitted[state.name] = value
    fitted |= _fit_rounding(parameter, name, held)
    passed = {
        "step",
        *(registry.scale_key(state) for state in spec.state_names),
        ROUNDING,
        FINGERPRINT,
        registry.LOW_KEY,
    }
    unknown = [key for key in held if key not in fitted and key not in passed]
    if unknown:
        raise ValueError(f"loaded state dict: {spec.name} has no state {unknown[0]!r}, which {name} has there")
    return fitted


def _fit_blocks(parameter: Tensor, name: str, state: StateSpec, codes: Any, scales: Any) -> dict[str, Tensor]:
    """A block-wise state of a checkpoint; in fp32 where this parameter cannot have one."""
    shape = registry.scale_shape(parameter.shape)
    right = isinstance(codes, Tensor) and codes.shape == parameter.shape and codes.dtype == torch.uint8
    right = right and isinstance(scales, Tensor) and scales.shape == shape
    if not right or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(
            f"loaded state dict: {state.name!r} of {name} has scales, so expected uint8 codes of shape "
            f"{list(parameter.shape)} and scales of shape {list(shape)}, uint8 or float8_e8m0fnu"
        )
    if not parameter.is_contiguous():
        return {state.name: _decode(codes, scales, state)}
    return {state.name: codes, registry.scale_key(state.name): scales}


def _fit_rounding(parameter: Tensor, name: str, held: dict[str, Any]) -> dict[str, Tensor]:
    """Where the draws are, and the bits beside a bf16 weight. What torch has cast on its way here is left out."""
    found = {}
    position = held.get(ROUNDING)
    if isinstance(position, Tensor) and position.dtype == torch.int64 and position.shape == (3,):
        found[ROUNDING] = position
    low, of = held.get(registry.LOW_KEY), held.get(FINGERPRINT)
    if isinstance(low, Tensor) and low.dtype in (torch.int8, torch.int16) and parameter.dtype == torch.bfloat16:
        if low.shape != parameter.shape:
            raise ValueError(
                f"loaded state dict: {registry.LOW_KEY!r} of {name} has shape {list(low.shape)}, expected "
                f"{list(parameter.shape)}"
            )
        if isinstance(of, Tensor) and of.dtype == torch.int64:
            found |= {registry.LOW_KEY: low, FINGERPRINT: of}
    return found


@torch.no_grad()
def install(optimizer: FusedOptimizer, loaded: Loaded) -> None:
    """Replace the optimizer's groups and states by a checkpoint that fits."""
    for group, new in zip(optimizer.param_groups, loaded.groups, strict=True):
        group.clear()
        group.update(new)
    optimizer.state = defaultdict(dict, loaded.others)
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
