"""Step counts, recurrent scalars and the per-step table of scalars, for the parameters of one group on one device.

A parameter's numbers are a row of one float64 tensor, so that on a GPU a single launch fills every table of the step.
What a step computes is kept apart (`pending`) and committed for the rows that were updated, so a parameter without a
gradient keeps its numbers. Views of the rows are what `optimizer.state[p]` shows, under torch's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats import rounding
from forge_dsl.runtime.direct_launch import Again
from forge_dsl.runtime.ieee import Real
from forge_dsl.runtime.rule import Rule


@dataclass(frozen=True)
class Variant:
    """What one step of one group runs with. `hypers` holds floats, tuples of floats, or tensors on a GPU."""

    hypers: dict[str, Any]
    flags: dict[str, bool]
    switches: tuple[bool, ...]
    present: tuple[bool, ...]


def flatten(value: Any) -> tuple[Any, ...]:
    """A hyper as a tuple of its elements."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def host_value(value: Any) -> Any:
    """A hyper as a float or a tuple of floats. Reads a tensor, which waits for the device."""
    if isinstance(value, list | tuple):
        return tuple(float(element) for element in value)
    return float(value)


def _taken_out(name: str) -> RuntimeError:
    return RuntimeError(f"a parameter group has no {name!r} any more: set group[{name!r}] to its value again")


def _signature(value: Any) -> Any:
    """What changes when a hyper changes, without reading a device."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else value


def _is_constant(value: Any) -> bool:
    """Whether a hyper or flag is a number, or a tuple of numbers, which nobody can change in place."""
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def reader(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What reads these entries of a dict, in the order of the names; KeyError where one is missing."""
    # `itemgetter` gives a tuple from two names on only.
    if len(names) < 2:
        return lambda entries: tuple([entries[name] for name in names])
    return itemgetter(*names)


