"""What `optimizer.report()` shows: which parameter is updated where, why, and what it takes in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from forge_dsl.formats import registry
from forge_dsl.fusion import HOOKED, FusedForward, examine
from forge_dsl.runtime import coded, coded_layers, storage
from forge_dsl.runtime.banded import CPU_BAND, GPU_BAND
from forge_dsl.runtime.optimizer import FusedOptimizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns of a report that is not printed on a terminal.
_LOGGED_WIDTH = 140

Route = Literal["backward", "step", "frozen", "untrained"]
_PLAIN = "its layer is plain: fuse() it"
ROUTES: dict[Route, str] = {"backward": "backward", "step": "step()", "frozen": "never", "untrained": "never"}


@dataclass(frozen=True)
class Row:
    """One parameter. `weight`, `states` and `gradient` are bytes; `gradient` is what torch would store for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    route: Route
    reason: str
    numel: int
    weight: int
    states: int
    gradient: int


@dataclass(frozen=True)
class FusionReport:
    """Every parameter of the model and of the optimizer. Bytes count tensors; activations are not included.

    workspace  the most that one fused update takes beside weights and states, in bytes
    """

    optimizer: str
    rows: tuple[Row, ...]
    workspace: int

    def select(self, *routes: Route) -> tuple[Row, ...]:
        """The rows of these routes."""
        return tuple(row for row in self.rows if row.route in routes)

    @property
    def gradient_bytes_avoided(self) -> int:
        """Bytes of the gradients that never exist."""
        return sum(row.gradient for row in self.select("backward"))

    @property
    def gradient_bytes_left(self) -> int:
        """Bytes of the gradients that `step()` reads, all of which exist when backward ends."""
        return sum(row.gradient for row in self.rows) - self.gradient_bytes_avoided

    @property
    def bytes_per_parameter(self) -> float:
        """Weights, states and stored gradients per trained parameter."""
        trained = self.select("backward", "step")
        stored = sum(row.weight + row.states for row in trained) + self.gradient_bytes_left
        return stored / max(1, sum(row.numel for row in trained))

    @property
    def peak_bytes(self) -> int:
        """Expected peak of a step: weights, states, the gradients that are stored, and one update's workspace."""
        kept = sum(row.weight + row.states for row in self.rows)
        return kept + self.gradient_bytes_left + self.workspace

    @property
    def unfused_peak_bytes(self) -> int:
        """The same if every gradient were stored."""
        return sum(row.weight + row.states + row.gradient for row in self.rows)


def make_report(optimizer: FusedOptimizer, model: nn.Module | None) -> FusionReport:
    """Look at the optimizer, and at the model that `fuse` made it for; without one, at what has been used so far."""
    named: dict[Tensor, str] = {}
    if model is not None:
        named |= {parameter: name for name, parameter in model.named_parameters()}
    for binding in optimizer.bindings():
        named.setdefault(binding.weight, binding.name)
    reasons = _reasons(optimizer, model)
    rows = tuple(_row(optimizer, parameter, name, reasons) for parameter, name in named.items())
    return FusionReport(type(optimizer).__name__, rows, _workspace(rows, named))


def _reasons(optimizer: FusedOptimizer, model: nn.Module | None) -> dict[int, tuple[bool, str]]:
    """By a parameter's id: whether its layer is fused, and what it is or why its layer is not."""
    found: dict[int, tuple[bool, str]] = {}
    if model is None:
        return found
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (False, "bias" if name == "bias" else f"{type(module).__name__}"))
    for layer in examine(model, optimizer):
        weight = layer.module._parameters.get("weight")
        if weight is None:
            for name, part in layer.module._parameters.items():
                if part is not None and name != "bias":
                    found[id(part)] = (False, layer.obstacle or "")
        else:
            changed = isinstance(layer.module.__dict__.get("forward"), FusedForward)
            fused = changed and layer.obstacle in (None, HOOKED)
            reason = _kind(layer.module, optimizer) if layer.obstacle is None else layer.obstacle
            if fused and layer.obstacle is HOOKED:
                reason = f"{HOOKED}, and backward will raise"
            found[id(weight)] = (fused, reason if changed else layer.obstacle or _PLAIN)
    return found


def _kind(layer: nn.Linear, optimizer: FusedOptimizer) -> str:
    """What a fused layer's weight is, and why it is not in 8 bits where that was asked for."""
    if coded_layers.coder_of(layer) is not None:
        return "linear, weight in fp8"
    reason = coded_layers.unsuited(layer) if optimizer.weight_dtype is not None else None
    return "linear" if reason is None else f"linear, weight not in fp8: {reason}"


