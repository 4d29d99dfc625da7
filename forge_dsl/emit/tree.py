"""Printing checked expressions for targets in float64: Python on the host, Triton on the device.

Only the walk lives here; each target overrides what it spells differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forge_dsl.analysis.fold import evaluate
from forge_dsl.emit import text
from forge_dsl.emit.text import Text
from forge_dsl.language import syntax


class TreePrinter:
    """Walks an expression; subclasses spell names, numbers, functions and choices."""

    def text(self, expr: syntax.Expr) -> Text:
        """The target's text of `expr`."""
        match expr:
            case syntax.Number(value=value):
                return self.number(value)
            case syntax.Boolean(value=truth):
                return Text(str(truth))
            case syntax.Name(id=name):
                return self.name(name)
            case syntax.Unary(op="-", operand=operand):
                return text.negate(self.text(operand))
            case syntax.Unary(op="+", operand=operand):
                return self.text(operand)
            case syntax.Unary(op="not", operand=operand):
                return self.negation(operand)
            case syntax.Binary(op="**", left=left, right=right):
                return self.power(left, right)
            case syntax.Binary(op=op, left=left, right=right):
                return self.arithmetic(op, left, right)
            case syntax.Compare(operands=operands, ops=ops):
                pairs = zip(ops, operands, operands[1:], strict=False)
                parts = [text.compare(op, self.text(left), self.text(right)) for op, left, right in pairs]
                return parts[0] if len(parts) == 1 else self.logical("and", parts)
            case syntax.Logical(op=op, operands=operands):
                return self.logical(op, [self.text(operand) for operand in operands])
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                return self.conditional(then, condition, otherwise)
            case syntax.Call(function="where", args=(condition, then, otherwise)):
                return self.conditional(then, condition, otherwise)
            case syntax.Call(function=function, args=args):
                return self.call(function, args)
        raise AssertionError(f"a checked spec holds no {type(expr).__name__}")

    def name(self, name: str) -> Text:
        """A variable."""
        return Text(name)

    def number(self, value: float) -> Text:
        """A literal."""
        return text.number(value, whole=True)

    def arithmetic(self, op: str, left: syntax.Expr, right: syntax.Expr) -> Text:
        """`left op right`."""
        return text.binary(op, self.text(left), self.text(right))

    def power(self, base: syntax.Expr, exponent: syntax.Expr) -> Text:
        """`base ** exponent`."""
        return text.power(self.text(base), self.text(exponent))

    def negation(self, operand: syntax.Expr) -> Text:
        """`not operand`."""
        return text.logical_not(self.text(operand))

    def logical(self, op: str, operands: list[Text]) -> Text:
        """`and` or `or` of several."""
        return text.join(op, operands)

    def conditional(self, then: syntax.Expr, condition: syntax.Expr, otherwise: syntax.Expr) -> Text:
        """`then if condition else otherwise`."""
        return text.ternary(self.text(then), self.text(condition), self.text(otherwise))

    def call(self, function: str, args: tuple[syntax.Expr, ...]) -> Text:
        """A built-in."""
        return text.call(function, *(self.text(arg) for arg in args))


def is_literal(expr: syntax.Expr) -> bool:
    """Whether `expr` is made of literals only."""
    return not any(isinstance(node, syntax.Name) for node in syntax.walk(expr))


class _FoldingPrinter(TreePrinter):
    """Folds literals, which a target's own compiler would refuse (`1 / 0`) or fold in the wrong precision."""

    def text(self, expr: syntax.Expr) -> Text:
        if not isinstance(expr, syntax.Number | syntax.Boolean) and is_literal(expr):
            value = evaluate(expr, {})
            return Text(str(value)) if isinstance(value, bool) else self.number(value)
        if isinstance(expr, syntax.Call) and expr.function == "first":
            return self.name(f"first_{expr.args[0].id}")  # type: ignore[union-attr]  # checked: a state's name
        return super().text(expr)


