"""Switches: the conditions known before a step begins. Each combination of their values is one compiled variant.

A set of variants is an int with one bit per combination: bit `v` stands for the variant in which switch `i` holds if
and only if bit `i` of `v` is set. So questions about all variants at once are bitwise operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_dsl.analysis.fold import NotConstant, fold_scalar
from forge_dsl.analysis.kinds import Kinds
from forge_dsl.analysis.names import WHEN, Names, resolve
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.language.source import MAX_SWITCHES


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of a spec, in order: flags (`Name`), then comparisons of hypers (`Compare`)."""

    atoms: tuple[syntax.Expr, ...]

    @property
    def everywhere(self) -> int:
        """The set of all variants."""
        return (1 << (1 << len(self.atoms))) - 1

    def where(self, condition: syntax.Expr | None) -> int | None:
        """The variants in which `condition` holds; None if it is not made of switches alone."""
        if condition is None:
            return self.everywhere
        match condition:
            case syntax.Name() | syntax.Compare():
                return self._atom(self.atoms.index(condition)) if condition in self.atoms else None
            case syntax.Unary(op="not", operand=operand):
                inner = self.where(operand)
                return None if inner is None else self.everywhere & ~inner
            case syntax.Logical(op=op, operands=operands):
                result = self.everywhere if op == "and" else 0
                for operand in operands:
                    inner = self.where(operand)
                    if inner is None:
                        return None
                    result = result & inner if op == "and" else result | inner
                return result
            case _:
                return None

    def _atom(self, index: int) -> int:
        """The truth table's column: blocks of 2**index zeros and ones, alternating."""
        block = 1 << index
        ones = ((1 << block) - 1) << block
        result = 0
        for start in range(0, 1 << len(self.atoms), 2 * block):
            result |= ones << start
        return result

    def describe(self, variants: int) -> str:
        """Words for a non-empty set of variants: " when `amsgrad` is false", or nothing for all of them."""
        if variants == self.everywhere:
            return ""
        facts = []
        for index, atom in enumerate(self.atoms):
            holds = self._atom(index)
            if variants & ~holds == 0:
                facts.append(_fact(atom, True))
            elif variants & holds == 0:
                facts.append(_fact(atom, False))
        if facts:
            return " when " + " and ".join(facts)
        for index, atom in enumerate(self.atoms):
            holds = self._atom(index)
            for truth, where in ((True, holds), (False, self.everywhere & ~holds)):
                if where & ~variants == 0:
                    return f", for instance when {_fact(atom, truth)}"
        one = (variants & -variants).bit_length() - 1
        facts = [_fact(atom, bool(one >> index & 1)) for index, atom in enumerate(self.atoms)]
        return f", for instance when {' and '.join(facts)}"


def _fact(atom: syntax.Expr, truth: bool) -> str:
    """`amsgrad` is false, or `momentum != 0` holds."""
    if isinstance(atom, syntax.Compare):
        return f"`{format_expr(atom)}` {'holds' if truth else 'does not hold'}"
    return f"`{format_expr(atom)}` is {'true' if truth else 'false'}"


def collect(tree: syntax.Spec, names: Names, kinds: Kinds, report: Report) -> Switches:
    """The switches of a spec. Reports a `when` that is not made of them, and too many."""
    flags = [d for d in tree.declarations if isinstance(d, syntax.Flag)]
    atoms: list[syntax.Expr] = []
    for flag in flags:
        atom: syntax.Expr = syntax.Name(flag.name, span=flag.name_span)
        if atom not in atoms:
            atoms.append(atom)
    for condition, help_ in _conditions(tree, names):
        resolve(condition, WHEN, names, report, help=help_)
        for atom in _atoms(condition, names, report):
            if atom not in atoms:
                kinds.infer(atom)
                atoms.append(atom)
    if len(atoms) > MAX_SWITCHES:
        message = f"this spec has {len(atoms)} switches (flags, comparisons in a `when`); {MAX_SWITCHES} are the limit"
        report.error("E0005", message, atoms[MAX_SWITCHES].span, "each combination of them is a kernel of its own")
        atoms = atoms[:MAX_SWITCHES]
    return Switches(tuple(atoms))


def _conditions(tree: syntax.Spec, names: Names) -> Iterator[tuple[syntax.Expr, str | None]]:
    """Every `when` that selects a variant, those of states and those in the body, with what to write instead if the
    choice can be made during a step only.
    """
    for declaration in tree.declarations:
        if isinstance(declaration, syntax.State) and declaration.when is not None:
            yield declaration.when, None
    known = {name for name, symbol in names.symbols.items() if symbol.kind in {"state", "weight"}}
    for statement in tree.update:
        if isinstance(statement, syntax.Assign):
            if statement.when is not None:
                kept = statement.name if statement.name in known else "..."
                condition = format_expr(statement.when)
                help_ = f"write `{statement.name} = ... if {condition} else {kept}`"
                yield statement.when, help_ if len(help_) < 100 else "any other choice is written `a if c else b`"
            known.add(statement.name)


def _atoms(condition: syntax.Expr, names: Names, report: Report) -> Iterator[syntax.Expr]:
    """The switches in a condition; reports whatever else is in it."""
    match condition:
        case syntax.Unary(op="not", operand=operand):
            yield from _atoms(operand, names, report)
        case syntax.Logical(operands=operands):
            for operand in operands:
                yield from _atoms(operand, names, report)
        case syntax.Name(id=name) if names.kind(name) in {"flag", None}:
            pass
        case syntax.Name(id=name) if names.kind(name) == "hyper":
            help_ = f"compare it: `when {name} != 0`"
            report.error("E0301", f"`{name}` is a number, and `when` takes a condition", condition.span, help=help_)
        case syntax.Compare() if _is_switch(condition, names):
            yield condition
        case syntax.Name():
            pass
        case _:
            message = "`when` is made of flags and of comparisons of hypers with numbers, joined by and, or, not"
            note = "it picks the compiled variant before a step begins"
            report.error("E0310", message, condition.span, note, help="any other choice is written `a if c else b`")


def _is_switch(compare: syntax.Compare, names: Names) -> bool:
    """Whether every operand is a hyper or a constant, and at least one a hyper. Unknown names are another check's
    matter.
    """
    hypers = 0
    for operand in compare.operands:
        if isinstance(operand, syntax.Name):
            hypers += 1
            continue
        try:
            fold_scalar(operand, {})
        except NotConstant:
            return False
    return hypers > 0
