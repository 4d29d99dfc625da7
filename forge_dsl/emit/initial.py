"""First values of the states: of hypers alone a number, filled in; of the weight an expression in PyTorch, in fp32."""

from __future__ import annotations

from forge_dsl.analysis.fold import evaluate
from forge_dsl.compile import Compiled
from forge_dsl.emit import text
from forge_dsl.emit.layout import block
from forge_dsl.emit.literals import quoted
from forge_dsl.emit.reference import ReferencePrinter
from forge_dsl.emit.text import Text
from forge_dsl.emit.tree import HostScalars
from forge_dsl.emit.wrap import wrap
from forge_dsl.ir.table import Layout
from forge_dsl.language import syntax


class _InitialPrinter(ReferencePrinter):
    """As the reference prints `update:`, but what has no coordinate is computed on the spot, on the host."""

    def __init__(self, scalars: HostScalars) -> None:
        super().__init__(Layout(frozenset({"weight"}), frozenset(), {}, {}))
        self.scalars = scalars

    def text(self, expr: syntax.Expr) -> Text:
        if expr == syntax.Name("weight"):
            return Text("weight.float()")
        if self.layout.is_tensor(expr) or self.layout.is_constant(expr):
            return super().text(expr)
        return self.scalars.text(expr)

    def tensor(self, expr: syntax.Expr) -> Text:
        if self.layout.is_tensor(expr):
            return self.text(expr)
        return text.call("weight.new_tensor", self.text(expr), "dtype=torch.float32")

    def conditional(self, then: syntax.Expr, condition: syntax.Expr, otherwise: syntax.Expr) -> Text:
        if self.layout.is_tensor(condition) or self.layout.is_constant(condition):
            return super().conditional(then, condition, otherwise)
        return text.ternary(self.tensor(then), self.scalars.text(condition), self.tensor(otherwise))


def initial_states(
    compiled: Compiled, scalars: HostScalars, modules: set[str]
) -> tuple[list[tuple[str, str]], set[str]]:
    """The literal of each state's name with the lines that return its first value, zeros left out; the hypers read."""
    values: list[tuple[str, str]] = []
    names: set[str] = set()
    printer = _InitialPrinter(scalars)
    for state in compiled.checked.states:
        if state.initial is None or state.initial == syntax.Number(0.0):
            continue
        read = {node.id for node in syntax.walk(state.initial) if isinstance(node, syntax.Name)}
        names |= read - {"weight"}
        if state.initial == syntax.Name("weight"):
            value = "weight.to(torch.float32, copy=True)"
        elif "weight" in read:
            value = printer.text(state.initial).text
        else:
            value = f"torch.full_like(weight, {_number(state.initial, scalars)}, dtype=torch.float32)"
        values.append((quoted(state.name), block(wrap("return ", value, "", 8))))
    if printer.uses_math:
        modules.add("reference_math")
    return values, names


def _number(initial: syntax.Expr, scalars: HostScalars) -> str:
    if any(isinstance(node, syntax.Name) for node in syntax.walk(initial)):
        return scalars.text(initial).text
    return text.single(float(evaluate(initial, {}))).text
