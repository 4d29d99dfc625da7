"""Step counts, recurrent scalars and the per-step table of scalars, for the parameters of one group on one device.

A parameter's numbers are a row of one float64 tensor, so that on a GPU a single launch fills every table of the step.
What a step computes is kept apart (`pending`) and committed for the rows that were updated, so a parameter without a
gradient keeps its numbers. Views of the rows are what `optimizer.state[p]` shows, under torch's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats import rounding
from forge_dsl.runtime.devices import is_capturing, upload
from forge_dsl.runtime.direct_launch import Again
from forge_dsl.runtime.group_arguments import GroupArguments, Variant
from forge_dsl.runtime.ieee import Real
from forge_dsl.runtime.rule import Rule


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
        self.arguments = GroupArguments(rule, group, device)
        self.device = device
        self.parameters = parameters
        self.fills_all = device.type == "cuda"
        self.names = rule.counter_names
        self.visible = self.names[: spec.uses_step + len(spec.scalars)]
        self.initial = [0.0] * spec.uses_step + [s.initial for s in spec.scalars] + [0.0] * len(spec.first)
        self.initial += [] if spec.uses_step else [0.0]
        self.width = len(spec.table)
        self.streams = 1 + len(spec.states)
        self.stride = -(-(self.width + 1 + self.streams) // 4) * 4
        rows = len(parameters)
        self.seeds = [(seed, number) for number in (range(rows) if ids is None else ids)]
        bases = [rounding.signed32(rounding.base(*pair)) for pair in self.seeds]
        self.bases = torch.tensor(bases, dtype=torch.int32, device=device)
        self.counters = torch.tensor(self.initial, dtype=torch.float64, device=device).expand(rows, -1).contiguous()
        self.pending = self.counters.clone()
        self.tables = torch.zeros(rows, self.stride, dtype=torch.float32, device=device)
        self._rows = self.tables.unbind()
        self._written = [[False] * len(spec.first) for _ in parameters]
        self._views: list[list[Tensor] | None] = [None] * rows
        self._updated: set[int] = set()
        self._begun = self._stepping = False
        self._computed: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}
        self._captured: tuple[bool, ...] | None = None
        self._fill_again: Again | None = None
        self._filled: tuple[Any, ...] = ()
        self._indices: dict[tuple[int, ...], Tensor] = {}

    # -- the step -----------------------------------------------------------------------------------------------------

    def begin(self, state: Mapping[Tensor, Any]) -> Variant:
        """The variant of this step. Its first call reads the hypers; after the first update they may not change."""
        arguments = self.arguments
        if not arguments.are_constants_of_before() and not (self._begun and arguments.are_unchanged()):
            if self._stepping:
                raise arguments.changed()
            arguments.read()
            self._begun = False
        variant = arguments.variant
        assert variant is not None
        if not self._begun:
            self._computed = {}
            entries = [*map(state.get, self.parameters)]
            if not self._show_all(entries):
                self._attach_all(entries)
            if self.fills_all:
                self._fill(variant)
                if is_capturing(self.device):
                    self._captured = variant.switches
            self._begun = True
        return variant

    @property
    def has_begun(self) -> bool:
        """Whether something of this step has been updated, or is about to be."""
        return self._begun

    def begun(self, state: Mapping[Tensor, dict[str, Any]]) -> Variant:
        """The variant of a step that has begun. What changes while a backward runs is found by `check_unchanged`."""
        variant = self.arguments.variant
        return variant if variant is not None and self._begun else self.begin(state)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a hyper changed since the first update of this step, and ValueError or TypeError if it
        changed to what it cannot be.
        """
        if self._stepping and not self.arguments.are_unchanged():
            raise self.arguments.changed()
        self.arguments.check()

    def prepare_replay(self) -> None:
        """Bring what a captured step will read up to date with the group. RuntimeError if that needs another kernel."""
        if not self.fills_all:
            return
        self.arguments.check()
        variant = self.arguments.select()
        if self._captured is not None and variant.switches != self._captured:
            names = [switch.text for switch in self.rule.spec.switches]
            changed = ", ".join(n for n, a, b in zip(names, variant.switches, self._captured, strict=True) if a != b)
            raise RuntimeError(
                f"a param group changed {changed} since a CUDA graph was captured, and so needs another kernel: "
                "capture the step again"
            )
        self.arguments.on_device(variant)

    def row(self, row: int) -> Tensor:
        """This step's table of one parameter, fp32 `[stride]`; its first `len(spec.table)` numbers mean something."""
        variant = self.arguments.variant
        assert variant is not None and self._begun, "begin() comes first"
        self._updated.add(row)
        self._stepping = True
        if self.fills_all:
            return self._rows[row]
        before = tuple(self.counters[row].tolist())
        computed = self._computed.get(before)
        if computed is None:
            computed = self._computed[before] = self._compute(before, variant)
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
                index = self._indices[rows] = upload(rows, torch.int64, self.device)
            self.counters.index_copy_(0, index, self.pending.index_select(0, index))
        if self.arguments.variant is not None:
            for column, present in self._first_states(self.arguments.variant):
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
            self.counters[row] = torch.tensor(self.initial, dtype=torch.float64, device=self.device)
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

    def _attach_all(self, entries: Sequence[dict[str, Any] | None]) -> None:
        """`attach` for every row. entries: `optimizer.state[p]`, None where there is none."""
        for row, entry in enumerate(entries):
            if entry is not None and not isinstance(entry, dict):
                raise RuntimeError(
                    f"optimizer.state of a parameter of shape {list(self.parameters[row].shape)} is "
                    f"{type(entry).__name__}; expected a dict of its states by name"
                )
            if entry is None or not self._shows(row, entry):
                self.attach(row, entry or {})

    def _show_all(self, entries: Sequence[Any]) -> bool:
        """Whether every entry is a dict that holds its row's own views, so that nothing can differ; in little time."""
        if self.rule.spec.first or not all(map(isinstance, entries, repeat(dict))):
            return False
        views = self._views
        for column, name in enumerate(self.visible):
            shown = [entry.get(name) for entry in entries]
            if not all(view is not None and view[column] is show for view, show in zip(views, shown, strict=True)):
                return False
        return True

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
        last = [] if spec.uses_step else [numbers["_updates"] + 1]
        after += [float(scalar) for scalar in scalars]
        for index, present in self._first_states(variant):
            after.append(1.0 if present else numbers[f"written_{spec.first[index]}"])
        padded = [float(value) for value in table] + [0.0] * (self.stride - self.width)
        numbers_after = torch.tensor(after + last, dtype=torch.float64, device=self.device)
        return torch.tensor(padded, dtype=torch.float32, device=self.device), numbers_after

    def _with_keys(self, table: Tensor, row: int, count: int) -> Tensor:
        """The table with the words that begin this step's draws, which differ from weight to weight."""
        base = int(self.bases[row]) & 0xFFFFFFFF
        words = [rounding.signed32(word) for word in rounding.words(base, count, self.streams)]
        keys = torch.tensor(words, dtype=torch.int32, device=self.device).view(torch.float32)
        table = table.clone()
        table[self.width : self.width + len(words)] = keys
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

        hypers = self.arguments.on_device(variant)
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
