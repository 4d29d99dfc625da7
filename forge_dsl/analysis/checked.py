"""The typed tree: what remains of a spec once every check has passed. Lowering and the reference printer start here."""

from __future__ import annotations

from dataclasses import dataclass

from forge_dsl.language import syntax
from forge_dsl.spec import Range


@dataclass(frozen=True, slots=True)
class CheckedHyper:
    """A hyper with its folded default and one range per element (None: any finite number)."""

    name: str
    default: float | tuple[float, ...]
    ranges: tuple[Range | None, ...]


@dataclass(frozen=True, slots=True)
class CheckedState:
    """A state. `initial` is None for zeros, else an expression over hypers, numbers and `weight`."""

    name: str
    initial: syntax.Expr | None
    domain: Range | None
    when: syntax.Expr | None


@dataclass(frozen=True, slots=True)
class Checked:
    """A spec that passed every check.

    `scalar_program` holds the `let`s and the assignments to recurrent scalars in source order: later ones see earlier
    ones. `switches` are the atoms that select a compiled variant: each flag (a `Name`), then each comparison of
    hypers that some `when` uses (a `Compare`), in order of first appearance and without structural duplicates.
    `first` lists the states on which `first(...)` is called; `uses_step` is whether anything reads `step`.
    """

    tree: syntax.Spec
    source: str
    filename: str
    hypers: tuple[CheckedHyper, ...]
    flags: tuple[tuple[str, bool], ...]
    states: tuple[CheckedState, ...]
    scalars: tuple[tuple[str, float], ...]
    scalar_program: tuple[syntax.Let | syntax.Assign, ...]
    requires: tuple[syntax.Require, ...]
    update: tuple[syntax.Assign, ...]
    switches: tuple[syntax.Expr, ...]
    first: tuple[str, ...]
    uses_step: bool
