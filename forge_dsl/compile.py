"""From the text of a spec to its programs, and from there to the files of an output folder. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from forge_dsl.analysis.check import check
from forge_dsl.analysis.checked import Checked
from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.facts import facts
from forge_dsl.ir import words
from forge_dsl.ir.cancellation import cancelling
from forge_dsl.ir.lower import lower
from forge_dsl.ir.names import Namer
from forge_dsl.ir.passes.dead import remove_dead
from forge_dsl.ir.passes.fast import hoist_factors, share_reciprocals
from forge_dsl.ir.passes.fold import fold
from forge_dsl.ir.passes.specialise import specialise
from forge_dsl.ir.program import Program, Slot
from forge_dsl.ir.table import Layout, layout, scalar_names
from forge_dsl.language import syntax
from forge_dsl.language.parser import parse
from forge_dsl.resources import templates_dir
from forge_dsl.spec import Spec
from forge_dsl.version import __version__

Mode = Literal["exact", "fast"]


@dataclass(frozen=True)
class Compiled:
    """One spec, all the way to its programs.

    exact, fast  the update of one coordinate in both arithmetics, for all variants at once
    table        the per-step scalars that either of them reads, in the order of the table
    spec         the facts that tools and the runtime read
    warnings     diagnostics that do not stop compilation
    """

    checked: Checked
    stem: str
    digest: str
    layout: Layout
    exact: Program
    fast: Program
    table: tuple[Slot, ...]
    spec: Spec
    warnings: tuple[Diagnostic, ...]

    def program(self, variant: Sequence[bool], mode: Mode) -> Program:
        """The program of one variant, a bool per `spec.switches`, with nothing in it that the variant does not need."""
        names = [switch.name for switch in self.spec.switches]
        known = dict(zip(names, variant, strict=True))
        missing = {s.name for s in self.checked.states if s.when is not None and not self.holds(s.when, known)}
        whole = self.exact if mode == "exact" else self.fast
        return remove_dead(fold(specialise(whole, known, frozenset(missing))))

    def holds(self, condition: syntax.Expr, variant: dict[str, bool]) -> bool:
        """Whether a condition over switches is true in a variant."""
        if condition in self.layout.switches:
            return variant[self.layout.switches[condition]]
        match condition:
            case syntax.Unary(op="not", operand=operand):
                return not self.holds(operand, variant)
            case syntax.Logical(op="and", operands=operands):
                return all(self.holds(operand, variant) for operand in operands)
            case syntax.Logical(op="or", operands=operands):
                return any(self.holds(operand, variant) for operand in operands)
        raise AssertionError("a checked `when` is a condition over switches")


def compile_source(text: str, filename: str = "<string>", stem: str | None = None) -> Compiled:
    """Parse, check, lower and optimise one spec. Raises DiagnosticError with everything that is wrong with it.

    `stem` prefixes the generated functions; it is the file's name without `.opt` unless given.
    """
    tree = parse(text, filename)
    checked, warnings = check(tree, text, filename)
    stem = stem if stem is not None else stem_of(filename, tree.name)
    _check_class_name(tree, stem, text, filename)
    plan = layout(checked, words.BESIDE_SWITCHES | words.functions(stem))
    exact = remove_dead(fold(lower(checked, plan)))
    taken = {slot.name for slot in plan.slots.values()} | set(plan.switches.values())
    namer = Namer(taken | plan.tensors | scalar_names(checked) | words.UPDATE)
    fast = remove_dead(fold(share_reciprocals(hoist_factors(exact, namer))))
    table = tuple({slot.name: slot for slot in (*plan.slots.values(), *fast.slots)}.values())
    fingerprint = digest(text)
    precise = cancelling(exact, frozenset(state.name for state in checked.states))
    spec = facts(checked, plan, table, stem, fingerprint, precise)
    return Compiled(checked, stem, fingerprint, plan, exact, fast, table, spec, warnings)


def _check_class_name(tree: syntax.Spec, stem: str, text: str, filename: str) -> None:
    taken = words.MODULE | words.functions(stem)
    for name in (tree.name, f"{tree.name}Linear"):
        if name in taken:
            message = f"an optimizer cannot be called `{tree.name}`: its module has another `{name}`"
            found = Diagnostic("E0203", "error", message, tree.name_span, help=f"call it `My{tree.name}`")
            raise DiagnosticError([found], text, filename)


def stem_of(filename: str, name: str) -> str:
    """`optimizers/adamw.opt` -> `adamw`; a spec without a file is called after its optimizer."""
    path = Path(filename)
    return path.stem if path.suffix == ".opt" else name.lower()


def digest(text: str) -> str:
    """A fingerprint of everything that decides the output: the spec, the templates, the generator's version."""
    total = hashlib.sha256()
    for part in (text, _templates_text(), __version__):
        total.update(part.encode())
        total.update(b"\0")
    return total.hexdigest()[:16]


@lru_cache(maxsize=1)
def _templates_text() -> str:
    files = sorted(templates_dir().glob("*.j2"))
    return "\0".join(f"{file.name}\0{file.read_text(encoding='utf-8')}" for file in files)
