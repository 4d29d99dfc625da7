"""Kinds: every value is a number or a condition, and a scalar of the step or a tensor (one value per coordinate)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge_dsl.analysis.builtins import BUILTINS
from forge_dsl.analysis.names import Names
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.language.syntax import Span


@dataclass(frozen=True, slots=True)
class Kind:
    """`boolean`: a condition rather than a number. `tensor`: differs from coordinate to coordinate."""

    boolean: bool = False
    tensor: bool = False

    def __str__(self) -> str:
        return "condition" if self.boolean else "number"


MAX_ELEMENTS = 16
NUMBER = Kind()
CONDITION = Kind(boolean=True)
TENSOR = Kind(tensor=True)


@dataclass(slots=True)
class Kinds:
    """Infers kinds and reports what does not fit. `values` holds the kinds of lets and locals, in the order of
    statements.
    """

    names: Names
    report: Report
    values: dict[str, Kind | None] = field(default_factory=dict)

    def number(self, expr: syntax.Expr, what: str) -> Kind | None:
        """The kind of `expr`, which must be a number; None if it has none, which is reported here or by another
        check.
        """
        kind = self.infer(expr)
        if kind is not None and kind.boolean:
            help_ = "write `1 if c else 0` to make a number of it"
            self.report.error("E0302", f"{what} is a number, and this is a condition", expr.span, help=help_)
            return None
        return kind

    def condition(self, expr: syntax.Expr, what: str) -> Kind | None:
        """The kind of `expr`, which must be a condition."""
        kind = self.infer(expr)
        if kind is not None and not kind.boolean:
            help_ = "compare it, as in `x != 0`"
            self.report.error("E0301", f"{what} is a condition, and this is a number", expr.span, help=help_)
            return None
        return kind

    def infer(self, expr: syntax.Expr) -> Kind | None:
        """The kind of `expr`."""
        match expr:
            case syntax.Number(value=value, text=text):
                if math.isinf(value) and text not in {"", "inf"}:
                    message = f"`{text}` is beyond the largest number, 1.8e308"
                    self.report.error(
                        "E0401", message, expr.span, help="infinity is written `inf`, and a default has none"
                    )
                return NUMBER
            case syntax.Boolean():
                return CONDITION
            case syntax.Name():
                return self._name(expr)
            case syntax.Unary(op="not", operand=operand):
                return self.condition(operand, "the operand of `not`")
            case syntax.Unary(op=op, operand=operand):
                return self.number(operand, f"the operand of `{op}`")
            case syntax.Binary():
                return self._binary(expr)
            case syntax.Compare(operands=operands):
                return self._compare(operands)
            case syntax.Logical(op=op, operands=operands):
                kinds = [self.condition(operand, f"an operand of `{op}`") for operand in operands]
                return _join(kinds, boolean=True)
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                return self._choice(condition, then, otherwise)
            case syntax.Call():
                return self._call(expr)
            case syntax.Tuple():
                help_ = "a tuple is the default of a hyper, and `let a, b = betas` takes it apart"
                self.report.error("E0306", "a tuple is not a value here", expr.span, help=help_)
                for item in expr.items:
                    self.infer(item)
                return None
            case _:
                return None

    def _name(self, name: syntax.Name) -> Kind | None:
        symbol = self.names.symbols.get(name.id)
        if symbol is None:
            return None
        if symbol.kind in {"let", "local"}:
            return self.values.get(name.id)
        if symbol.arity is not None and not 2 <= symbol.arity <= MAX_ELEMENTS:
            return None
        if symbol.arity is not None:
            help_ = f"take it apart with `let {_elements(name.id, symbol.arity)} = {name.id}`"
            self.report.error("E0306", f"`{name.id}` is a tuple of {symbol.arity}", name.span, help=help_)
            return None
        if symbol.kind == "flag":
            return CONDITION
        return TENSOR if symbol.kind in {"state", "grad", "weight"} else NUMBER

    def _binary(self, expr: syntax.Binary) -> Kind | None:
        kinds = [self.number(operand, f"an operand of `{expr.op}`") for operand in (expr.left, expr.right)]
        if expr.op == "//":
            help_ = "write `(a - a % b) / b`, for scalars"
            self.report.error("E0207", "there is no `//`", expr.span, help=help_)
            return None
        if expr.op == "%":
            for operand, kind in zip((expr.left, expr.right), kinds, strict=True):
                if kind is not None and kind.tensor:
                    message = "`%` takes scalars, and this differs from coordinate to coordinate"
                    self.report.error("E0303", message, operand.span, help="count in a `let`: `let k = step % 10`")
                    return None
        return None if expr.op == "@" else _join(kinds, boolean=False)

    def _compare(self, operands: Sequence[syntax.Expr]) -> Kind | None:
        kinds: list[Kind | None] = []
        for operand in operands:
            kind = self.infer(operand)
            if kind is not None and kind.boolean:
                help_ = "use the condition itself: `c`, or `not c`"
                self.report.error(
                    "E0302", "a comparison takes numbers, and this is a condition", operand.span, help=help_
                )
                kind = None
            kinds.append(kind)
        return _join(kinds, boolean=True)

    def _choice(self, condition: syntax.Expr, then: syntax.Expr, otherwise: syntax.Expr) -> Kind | None:
        chosen = self.condition(condition, "what stands after `if`")
        first, second = self.infer(then), self.infer(otherwise)
        if first is not None and second is not None and first.boolean != second.boolean:
            message = f"one branch is a {first}, the other a {second}"
            self.report.error("E0308", message, otherwise.span)
            return None
        return _join([chosen, first, second], boolean=bool(first and first.boolean))

    def _call(self, call: syntax.Call) -> Kind | None:
        builtin = BUILTINS.get(call.function)
        if builtin is None or call.keywords:
            for arg in call.args:
                self.infer(arg)
            return None
        if builtin.name == "first":
            return self._first(call)
        count = len(call.args)
        if not builtin.min_args <= count <= builtin.max_args:
            if builtin.name in {"min", "max"} and count == 1:
                self.infer(call.args[0])
                return None
            self._arity(call, count)
            return None
        if builtin.name == "where":
            return self._choice(*call.args)
        kinds = [self.number(arg, f"the argument of `{builtin.name}`") for arg in call.args]
        return _join(kinds, boolean=builtin.result == "boolean")

    def _arity(self, call: syntax.Call, count: int) -> None:
        builtin = BUILTINS[call.function]
        wanted = (
            str(builtin.min_args)
            if builtin.min_args == builtin.max_args
            else f"{builtin.min_args} to {builtin.max_args}"
        )
        message = f"`{call.function}` takes {wanted} argument{'s' if wanted != '1' else ''}, and here are {count}"
        self.report.error("E0304", message, call.span, help=f"write `{call.function}({builtin.signature})`")
        for arg in call.args:
            self.infer(arg)

    def _first(self, call: syntax.Call) -> Kind | None:
        arg = call.args[0] if len(call.args) == 1 else None
        if isinstance(arg, syntax.Name) and self.names.kind(arg.id) == "state":
            return CONDITION
        message = "`first` takes the name of a state: it is true until that state has once been written"
        self.report.error("E0311", message, call.span, help="as in `first(momentum_buffer)`")
        return CONDITION

    def define(self, name: str, kind: Kind | None, span: Span) -> None:
        """Notes the kind of a local; reports one that was a number and becomes a condition, or the reverse."""
        known = self.values.get(name)
        if known is not None and kind is not None and known.boolean != kind.boolean:
            message = f"`{name}` was a {known} and becomes a {kind}"
            self.report.error("E0308", message, span, help="use another name")
            kind = self.values[name] = None
        if name not in self.values or kind is not None:
            self.values[name] = kind


def _join(kinds: Sequence[Kind | None], boolean: bool) -> Kind | None:
    if any(kind is None for kind in kinds):
        return None
    return Kind(boolean, any(kind.tensor for kind in kinds if kind is not None))


def _elements(name: str, arity: int) -> str:
    stem = name[:-1] if name.endswith("s") and len(name) > 1 else name
    names = [f"{stem}{i + 1}" for i in range(min(arity, 4))]
    return ", ".join(names if arity <= 4 else [*names, "..."])
