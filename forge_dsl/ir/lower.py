"""From the typed tree to operations on one coordinate."""

from __future__ import annotations

from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.fold import evaluate, fold_scalar
from forge_dsl.ir.passes.fold import round_fp32
from forge_dsl.ir.program import Builder, Op, Output, Program
from forge_dsl.ir.table import Layout
from forge_dsl.language import syntax

_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow"}
_COMPARE = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_LARGEST_PRODUCT = 4


def lower(checked: Checked, layout: Layout) -> Program:
    """The update of one coordinate, for all variants at once."""
    return _Lowering(checked, layout).program()


class _Lowering:
    def __init__(self, checked: Checked, layout: Layout) -> None:
        self.checked = checked
        self.layout = layout
        self.build = Builder()
        self.env: dict[str, int] = {}

    def program(self) -> Program:
        for name in ("weight", "grad", *(state.name for state in self.checked.states)):
            self.env[name] = self.build.add(Op("input", attr=name, name=name))
        written: list[str] = []
        for assign in self.checked.update:
            value = self.named(self.expr(assign.value), assign.name)
            if assign.when is not None and assign.name in self.env:
                value = self.named(self.choose(assign.when, value, self.env[assign.name]), assign.name)
            self.env[assign.name] = value
            if assign.name not in written:
                written.append(assign.name)
        stored = ["weight", *(state.name for state in self.checked.states if state.name in written)]
        outputs = [Output(name, self.env[name]) for name in stored]
        slots = tuple(self.layout.slots.values())
        return Program(tuple(self.build.ops), tuple(outputs), slots)

    def named(self, value: int, name: str) -> int:
        """Give an unnamed value the name that the author assigned it to."""
        op = self.build.ops[value]
        if op.name is None and op.code not in {"slot", "const", "input"}:
            self.build.ops[value] = Op(op.code, op.args, op.attr, name, op.boolean)
        return value

    def choose(self, condition: syntax.Expr, then: int, otherwise: int) -> int:
        if then == otherwise:
            return then
        match condition:
            case syntax.Unary(op="not", operand=operand):
                return self.choose(operand, otherwise, then)
            case syntax.Logical(op="and", operands=(head, *rest)):
                inner = self.choose(_logical("and", rest), then, otherwise) if rest else then
                return self.choose(head, inner, otherwise)
            case syntax.Logical(op="or", operands=(head, *rest)):
                inner = self.choose(_logical("or", rest), then, otherwise) if rest else otherwise
                return self.choose(head, then, inner)
        boolean = self.build.ops[then].boolean
        return self.build.add(Op("choose", (then, otherwise), self.layout.switches[condition], boolean=boolean))

    def expr(self, expr: syntax.Expr) -> int:
        if not self.layout.is_tensor(expr):
            return self.scalar(expr)
        match expr:
            case syntax.Name(id=name):
                return self.env[name]
            case syntax.Unary(op="-", operand=operand):
                return self.build.add(Op("neg", (self.expr(operand),)))
            case syntax.Unary(op="+", operand=operand):
                return self.expr(operand)
            case syntax.Unary(op="not", operand=operand):
                return self.build.add(Op("not", (self.expr(operand),), boolean=True))
            case syntax.Binary(op="**", left=left, right=right) if self.layout.is_constant(right):
                return self.power(left, fold_scalar(right, {}), right)
            case syntax.Binary(op=op, left=left, right=right):
                return self.build.add(Op(_ARITHMETIC[op], (self.expr(left), self.expr(right))))
            case syntax.Compare(operands=operands, ops=ops):
                values = [self.expr(operand) for operand in operands]
                pairs = zip(ops, values, values[1:], strict=False)
                return self.join("and", [self.build.add(Op(_COMPARE[op], (a, b), boolean=True)) for op, a, b in pairs])
            case syntax.Logical(op=op, operands=operands):
                return self.join(op, [self.expr(operand) for operand in operands])
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                return self.conditional(condition, then, otherwise)
            case syntax.Call(function="where", args=(condition, then, otherwise)):
                return self.conditional(condition, then, otherwise)
            case syntax.Call(function=function, args=args):
                return self.call(function, [self.expr(arg) for arg in args])
        raise AssertionError(f"a checked spec holds no {type(expr).__name__}")

    def scalar(self, expr: syntax.Expr) -> int:
        if self.layout.is_constant(expr):
            value = evaluate(expr, {})
            return self.build.add(Op("const", attr=round_fp32(float(value)), boolean=isinstance(value, bool)))
        slot = self.layout.slots[expr]
        return self.build.add(Op("slot", attr=slot.name, name=slot.name, boolean=slot.boolean))

    def conditional(self, condition: syntax.Expr, then: syntax.Expr, otherwise: syntax.Expr) -> int:
        if self.layout.is_constant(condition):
            (branch,) = self.layout.branches(condition, then, otherwise)
            return self.expr(branch)
        if self.layout.is_switch(condition):
            return self.choose(condition, self.expr(then), self.expr(otherwise))
        values = (self.expr(condition), self.expr(then), self.expr(otherwise))
        return self.build.add(Op("select", values, boolean=self.build.ops[values[1]].boolean))

    def join(self, op: str, values: list[int]) -> int:
        total = values[0]
        for value in values[1:]:
            total = self.build.add(Op(op, (total, value), boolean=True))
        return total

    def power(self, base: syntax.Expr, exponent: float, written: syntax.Expr) -> int:
        value = self.expr(base)
        if exponent == 0.5:
            return self.build.add(Op("sqrt", (value,)))
        if exponent.is_integer() and 1 <= exponent <= _LARGEST_PRODUCT:
            product = value
            for _ in range(int(exponent) - 1):
                product = self.build.add(Op("mul", (product, value)))
            return product
        return self.build.add(Op("pow", (value, self.scalar(written))))

    def call(self, function: str, args: list[int]) -> int:
        match function:
            case "min" | "max":
                total = args[0]
                for arg in args[1:]:
                    total = self.build.add(Op(function, (total, arg)))
                return total
            case "clamp":
                return self.build.add(Op("min", (self.build.add(Op("max", (args[0], args[1]))), args[2])))
            case "lerp":
                start, end, fraction = args
                step = self.build.add(Op("mul", (fraction, self.build.add(Op("sub", (end, start))))))
                return self.build.add(Op("add", (start, step)))
            case "isfinite":
                return self.build.add(Op("isfinite", (args[0],), boolean=True))
        return self.build.add(Op(function, tuple(args)))


def _logical(op: str, operands: list[syntax.Expr]) -> syntax.Expr:
    return operands[0] if len(operands) == 1 else syntax.Logical(op, tuple(operands))