def _row(optimizer: FusedOptimizer, parameter: Tensor, name: str, reasons: dict[int, tuple[bool, str]]) -> Row:
    fused, reason = reasons.get(id(parameter), (False, "not yet used by a fused linear function"))
    known = optimizer.has(parameter)
    if not fused and known and optimizer.binding_of(parameter).inspected:
        fused, reason = True, "by its own fused linear function"
    route: Route
    if not parameter.requires_grad:
        route, reason = "frozen", "requires no gradient"
    elif not known:
        route, reason = "untrained", "in no param group"
    else:
        route = "backward" if fused else "step"
    size = gradient = parameter.numel() * parameter.element_size()
    kept = coded.find(parameter)
    if kept is not None:
        # What a gradient would take in the type that the layer computes with.
        size, gradient = size + kept.scales.nbytes, parameter.numel() * kept.dtype.itemsize
    return Row(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        route=route,
        reason=reason,
        numel=parameter.numel(),
        weight=size,
        states=_state_bytes(optimizer, parameter, route in ("backward", "step")) if known else 0,
        gradient=0 if route == "frozen" else gradient,
    )


def _state_bytes(optimizer: FusedOptimizer, parameter: Tensor, trained: bool) -> int:
    """Bytes of the states that the parameter has or, if it is `trained`, will have from its first update on."""
    held = optimizer.state.get(parameter, {})
    table = optimizer.binding_of(parameter).table
    total = 0
    for spec, present in zip(optimizer.rule.spec.states, table.arguments.select().present, strict=True):
        if present and spec.name in held:
            scales = held.get(registry.scale_key(spec.name))
            total += held[spec.name].nbytes + (0 if scales is None else scales.nbytes)
        elif present and trained:
            form = storage.format_of(optimizer.choice, spec, parameter)
            total += registry.bytes_of(registry.of_state(form, spec.nonnegative), parameter.shape)
    if parameter.dtype == torch.bfloat16 and (trained or registry.LOW_KEY in held):
        total += parameter.numel() * optimizer.choice.extra_bits // 8
    return total


def _workspace(rows: Iterable[Row], named: dict[Tensor, str]) -> int:
    """The largest fp32 band of gradient that an update may hold."""
    devices = {name: parameter.device.type for parameter, name in named.items()}
    bands = (
        min(row.numel, CPU_BAND if devices[row.name] == "cpu" else GPU_BAND) * 4
        for row in rows
        if row.route == "backward"
    )
    return max(bands, default=0)


def show(report: FusionReport, console: Console | None, details: bool) -> None:
    """Print the report as a table and three lines of totals."""
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, _LOGGED_WIDTH)  # of a log, where nothing says how wide it is
    console.print(_details(report) if details else _summary(report))
    trained = sum(row.numel for row in report.select("backward", "step"))
    inside = sum(row.numel for row in report.select("backward"))
    console.print(f"{inside:,} of {trained:,} trained parameters are updated inside backward.", highlight=False)
    console.print(
        f"Gradients avoided {amount(report.gradient_bytes_avoided)}, stored {amount(report.gradient_bytes_left)}; "
        f"{report.bytes_per_parameter:.3g} bytes per trained parameter.",
        highlight=False,
    )
    console.print(
        f"Expected peak without activations {amount(report.peak_bytes)}; with every gradient stored "
        f"{amount(report.unfused_peak_bytes)}.",
        highlight=False,
    )


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = index >= 2
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    return table


def _summary(report: FusionReport) -> Table:
    """A row per route and reason."""
    from rich.markup import escape

    table = _table(report.optimizer, "updated in", "what", "tensors", "numbers", "weights", "states", "gradients")
    for route, words in ROUTES.items():
        by_reason: dict[str, list[Row]] = {}
        for row in report.select(route):
            by_reason.setdefault(row.reason, []).append(row)
        for place, (reason, rows) in enumerate(by_reason.items()):
            names = rows[0].name + (f", {rows[1].name}" if len(rows) == 2 else ", ..." if len(rows) > 2 else "")
            what = escape(reason if route == "backward" or reason.startswith("tied") else f"{reason} ({names})")
            counts = [f"{len(rows):,}", f"{sum(row.numel for row in rows):,}"]
            gradients = "none" if route in ("backward", "frozen") else amount(sum(row.gradient for row in rows))
            sizes = [amount(sum(row.weight for row in rows)), amount(sum(row.states for row in rows)), gradients]
            table.add_row(words if place == 0 else "", what, *counts, *sizes)
    return table


def _details(report: FusionReport) -> Table:
    """A row per parameter."""
    from rich.markup import escape

    table = _table(report.optimizer, "parameter", "what", "updated in", "shape", "type", "weight", "states")
    for row in report.rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        numbers = [shape, row.dtype, amount(row.weight), amount(row.states)]
        table.add_row(escape(row.name), escape(row.reason), ROUTES[row.route], *numbers)
    return table


def amount(size: int) -> str:
    """Bytes in binary units."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