def _upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers on the device, without waiting for it."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StepTable:
    """Counters `[rows, counters]` and step tables for the parameters of one group on one device.

    A step begins with the first `begin` and ends with `end_step`; between the two, the hypers are read once, and again
    if they change.
    """

    def __init__(
        self,
        rule: Rule,
        group: dict[str, Any],
        device: torch.device,
        parameters: list[Tensor],
        seed: int = 0,
        ids: Sequence[int] | None = None,
    ) -> None:
        spec = rule.spec
        self.rule = rule
        self.group = group
        self.device = device
        self.parameters = parameters
        self.fills_all = device.type == "cuda"
        self.names = rule.counter_names
        self.visible = tuple(name for name in self.names if not name.startswith("written_") and name != "updates")
        self.initial = [0.0] * spec.uses_step + [s.initial for s in spec.scalars] + [0.0] * len(spec.first)
        self.initial += [] if spec.uses_step else [0.0]
        self.width = len(spec.table)
        self.streams = 1 + len(spec.states)
        self.stride = -(-(self.width + 1 + self.streams) // 4) * 4
        rows = len(parameters)
        self.seeds = [(seed, number) for number in (range(rows) if ids is None else ids)]
        self.bases = torch.tensor([rounding.signed32(rounding.base(*pair)) for pair in self.seeds], dtype=torch.int32)
        self.bases = self.bases.to(device)
        self.counters = torch.tensor(self.initial, dtype=torch.float64).expand(rows, -1).contiguous().to(device)
        self.pending = self.counters.clone()
        self.tables = torch.zeros(rows, self.stride, dtype=torch.float32, device=device)
        self._rows = self.tables.unbind()
        self._written = [[False] * len(spec.first) for _ in parameters]
        self._views: list[list[Tensor] | None] = [None] * rows
        self._updated: set[int] = set()
        self._begun = self._stepping = False
        self._variant: Variant | None = None
        self._signature: Any = None
        self._checked: list[Any] | None = None
        self._arguments = (*spec.hyper_names, *spec.flag_names)
        self._read_group = reader(self._arguments)
        self._constants: tuple[Any, ...] | None = None
        self._computed: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}
        self._hypers: Tensor | None = None
        self._on_device: Variant | None = None
        self._captured: tuple[bool, ...] | None = None
        self._fill_again: Again | None = None
        self._filled: tuple[Any, ...] = ()
        self._uploaded: list[float] = []
        self._indices: dict[tuple[int, ...], Tensor] = {}

    # -- the step -----------------------------------------------------------------------------------------------------

    def begin(self, state: Mapping[Tensor, Any]) -> Variant:
        """The variant of this step. Its first call reads the hypers; after the first update they may not change."""
        try:
            values, known, variant = self._read_group(self.group), self._constants, self._variant
        except KeyError as error:
            raise _taken_out(error.args[0]) from None
        # Values that cannot change in place are known by their identity; with any other, the signature decides.
        if variant is None or known is None or not all(map(is_, values, known)):
            signature = [*map(_signature, values)]
            if self._begun and signature == self._signature:
                assert variant is not None
                return variant
            if self._stepping:
                raise RuntimeError(self._changed(signature))
            # Checked and worked out before anything is changed, for both may raise.
            if signature != self._checked:
                self._check(signature)
            variant, self._begun = self.variant(), False
            self._variant, self._signature = variant, signature
            self._constants = values if all(map(_is_constant, values)) else None
        if not self._begun:
            self._computed = {}
            for row, parameter in enumerate(self.parameters):
                entry = state.get(parameter)
                if entry is not None and not isinstance(entry, dict):
                    raise RuntimeError(
                        f"optimizer.state of a parameter of shape {list(parameter.shape)} is {type(entry).__name__}; "
                        "expected a dict of its states by name"
                    )
                if entry is None or not self._shows(row, entry):
                    self.attach(row, entry or {})
            if self.fills_all:
                self._fill(variant)
                if _capturing(self.device):
                    self._captured = variant.switches
            self._begun = True
        return variant

    @property
    def has_begun(self) -> bool:
        """Whether something of this step has been updated, or is about to be."""
        return self._begun

    def begun(self, state: Mapping[Tensor, dict[str, Any]]) -> Variant:
        """The variant of a step that has begun. What changes while a backward runs is found by `check_unchanged`."""
        variant = self._variant
        return variant if variant is not None and self._begun else self.begin(state)

    def prepare_replay(self) -> None:
        """Bring what a captured step will read up to date with the group. RuntimeError if that needs another kernel."""
        if not self.fills_all:
            return
        signature = [_signature(self._value(name)) for name in self._arguments]
        if signature != self._checked:
            self._check(signature)
        variant = self.variant()
        if self._captured is not None and variant.switches != self._captured:
            names = [switch.text for switch in self.rule.spec.switches]
            changed = ", ".join(n for n, a, b in zip(names, variant.switches, self._captured, strict=True) if a != b)
            raise RuntimeError(
                f"a param group changed {changed} since a CUDA graph was captured, and so needs another kernel: "
                "capture the step again"
            )
        self._device_hypers(variant)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a hyper changed since the first update of this step, and ValueError or TypeError if it
        changed to what it cannot be.
        """
        signature = [*map(_signature, self._read_group(self.group))]
        if self._stepping and signature != self._signature:
            raise RuntimeError(self._changed(signature))
        if signature != self._checked:
            self._check(signature)

    def _check(self, signature: list[Any]) -> None:
        """Raise ValueError or TypeError if an argument that changed since the last check is not what the spec declares.

        Reads no device. torch checks at construction only, and trains on with NaN.
        """
        from forge_dsl.runtime import arguments

        names = set(self._arguments)
        if self._checked is not None:
            pairs = zip(self._arguments, signature, self._checked, strict=True)
            names = {name for name, now, then in pairs if now != then}
        try:
            arguments.check_changed(self.rule, self.group, names)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{error}: a param group has been changed to this, and none of its parameters was updated with it. Set "
                "it right, then call step() again; or, if backward raised this, zero_grad() before the next forward"
            ) from None
        self._checked = signature

    def _changed(self, signature: list[Any]) -> str:
        pairs = zip(self._arguments, signature, self._signature, strict=True)
        names = ", ".join(name for name, now, before in pairs if now != before)
        return (
            f"{names} of a param group changed between backward() and step(). Weights that were updated inside "
            "backward took the old value, and the other parameters of the group would take the new one: change it "
            "before backward, or after step(). To go on from here, set it back and call step()"
        )

    def _value(self, name: str) -> Any:
        """A hyper-parameter or flag of the group; RuntimeError if somebody has taken it out."""
        try:
            return self.group[name]
        except KeyError:
            raise _taken_out(name) from None

    def variant(self) -> Variant:
        """What the group's arguments select now."""
        spec = self.rule.spec
        flags = {name: bool(self._value(name)) for name in spec.flag_names}
        hypers = {name: self._read(self._value(name), keep_tensor=self.fills_all) for name in spec.hyper_names}
        known = {name: math.nan if isinstance(value, Tensor) else value for name, value in hypers.items()}
        switches = tuple(bool(switch) for switch in self.rule.switches(**known, **flags))
        return Variant(hypers, flags, switches, tuple(self.rule.present(*switches)))

    def row(self, row: int) -> Tensor:
        """This step's table of one parameter, fp32 `[stride]`; its first `len(spec.table)` numbers mean something."""
        assert self._variant is not None and self._begun, "begin() comes first"
        self._updated.add(row)
        self._stepping = True
        if self.fills_all:
            return self._rows[row]
        before = tuple(self.counters[row].tolist())
        computed = self._computed.get(before)
        if computed is None:
            computed = self._computed[before] = self._compute(before, self._variant)
        table, pending = computed
        self.pending[row] = pending
        return self._with_keys(table, row, int(pending[self.count_column]))

    def commit(self) -> None:
        """Count what was updated since the last commit. The step goes on."""
        if not self._updated:
            return
        rows = tuple(sorted(self._updated))
        if len(rows) == len(self.parameters):
            self.counters.copy_(self.pending)
        else:
            index = self._indices.get(rows)
            if index is None:
                if len(self._indices) >= 64:
                    self._indices.clear()
                index = self._indices[rows] = _upload(rows, torch.int64, self.device)
            self.counters.index_copy_(0, index, self.pending.index_select(0, index))
        if self._variant is not None:
            for column, present in self._first_states(self._variant):
                for row in rows:
                    self._written[row][column] |= present
        self._updated.clear()

    def end_step(self) -> None:
        """Commit, and read everything anew at the next use."""
        self.commit()
        self._begun = self._stepping = False

    def saved_counters(self, row: int, state: Mapping[str, Any], counters: Tensor) -> dict[str, Tensor]:
        """A row's counters as a state dict holds them, from a copy of `counters` on the CPU.

        `step` is fp32 as in torch, unless fp32 cannot hold it (from 2^24 on); recurrent scalars stay float64.
        """
        shown = {name: counters[row, column] for column, name in enumerate(self.visible) if name in state}
        if "step" in shown and shown["step"].float() == shown["step"]:
            shown["step"] = shown["step"].float()
        return {name: value.clone() for name, value in shown.items()}

    # -- what optimizer.state shows -----------------------------------------------------------------------------------

    def attach(self, row: int, state: dict[str, Any]) -> None:
        """Make the row agree with `optimizer.state[p]`, which a user or a checkpoint may have replaced or emptied."""
        if row in self._updated:
            return
        if self._shows(row, state):
            return
        views = self._views[row]
        if views is not None and any(name not in state for name in self.visible):
            self.counters[row] = torch.tensor(self.initial, dtype=torch.float64)
            self._written[row] = [False] * len(self.rule.spec.first)
            self._views[row] = None
        for column, name in enumerate(self.visible):
            shown = state.get(name)
            if shown is not None and (views is None or shown is not views[column]):
                self.counters[row, column] = float(shown)
        for index, name in enumerate(self.rule.spec.first):
            held = isinstance(state.get(name), Tensor)
            if held != self._written[row][index] and (not held or self._begins_at_update(name)):
                self.set_written(row, index, held)
        if state:
            self.show(row, state)

    def _shows(self, row: int, state: Mapping[str, Any]) -> bool:
        """Whether `optimizer.state[p]` holds the row's own views, so that nothing can differ."""
        views = self._views[row]
        return views is not None and not self._written[row] and all(map(is_, map(state.get, self.visible), views))

    def show(self, row: int, state: dict[str, Any]) -> None:
        """Put views of the row into `optimizer.state[p]`."""
        views = self._views[row]
        if views is None:
            views = self._views[row] = [self.counters[row, column] for column in range(len(self.visible))]
        for name, view in zip(self.visible, views, strict=True):
            if state.get(name) is not view:
                state[name] = view

    def adopt(self, row: int, state: dict[str, Any]) -> None:
        """Take over a loaded or copied `optimizer.state[p]`: a state that it holds has been written."""
        self.attach(row, state)
        begun = "step" not in self.visible or float(state.get("step", 0)) > 0
        for index, name in enumerate(self.rule.spec.first):
            self.set_written(row, index, begun and isinstance(state.get(name), Tensor))

    def set_written(self, row: int, index: int, written: bool) -> None:
        """Record whether the `index`-th state of `spec.first` has been written."""
        self._written[row][index] = written
        self.counters[row, len(self.visible) + index] = float(written)

    def reset(self) -> None:
        """Forget the step that is under way, as when a checkpoint replaces everything."""
        self._updated.clear()
        self._begun = self._stepping = False

    # -- details ------------------------------------------------------------------------------------------------------

    def _begins_at_update(self, name: str) -> bool:
        return any(state.name == name and state.begins == "update" for state in self.rule.spec.states)

    def _first_states(self, variant: Variant) -> list[tuple[int, bool]]:
        names = self.rule.spec.state_names
        return [(i, variant.present[names.index(name)]) for i, name in enumerate(self.rule.spec.first)]

    def _read(self, value: Any, *, keep_tensor: bool) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self._read(element, keep_tensor=keep_tensor) for element in value)
        if keep_tensor and isinstance(value, Tensor) and value.device.type != "cpu":
            return value
        return float(value)

    def _compute(self, before: tuple[float, ...], variant: Variant) -> tuple[Tensor, Tensor]:
        """A row's table (fp32) and its counters after this step (float64), in Python."""
        spec = self.rule.spec
        numbers = dict(zip(self.names, before, strict=True))
        arguments: dict[str, Any] = {name: Real(numbers[name]) for name in (s.name for s in spec.scalars)}
        if spec.uses_step:
            arguments["step"] = Real(numbers["step"] + 1)
        arguments |= {f"first_{name}": not numbers[f"written_{name}"] for name in spec.first}
        for name, value in variant.hypers.items():
            arguments[name] = tuple(map(Real, value)) if isinstance(value, tuple) else Real(value)
        table, scalars = self.rule.step_scalars(**arguments, **variant.flags)
        after = [numbers["step"] + 1] if spec.uses_step else []
        last = [] if spec.uses_step else [numbers["updates"] + 1]
        after += [float(scalar) for scalar in scalars]
        for index, present in self._first_states(variant):
            after.append(1.0 if present else numbers[f"written_{spec.first[index]}"])
        padded = [float(value) for value in table] + [0.0] * (self.stride - self.width)
        return torch.tensor(padded, dtype=torch.float32), torch.tensor(after + last, dtype=torch.float64)

    def _with_keys(self, table: Tensor, row: int, count: int) -> Tensor:
        """The table with the words that begin this step's draws, which differ from weight to weight."""
        base = int(self.bases[row]) & 0xFFFFFFFF
        words = [rounding.signed32(word) for word in rounding.words(base, count, self.streams)]
        table = table.clone()
        table[self.width : self.width + len(words)] = torch.tensor(words, dtype=torch.int32).view(torch.float32)
        return table

    @property
    def count_column(self) -> int:
        """Where a row counts its updates: in `step`, or at the end for a rule that keeps none."""
        return 0 if self.rule.spec.uses_step else len(self.names) - 1

    def set_seed(self, row: int, seed: int, weight_id: int) -> None:
        """What the row's draws begin with, as a checkpoint has it."""
        self.seeds[row] = (seed, weight_id)
        self.bases[row] = rounding.signed32(rounding.base(seed, weight_id))

    def position(self, row: int) -> tuple[int, int, int]:
        """Where the row's draws are: seed, weight, updates. Reads the counters, which waits for the device."""
        return (*self.seeds[row], int(self.counters[row, self.count_column]))

    def set_updates(self, row: int, updates: int) -> None:
        """How many updates the row's draws have been through; a rule that keeps `step` knows."""
        if not self.rule.spec.uses_step:
            self.counters[row, self.count_column] = updates

    def _fill(self, variant: Variant) -> None:
        """The same for all rows on a GPU, in one launch and without waiting for the device."""
        from forge_dsl.runtime import launch

        hypers = self._device_hypers(variant)
        numbers = self.counters, self.tables, self.pending, self.bases
        # All that the kernel was given; everything else about it is fixed.
        key = (*map(Tensor.data_ptr, (hypers, *numbers)), *variant.flags.values())
        again = self._fill_again if key == self._filled else None
        if again is None or not again(hypers.data_ptr(), self.counters.data_ptr()):
            self._fill_again = launch.fill_tables(self.rule, hypers, *numbers, variant.flags)
            self._filled = key
        for index, present in self._first_states(variant):
            if not present:
                column = len(self.visible) + index
                self.pending[:, column] = self.counters[:, column]

    def _device_hypers(self, variant: Variant) -> Tensor:
        """The hypers, flattened, as float64 on the device; uploaded only when a number changed."""
        if variant is self._on_device and self._hypers is not None:
            return self._hypers
        flat = [element for value in variant.hypers.values() for element in flatten(value)]
        numbers = [math.nan if isinstance(element, Tensor) else element for element in flat]
        # Compared by `repr`, since NaN marks a tensor's place and differs from itself.
        if self._hypers is None or repr(numbers) != repr(self._uploaded):
            if _capturing(self.device):
                raise RuntimeError(
                    "a CUDA graph is being captured and hyper-parameters of a param group changed since the last step: "
                    "the graph would keep their present values. Take a step before the capture, and call "
                    "optimizer.prepare_replay() before it, after anything that changes a param group"
                )
            fresh = _upload(numbers, torch.float64, self.device)
            # In place from then on: a captured graph reads this memory.
            self._hypers = fresh if self._hypers is None else self._hypers.copy_(fresh)
            self._uploaded = numbers
        for place, element in enumerate(flat):
            if isinstance(element, Tensor):
                self._hypers[place : place + 1].copy_(element.detach().reshape(1))
        # Tensors may hold other numbers the next time.
        self._on_device = None if any(isinstance(element, Tensor) for element in flat) else variant
        return self._hypers
