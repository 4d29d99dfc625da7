"""What only the fast arithmetic may do: re-associate, so that work without a coordinate is done once per step.

- Scalar factors of one product meet in one table entry: `lr * (m / bias1)` becomes `lr_over_bias1 * m`.
- A division by a scalar becomes a product with its reciprocal, itself a table entry.
- Quotients that share a divisor share its reciprocal.

Each changes a result by a few ulp; the exact arithmetic uses none of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from forge_dsl.ir.names import Namer, phrase
from forge_dsl.ir.passes.rebuild import rebuild
from forge_dsl.ir.program import Builder, Op, Program, Slot, uses
from forge_dsl.language import syntax

ONE = syntax.Number(1.0, "1")


def hoist_factors(program: Program, namer: Namer) -> Program:
    """Collect the scalar factors of every product and quotient; new table entries get names from `namer`."""
    return _Hoist(program, namer).run()


@dataclass(frozen=True)
class _Term:
    """`above / below * (core / divisor)`: scalars as spec expressions, the rest as new values (None stands for 1)."""

    above: tuple[syntax.Expr, ...] = ()
    below: tuple[syntax.Expr, ...] = ()
    core: int | None = None
    divisor: int | None = None


class _Hoist:
    def __init__(self, program: Program, namer: Namer) -> None:
        self.program = program
        self.namer = namer
        self.build = Builder()
        self.slots = {slot.name: slot for slot in program.slots}
        self.by_expr = {slot.expr: slot for slot in program.slots}
        used = Counter(arg for _, arg in uses(program))
        users = {arg: program.ops[user].code for user, arg in uses(program)}
        results = {output.value for output in program.outputs}
        # A product that feeds one other product only is a link of that chain and needs no value of its own.
        self.link = {
            index
            for index, op in enumerate(program.ops)
            if op.code in {"mul", "div"}
            and used[index] == 1
            and users[index] in {"mul", "div"}
            and index not in results
        }
        self.value: dict[int, int] = {}

    def run(self) -> Program:
        for index in range(len(self.program.ops)):
            if index not in self.link:
                self.value[index] = self.emit(index)
        outputs = tuple(replace(output, value=self.value[output.value]) for output in self.program.outputs)
        return Program(tuple(self.build.ops), outputs, tuple(self.by_expr.values()))

    def emit(self, index: int) -> int:
        op = self.program.ops[index]
        if op.code not in {"mul", "div"}:
            return self.build.add(replace(op, args=tuple(self.value[arg] for arg in op.args)))
        term = self.term(index)
        fewer = self.divisions(index) > (term.divisor is not None)
        if len(term.above) + len(term.below) > 1 or term.below or (term.above and fewer):
            return self.materialise(term, op.name)
        return self.plain(index)

    def divisions(self, index: int) -> int:
        """How many divisions the chain has as it was written."""
        op = self.program.ops[index]
        return (op.code == "div") + sum(self.divisions(arg) for arg in op.args if arg in self.link)

    def plain(self, index: int) -> int:
        """The chain as it was written."""
        op = self.program.ops[index]
        args = tuple(self.plain(arg) if arg in self.link else self.value[arg] for arg in op.args)
        return self.build.add(replace(op, args=args))

    def term(self, index: int, root: bool = True) -> _Term:
        op = self.program.ops[index]
        if op.code == "slot" and not op.boolean:
            return _Term(above=(self.slots[str(op.attr)].expr,))
        if op.code not in {"mul", "div"} or not (root or index in self.link):
            return _Term(core=self.value[index])
        left, right = (self.term(arg, root=False) for arg in op.args)
        if op.code == "div":
            right = _Term(right.below, right.above, right.divisor, right.core)
        return _Term(
            left.above + right.above,
            left.below + right.below,
            self.product(left.core, right.core),
            self.product(left.divisor, right.divisor),
        )

    def product(self, left: int | None, right: int | None) -> int | None:
        if left is None or right is None:
            return right if left is None else left
        return self.build.add(Op("mul", (left, right)))

    def materialise(self, term: _Term, name: str | None) -> int:
        expr = _product(term.above)
        for below in term.below:
            expr = syntax.Binary("/", expr, below)
        scale = self.slot(expr)
        above = scale if term.core is None else self.build.add(Op("mul", (scale, term.core)))
        if term.divisor is not None:
            above = self.build.add(Op("div", (above, term.divisor)))
        if name and self.build.ops[above].name is None:
            self.build.ops[above] = replace(self.build.ops[above], name=name)
        return above

    def slot(self, expr: syntax.Expr) -> int:
        if expr not in self.by_expr:
            self.by_expr[expr] = Slot(self.namer.fresh(phrase(expr)), expr)
        name = self.by_expr[expr].name
        return self.build.add(Op("slot", attr=name, name=name))


def _product(factors: tuple[syntax.Expr, ...]) -> syntax.Expr:
    total: syntax.Expr = factors[0] if factors else ONE
    for factor in factors[1:]:
        total = syntax.Binary("*", total, factor)
    return total


def share_reciprocals(program: Program) -> Program:
    """`a / d` and `b / d` become products with one `rcp(d)`."""
    divisors = Counter(op.args[1] for op in program.ops if op.code == "div")
    positions = iter(program.ops)

    def rewrite(build: Builder, op: Op) -> int:
        before = next(positions)
        if before.code == "div" and divisors[before.args[1]] > 1:
            return build.add(Op("mul", (op.args[0], build.add(Op("rcp", (op.args[1],)))), name=op.name))
        return build.add(op)

    return rebuild(program, rewrite)
