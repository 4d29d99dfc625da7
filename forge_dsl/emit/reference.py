"""The PyTorch reference, printed from the checked tree: a faulty pass over the kernels' program cannot hide in it."""

from __future__ import annotations

from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.fold import evaluate, fold_scalar
from forge_dsl.emit import text
from forge_dsl.emit.text import Text
from forge_dsl.emit.tree import TreePrinter
from forge_dsl.emit.wrap import wrap
from forge_dsl.ir.table import Layout
from forge_dsl.language import syntax

_TORCH = {"abs": "torch.abs", "sign": "torch.sign", "isfinite": "torch.isfinite"}
_LARGEST_PRODUCT = 4


class ReferencePrinter(TreePrinter):
    """Expressions of `update:` as PyTorch. `uses_math` tells whether `reference_math` was called."""

    uses_math = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def helper(self, function: str, *args: Text) -> Text:
        """A call of a function of `reference_math`."""
        self.uses_math = True
        return text.call(f"reference_math.{function}", *args)

    def text(self, expr: syntax.Expr) -> Text:
        if self.layout.is_tensor(expr):
            return super().text(expr)
        if self.layout.is_constant(expr):
            value = evaluate(expr, {})
            return Text(str(value)) if isinstance(value, bool) else text.single(value)
        slot = self.layout.slots[expr]
        return text.compare("!=", Text(slot.name), Text("0")) if slot.boolean else Text(slot.name)

    def tensor(self, expr: syntax.Expr) -> Text:
        """`expr` as a tensor even if it is a literal: functions of two tensors take nothing else."""
        if not self.layout.is_constant(expr):
            return self.text(expr)
        boolean = isinstance(evaluate(expr, {}), bool)
        return text.call("s.new_tensor", self.text(expr), *(["dtype=torch.bool"] if boolean else []))

    def arithmetic(self, op: str, left: syntax.Expr, right: syntax.Expr) -> Text:
        if op == "/":
            # torch divides by, or into, a Python number through a reciprocal, which rounds twice.
            return text.binary("/", self.tensor(left), self.tensor(right))
        return super().arithmetic(op, left, right)

    def power(self, base: syntax.Expr, exponent: syntax.Expr) -> Text:
        if self.layout.is_constant(exponent):
            value = float(fold_scalar(exponent, {}))
            if value == 0.5:
                return self.helper("sqrt", self.text(base))
            if value.is_integer() and 1 <= value <= _LARGEST_PRODUCT:
                return self.product(self.text(base), int(value))
        return self.helper("power", self.tensor(base), self.tensor(exponent))

    def product(self, factor: Text, times: int) -> Text:
        """`factor * factor * ...`; a factor that is more than a name is written once."""
        if times > 1 and not factor.text.isidentifier():
            return self.helper("product", factor, Text(str(times)))
        total = factor
        for _ in range(times - 1):
            total = text.binary("*", total, factor)
        return total

    def negation(self, operand: syntax.Expr) -> Text:
        return text.invert(self.text(operand))

    def logical(self, op: str, operands: list[Text]) -> Text:
        total = operands[0]
        for operand in operands[1:]:
            total = text.binary("&" if op == "and" else "|", total, operand)
        return total

    def conditional(self, then: syntax.Expr, condition: syntax.Expr, otherwise: syntax.Expr) -> Text:
        if self.layout.is_constant(condition):
            (branch,) = self.layout.branches(condition, then, otherwise)
            return self.text(branch)
        if self.layout.is_switch(condition):
            return text.ternary(self.tensor(then), switch_text(condition, self.layout), self.tensor(otherwise))
        # Of two Python numbers torch would make a tensor of its default type.
        numbers = not (self.layout.is_tensor(then) or self.layout.is_tensor(otherwise))
        first = self.tensor(then) if numbers else self.text(then)
        return text.call("torch.where", self.text(condition), first, self.text(otherwise))

    def call(self, function: str, args: tuple[syntax.Expr, ...]) -> Text:
        match function:
            case "min" | "max":
                total = self.tensor(args[0])
                for arg in args[1:]:
                    total = self.helper(f"{function}imum", total, self.tensor(arg))
                return total
            case "clamp":
                low = self.helper("maximum", self.tensor(args[0]), self.tensor(args[1]))
                return self.helper("minimum", low, self.tensor(args[2]))
            case "lerp":
                return self.helper("lerp", *map(self.tensor, args))
            case "rsqrt":
                return text.call("torch.reciprocal", self.helper("sqrt", self.text(args[0])))
        values = [self.text(arg) for arg in args]
        if function in _TORCH:
            return text.call(_TORCH[function], *values)
        return self.helper(function, *values)


def switch_text(condition: syntax.Expr, layout: Layout) -> Text:
    """A condition over switches, by their names: `centered and has_momentum`."""
    if condition in layout.switches:
        return Text(layout.switches[condition])
    match condition:
        case syntax.Unary(op="not", operand=operand):
            return text.logical_not(switch_text(operand, layout))
        case syntax.Logical(op=op, operands=operands):
            return text.join(op, [switch_text(operand, layout) for operand in operands])
    raise AssertionError("not a condition over switches")


def reference_body(checked: Checked, layout: Layout, printer: ReferencePrinter) -> list[str]:
    """The statements of `update:` in order, indented by four."""
    lines: list[str] = []
    for assign in checked.update:
        if assign.value == syntax.Name(assign.name):
            continue
        indent = 4
        if assign.when is not None:
            lines.append(f"    if {switch_text(assign.when, layout).text}:")
            indent = 8
        lines += wrap(f"{assign.name} = ", printer.tensor(assign.value).text, "", indent)
    return lines


def borrowed(checked: Checked, layout: Layout) -> set[str]:
    """Tensors whose new value may be the memory of another's old one: `last = weight`, two states that change places.

    A caller that stores one result after the other would overwrite such a value before it is read.
    """
    owners = {name: {name} for name in ("weight", *(state.name for state in checked.states))}

    def of(expr: syntax.Expr) -> set[str]:
        match expr:
            case syntax.Name(id=name):
                return owners.get(name, set())
            case syntax.Unary(op="+", operand=operand):
                return of(operand)
            case (
                syntax.Conditional(then=then, condition=condition, otherwise=otherwise)
                | syntax.Call(function="where", args=(condition, then, otherwise))
            ) if layout.is_switch(condition) or layout.is_constant(condition):
                return set().union(*map(of, layout.branches(condition, then, otherwise)))
        return set()

    for assign in checked.update:
        old = owners.get(assign.name, set()) if assign.when is not None else set()
        owners[assign.name] = of(assign.value) | old
    return {name for name in ("weight", *(state.name for state in checked.states)) if owners[name] - {name}}