class HostScalars(_FoldingPrinter):
    """Python on `ieee.Real` numbers.

    An operator follows IEEE 754 if one of its operands is a Real. Python's own raises where the language has inf or
    NaN, and its integers grow without end. So where neither is one, the left operand is made one. `plain` holds the
    variables that are not; `uses_ieee` tells whether anything of `ieee` was called.
    """

    def __init__(self, plain: Iterable[str] = ()) -> None:
        self.plain = set(plain)
        self.uses_ieee = False

    def is_plain(self, expr: syntax.Expr) -> bool:
        """Whether the value of a real expression may be one of Python's own numbers."""
        match expr:
            case syntax.Name(id=name):
                return name in self.plain
            case syntax.Unary(operand=operand):
                return self.is_plain(operand)
            case (
                syntax.Conditional(then=then, otherwise=otherwise)
                | syntax.Call(function="where", args=(_, then, otherwise))
            ):
                return self.is_plain(then) or self.is_plain(otherwise)
        return is_literal(expr)

    def helper(self, function: str, *args: Text) -> Text:
        """A call of something in `ieee`."""
        self.uses_ieee = True
        return text.call(f"ieee.{function}", *args)

    def _left(self, left: syntax.Expr, right: syntax.Expr) -> Text:
        printed = self.text(left)
        return self.helper("Real", printed) if self.is_plain(left) and self.is_plain(right) else printed

    def arithmetic(self, op: str, left: syntax.Expr, right: syntax.Expr) -> Text:
        return text.binary(op, self._left(left, right), self.text(right))

    def power(self, base: syntax.Expr, exponent: syntax.Expr) -> Text:
        return text.power(self._left(base, exponent), self.text(exponent))

    def call(self, function: str, args: tuple[syntax.Expr, ...]) -> Text:
        name = {"min": "minimum", "max": "maximum"}.get(function, function)
        return self.helper(name, *(self.text(arg) for arg in args))


class DeviceScalars(_FoldingPrinter):
    """Triton on float64 scalars; every name is a float64 (or boolean) value of the kernel, by way of `variables`."""

    _DIRECT = frozenset({"sqrt", "exp", "log", "abs"})

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def name(self, name: str) -> Text:
        return Text(self.variables[name])

    def helper(self, name: str, *args: Text) -> Text:
        """A call of a function of `device_math`."""
        return text.call(f"device_math.{name}", *args)

    def number(self, value: float) -> Text:
        return text.number(value)

    def value(self, expr: syntax.Expr) -> Text:
        """`expr` where no float64 operand stands beside it: there a bare literal would become fp32."""
        printed = self.text(expr)
        if is_literal(expr) and not isinstance(evaluate(expr, {}), bool):
            return text.call("tl.full", "()", printed, "tl.float64")
        return printed

    def arithmetic(self, op: str, left: syntax.Expr, right: syntax.Expr) -> Text:
        if op == "%":
            return self.helper("remainder64", self.value(left), self.value(right))
        return super().arithmetic(op, left, right)

    def power(self, base: syntax.Expr, exponent: syntax.Expr) -> Text:
        return self.helper("power64", self.value(base), self.value(exponent))

    def negation(self, operand: syntax.Expr) -> Text:
        return text.compare("==", self.text(operand), Text("0"))

    def logical(self, op: str, operands: list[Text]) -> Text:
        total = operands[0]
        for operand in operands[1:]:
            total = text.binary("&" if op == "and" else "|", total, operand)
        return total

    def conditional(self, then: syntax.Expr, condition: syntax.Expr, otherwise: syntax.Expr) -> Text:
        return text.call("tl.where", self.text(condition), self.value(then), self.value(otherwise))

    def call(self, function: str, args: tuple[syntax.Expr, ...]) -> Text:
        values = [self.value(arg) for arg in args]
        if function in {"min", "max"}:
            total = values[0]
            for value in values[1:]:
                total = self.helper(f"{function}imum64", total, value)
            return total
        if function in self._DIRECT:
            return text.call(f"tl.{function}", *values)
        return self.helper(function if function == "isfinite" else f"{function}64", *values)
