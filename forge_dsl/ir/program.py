"""The intermediate representation: pointwise operations in single assignment form, one coordinate at a time.

A program is a list of operations; an operation's arguments are indices of earlier ones. All tensor values are fp32.
What has no coordinate never appears as arithmetic: it is a `slot`, one fp32 number per step, computed in float64.

`choose` picks by a *switch* (a flag or a comparison of hypers), known when a kernel is compiled; `select` picks per
element. Both sides of a `select` are computed, and the one not taken leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from forge_dsl.language import syntax


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of the per-step table: a scalar expression, evaluated in float64 and rounded to fp32 once."""

    name: str
    expr: syntax.Expr
    boolean: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One pointwise operation.

    code   what it does: input, slot, const, neg, add, sub, mul, div, pow, rcp, sqrt, rsqrt, exp, log, log1p, expm1,
           tanh, abs, sign, min, max (whose zeros are +0), isfinite, lt, le, gt, ge, eq, ne, and, or, not, select,
           choose
    args   earlier values
    attr   the name of an input, slot or switch; the value of a constant
    name   the spec's name for the result, if it has one
    """

    code: str
    args: tuple[int, ...] = ()
    attr: str | float | None = None
    name: str | None = None
    boolean: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the step writes: `weight` or a state, and the value it gets."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Program:
    """The update of one coordinate. `slots` are the table entries that it reads."""

    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    slots: tuple[Slot, ...]

    def count(self, *codes: str) -> int:
        """How many operations have one of these codes."""
        return sum(op.code in codes for op in self.ops)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that the program reads."""
        return tuple(str(op.attr) for op in self.ops if op.code == "input")


def constant(op: Op) -> float:
    """The value of a `const`."""
    assert isinstance(op.attr, float)
    return op.attr


class Builder:
    """Grows a list of operations; equal operations get one value (common subexpressions are shared as they appear)."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._known: dict[tuple[object, ...], int] = {}

    def add(self, op: Op) -> int:
        """The value of `op`, new or known. A known value keeps its first name."""
        # By what a constant looks like: 0 and -0 are equal and yet two numbers.
        key = (op.code, op.args, repr(op.attr), op.boolean)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.ops)
            self.ops.append(op)
        elif op.name and self.ops[found].name is None and self.ops[found].code not in {"slot", "const"}:
            self.ops[found] = replace(self.ops[found], name=op.name)
        return found


def uses(program: Program) -> Iterator[tuple[int, int]]:
    """Pairs (user, used) over all operations."""
    for index, op in enumerate(program.ops):
        for arg in op.args:
            yield index, arg
