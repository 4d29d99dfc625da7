"""What `forge-gen explain` tells about a rule: why it may be fused, and what it stores, moves and computes.

Everything is counted from the compiled programs, per coordinate, for the default variant and for each switch turned
from its default. The limit is a roofline with the rates that an NVIDIA H200 sustains: a bf16 matrix product at 790
TFLOP/s and device memory at 4.3 TB/s. For T tokens and a weight of O x I parameters, it is
L = max(2 T O I / 790e12, bytes / 4.3e12), where bytes counts the weight and the states, read and written once, and not
the operands X and dY.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from forge_dsl.compile import Compiled, Mode
    from forge_dsl.ir.program import Program

MATRIX_RATE = 790e12  # bf16 operations a second
MEMORY_RATE = 4.3e12  # bytes a second
BYTES = {"fp32": 4, "bf16": 2}
TOKENS = (512, 2048, 8192)
SIDE = 4096
_FREE = frozenset({"input", "slot", "const"})


@dataclass(frozen=True)
class Cost:
    """Bytes per parameter with weight and states in these formats.

    stored           weight and states
    stored_unfused   the same and a gradient in the weight's format
    moved            what one fused step reads and writes
    moved_unfused    the same, and the gradient written once and read once
    crossover        tokens from which a fused step of a bf16 weight is bound by the matrix product, not by memory
    limit_ms         milliseconds that a step of a bf16 weight [4096, 4096] takes at least, for each count in `TOKENS`
    """

    weight: str
    states: str
    stored: int
    stored_unfused: int
    moved: int
    moved_unfused: int
    crossover: int | None
    limit_ms: tuple[float, ...] | None


@dataclass(frozen=True)
class Variant:
    """One compiled variant: its states, its operations per coordinate by arithmetic, its bytes."""

    label: str
    switches: dict[str, bool]
    states: tuple[str, ...]
    operations: dict[str, dict[str, int]]
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Scalar:
    """A number of the step: computed once in float64 and rounded to fp32. `arithmetic` says which kernels read it."""

    name: str
    formula: str
    arithmetic: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """All that `forge-gen explain` shows of one spec. The first variant is the default one."""

    name: str
    title: str
    certificate: str
    scalars: tuple[Scalar, ...]
    definitions: tuple[str, ...]
    variants: tuple[Variant, ...]


def explain_spec(compiled: Compiled) -> Explanation:
    """Count what a compiled spec costs."""
    from forge_dsl.analysis.separability import certificate

    default = default_variant(compiled)
    variants = [_variant(compiled, "default", default)]
    for index, switch in enumerate(compiled.spec.switches):
        turned = tuple(value != (position == index) for position, value in enumerate(default))
        label = switch.text if turned[index] else f"not {switch.text}"
        variants.append(_variant(compiled, label, turned))
    return Explanation(
        name=compiled.spec.name,
        title=compiled.spec.title,
        certificate=str(certificate(compiled.checked)),
        scalars=_scalars(compiled, default),
        definitions=tuple(_definition(item) for item in compiled.checked.scalar_program),
        variants=tuple(variants),
    )


def default_variant(compiled: Compiled) -> tuple[bool, ...]:
    """The truth of every switch with all hypers and flags at their defaults."""
    from forge_dsl.analysis.fold import fold_scalar

    env: dict[str, float | bool] = dict(compiled.checked.flags)
    env |= {hyper.name: hyper.default for hyper in compiled.checked.hypers if not isinstance(hyper.default, tuple)}
    return tuple(bool(fold_scalar(atom, env)) for atom in compiled.layout.switches)


def _variant(compiled: Compiled, label: str, switches: Sequence[bool]) -> Variant:
    spec = compiled.spec
    known = dict(zip((switch.name for switch in spec.switches), switches, strict=True))
    states = tuple(s.name for s in compiled.checked.states if s.when is None or compiled.holds(s.when, known))
    modes: tuple[Mode, ...] = ("fast", "exact")
    programs = {mode: compiled.program(switches, mode) for mode in modes}
    operations: dict[str, dict[str, int]] = {mode: _operations(program) for mode, program in programs.items()}
    costs = tuple(_cost(programs["exact"], states, weight, state) for weight in BYTES for state in BYTES)
    return Variant(label, known, states, operations, costs)


def _operations(program: Program) -> dict[str, int]:
    """Operations of one coordinate by kind, the most frequent first."""
    return dict(Counter(op.code for op in program.ops if op.code not in _FREE).most_common())


def _cost(program: Program, states: Sequence[str], weight: str, state: str) -> Cost:
    weight_bytes, state_bytes = BYTES[weight], BYTES[state]
    touched = [*program.inputs, *(output.name for output in program.outputs)]
    moved = weight_bytes * touched.count("weight") + state_bytes * sum(map(touched.count, states))
    stored = weight_bytes + state_bytes * len(states)
    bf16 = weight == "bf16"
    return Cost(
        weight,
        state,
        stored,
        stored + weight_bytes,
        moved,
        moved + 2 * weight_bytes,
        round(moved / 2 * MATRIX_RATE / MEMORY_RATE) if bf16 else None,
        tuple(1e3 * limit(moved, tokens, SIDE, SIDE) for tokens in TOKENS) if bf16 else None,
    )


def limit(moved: float, tokens: int, out: int, into: int) -> float:
    """Seconds that a fused step of a weight `[out, into]` with 16-bit operands takes at least.

    moved: bytes per parameter, weight and states together, read and written.
    """
    return out * into * max(2 * tokens / MATRIX_RATE, moved / MEMORY_RATE)


def _scalars(compiled: Compiled, default: Sequence[bool]) -> tuple[Scalar, ...]:
    modes: tuple[Mode, ...] = ("fast", "exact")
    readers = {mode: {slot.name for slot in compiled.program(default, mode).slots} for mode in modes}
    found = []
    for slot in compiled.table:
        arithmetic = tuple(mode for mode in modes if slot.name in readers[mode])
        if arithmetic:
            found.append(Scalar(slot.name, format_expr(slot.expr), arithmetic))
    return tuple(found)


def _definition(item: syntax.Let | syntax.Assign) -> str:
    names = ", ".join(item.names) if isinstance(item, syntax.Let) else item.name
    return f"{names} = {format_expr(item.value)}"


def to_json(facts: Explanation) -> dict[str, Any]:
    """The same for programs; `limit_tokens` and `limit_weight` say what `limit_ms` is for."""
    rates = {"matrix_rate": MATRIX_RATE, "memory_rate": MEMORY_RATE}
    return {**dataclasses.asdict(facts), **rates, "limit_tokens": list(TOKENS), "limit_weight": [SIDE, SIDE]}


# ------------------------------------------------------------------ for people


def render(facts: Explanation) -> None:
    """Print it: with rich on a terminal, plain elsewhere."""
    from io import StringIO

    from rich.console import Console

    from forge_dsl.report import colourful

    if colourful(sys.stdout):
        _show(facts, Console(highlight=False, emoji=False, markup=False))
        return
    text = StringIO()
    _show(facts, Console(file=text, width=160, highlight=False, emoji=False, markup=False))
    for line in text.getvalue().splitlines():
        print(line.rstrip())


def _show(facts: Explanation, console: Console) -> None:
    console.print(facts.name, style="bold")
    console.print(facts.title)
    _section(console, "Why it may be fused")
    console.print(facts.certificate, soft_wrap=True)
    _section(console, "Once per step, in float64")
    for line in facts.definitions:
        console.print(line, soft_wrap=True)
    _print_scalars(console, facts.scalars)
    _section(console, "Operations per coordinate")
    _print_operations(console, facts.variants)
    distinct = {variant.states: variant for variant in reversed(facts.variants)}
    for states, variant in sorted(distinct.items(), key=lambda item: facts.variants.index(item[1])):
        _section(console, f"Bytes per parameter, {variant.label}: states {', '.join(states) or 'none'}")
        _print_costs(console, variant)
    _section(console, "No step can be faster (bf16 weight, NVIDIA H200: 790 TFLOP/s, 4.3 TB/s), default")
    _print_limits(console, facts.variants[0])


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(title, style="bold cyan", soft_wrap=True)


def _formats(variant: Variant) -> list[Cost]:
    """The costs to show: without states their format makes no difference."""
    return [cost for cost in variant.costs if variant.states or cost.states == cost.weight]


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _print_scalars(console: Console, scalars: Sequence[Scalar]) -> None:
    table = _table("in the table", "formula", "read by")
    table.columns[1].justify = table.columns[2].justify = "left"
    for scalar in scalars:
        table.add_row(scalar.name, scalar.formula, ", ".join(scalar.arithmetic))
    console.print(table)


def _print_operations(console: Console, variants: Sequence[Variant]) -> None:
    table = _table("variant", "arithmetic", "total", "by kind")
    table.columns[3].justify = "left"
    for variant in variants:
        for mode, counts in variant.operations.items():
            kinds = ", ".join(f"{count} {code}" for code, count in counts.items())
            table.add_row(variant.label if mode == "fast" else "", mode, str(sum(counts.values())), kinds)
    console.print(table)


def _print_costs(console: Console, variant: Variant) -> None:
    table = _table("weight, states", "stored", "unfused", "moved per step", "unfused")
    for cost in _formats(variant):
        label = f"{cost.weight}, {cost.states}" if variant.states else cost.weight
        numbers = (cost.stored, cost.stored_unfused, cost.moved, cost.moved_unfused)
        table.add_row(label, *map(str, numbers))
    console.print(table)


def _print_limits(console: Console, variant: Variant) -> None:
    table = _table("states", *(f"{SIDE} x {SIDE}, {tokens} tokens" for tokens in TOKENS), "matrix-bound from")
    for cost in _formats(variant):
        if cost.limit_ms is not None:
            label = cost.states if variant.states else "none"
            table.add_row(label, *(f"{ms:.3f} ms" for ms in cost.limit_ms), f"{cost.crossover} tokens")
    console.print(table)
