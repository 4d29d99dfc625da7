"""The per-step table: which scalar expressions of `update:` meet a tensor, under which name.

This is the definition of the language, shared by the reference and the kernels: a maximal subexpression without a
coordinate is evaluated in float64 and rounded to fp32 once, where it meets a tensor.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.fold import evaluate
from forge_dsl.ir.names import Namer, phrase, switch_phrase
from forge_dsl.ir.program import Slot
from forge_dsl.language import syntax
from forge_dsl.language.syntax import walk


@dataclass(frozen=True)
class Layout:
    """What an expression of `update:` may refer to, with the names used in generated code.

    tensors   names that have a coordinate
    booleans  scalar names that are true or false: flags, and lets of conditions
    slots     maximal scalar expressions -> table entry, in order of first appearance
    switches  atoms that select a variant -> name
    """

    tensors: frozenset[str]
    booleans: frozenset[str]
    slots: dict[syntax.Expr, Slot]
    switches: dict[syntax.Expr, str]

    def is_tensor(self, expr: syntax.Expr) -> bool:
        """Whether any part of `expr` has a coordinate."""
        return any(isinstance(node, syntax.Name) and node.id in self.tensors for node in _values(expr))

    def is_constant(self, expr: syntax.Expr) -> bool:
        """Whether `expr` is made of literals only."""
        return not any(isinstance(node, syntax.Name) for node in _values(expr)) and not is_first(expr)

    def branches(self, condition: syntax.Expr, then: syntax.Expr, otherwise: syntax.Expr) -> tuple[syntax.Expr, ...]:
        """The sides of a choice that can be taken: one of them where the condition is made of literals."""
        if self.is_constant(condition):
            return (then if evaluate(condition, {}) else otherwise,)
        return then, otherwise

    def is_switch(self, condition: syntax.Expr) -> bool:
        """Whether `condition` is an and/or/not of switch atoms, so that a compiled variant knows it."""
        if condition in self.switches:
            return True
        match condition:
            case syntax.Unary(op="not", operand=operand):
                return self.is_switch(operand)
            case syntax.Logical(operands=operands):
                return all(map(self.is_switch, operands))
        return False


def is_first(expr: syntax.Expr) -> bool:
    """Whether a `first(state)` occurs in `expr`; its argument is a name, not a read of the state."""
    return any(isinstance(node, syntax.Call) and node.function == "first" for node in walk(expr))


def _values(expr: syntax.Expr) -> list[syntax.Node]:
    """All nodes whose value `expr` reads: everything but the argument of `first(...)`."""
    found: list[syntax.Node] = []
    stack: list[syntax.Node] = [expr]
    while stack:
        node = stack.pop()
        found.append(node)
        if not (isinstance(node, syntax.Call) and node.function == "first"):
            stack.extend(syntax.children(node))
    return found


def tensor_names(checked: Checked) -> set[str]:
    """Names that have a coordinate: the gradient, the weight, states and locals."""
    return {"grad", "weight"} | {state.name for state in checked.states} | {assign.name for assign in checked.update}


def scalar_names(checked: Checked) -> set[str]:
    """Names without a coordinate: hypers, flags, recurrent scalars, lets, `step`, and `first_x` for `first(x)`."""
    names = {name for let in checked.scalar_program if isinstance(let, syntax.Let) for name in let.names}
    names |= {hyper.name for hyper in checked.hypers} | {name for name, _ in (*checked.flags, *checked.scalars)}
    return names | {"step"} | {f"first_{name}" for name in checked.first}


def layout(checked: Checked, taken: Set[str]) -> Layout:
    """Find the table entries and switches of a checked spec; `taken` is what neither may be called."""
    tensors = tensor_names(checked)
    namer = Namer(tensors | scalar_names(checked) | taken)
    switches = {atom: _switch_name(atom, taken, namer) for atom in checked.switches}
    found = Layout(frozenset(tensors), _booleans(checked), {}, switches)
    for assign in checked.update:
        _collect(assign.value, found, namer)
    if not found.slots:
        # A tuple of no scalars is nothing that a kernel could take apart.
        one = syntax.Number(1.0, "1")
        found.slots[one] = Slot(namer.fresh("one"), one)
    return found


def _switch_name(atom: syntax.Expr, taken: Set[str], namer: Namer) -> str:
    if isinstance(atom, syntax.Name) and atom.id not in taken:
        return atom.id
    return namer.fresh(switch_phrase(atom), "switch")


def _collect(expr: syntax.Expr, found: Layout, namer: Namer) -> None:
    if not found.is_tensor(expr):
        if not found.is_constant(expr) and expr not in found.slots:
            boolean = is_boolean(expr, found.booleans)
            found.slots[expr] = Slot(_slot_name(expr, found, namer), expr, boolean)
        return
    match expr:
        case (
            syntax.Conditional(then=then, condition=condition, otherwise=otherwise)
            | syntax.Call(function="where", args=(condition, then, otherwise))
        ) if found.is_switch(condition) or found.is_constant(condition):
            for branch in found.branches(condition, then, otherwise):
                _collect(branch, found, namer)
        case _:
            for child in syntax.children(expr):
                _collect(child, found, namer)  # type: ignore[arg-type]  # children of an expression are expressions


def _slot_name(expr: syntax.Expr, found: Layout, namer: Namer) -> str:
    match expr:
        case syntax.Name(id=name) if expr in found.switches:
            # The same flag as a number: its own name stands for the compile-time switch.
            return namer.fresh(f"is_{name}")
        case syntax.Name(id=name):
            return name
        case syntax.Call(function="first", args=(syntax.Name(id=name),)):
            return f"first_{name}"
    return namer.fresh(phrase(expr))


def _booleans(checked: Checked) -> frozenset[str]:
    known = {name for name, _ in checked.flags}
    for statement in checked.scalar_program:
        if (
            isinstance(statement, syntax.Let)
            and len(statement.names) == 1
            and is_boolean(statement.value, frozenset(known))
        ):
            known.add(statement.names[0])
    return frozenset(known)


def is_boolean(expr: syntax.Expr, booleans: frozenset[str]) -> bool:
    """Whether a checked scalar expression is a condition; `booleans` are the names that are."""
    match expr:
        case syntax.Boolean() | syntax.Compare() | syntax.Logical() | syntax.Unary(op="not"):
            return True
        case syntax.Name(id=name):
            return name in booleans
        case syntax.Call(function="first" | "isfinite"):
            return True
        case syntax.Conditional(then=then) | syntax.Call(function="where", args=(_, then, _)):
            return is_boolean(then, booleans)
    return False
