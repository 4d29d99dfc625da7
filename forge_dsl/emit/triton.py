"""A program as the statements of a Triton function: one coordinate in, new values out.

Values that the spec names keep their names; a second version of a name takes the same variable as soon as nobody reads
the first. Operations that only some variants need stand under an `if` on compile-time switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_dsl.emit import text
from forge_dsl.emit.text import Text
from forge_dsl.emit.wrap import wrap
from forge_dsl.ir.passes.fold import round_fp32
from forge_dsl.ir.program import Op, Program, constant

# The variants in which something is needed: a conjunction of switches, such as {("amsgrad", True)}; empty is "always".
Guard = frozenset[tuple[str, bool]]
ALWAYS: Guard = frozenset()

_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_DEVICE_MATH = {"exp", "log", "log1p", "expm1", "tanh", "pow"}
_RENAMED = {"pow": "power", "min": "minimum", "max": "maximum"}
_FOREVER = 1 << 30


@dataclass
class Body:
    """The printed function body: lines at indent 4, and the variable of each output."""

    lines: list[str]
    results: dict[str, str]


def print_program(program: Program, exact: bool, taken: frozenset[str]) -> Body:
    """Print `program`; `exact` picks correctly rounded division, root and elementary functions.

    taken: what no variable may be called, since it stands for something else throughout the function.
    """
    return _Printer(program, exact, taken).body()


class _Printer:
    def __init__(self, program: Program, exact: bool, taken: frozenset[str]) -> None:
        self.program = program
        self.exact = exact
        self.taken = taken - {op.name for op in program.ops if op.code != "slot"}
        self.users: list[list[int]] = [[] for _ in program.ops]
        for index, op in enumerate(program.ops):
            for arg in op.args:
                self.users[arg].append(index)
        self.outputs = {output.value for output in program.outputs}
        self.uniform = self._uniform(all)
        self.may_be_uniform = self._uniform(any)
        self.guards = self._guards()
        self.inlined = [self._inline(index) for index in range(len(program.ops))]
        self.position = self._positions()
        self.variable: dict[int, str] = {}
        self.holder: dict[str, int] = {}
        self.merged: set[int] = set()

    # -------------------------------------------------------------- analysis

    def _uniform(self, over: Callable[[Iterable[bool]], bool]) -> list[bool]:
        """Which values are one number for all coordinates, made of slots and constants only: in `all` variants, or in
        `any`, as far as its operands tell.
        """
        found: list[bool] = []
        for op in self.program.ops:
            joined = over if op.code == "choose" else all
            found.append(op.code != "input" and joined(found[arg] for arg in op.args))
        return found

    def _guards(self) -> list[Guard]:
        """In which variants each value is needed: what all its uses have in common."""
        needed: list[Guard | None] = [None] * len(self.program.ops)

        def need(value: int, guard: Guard) -> None:
            known = needed[value]
            needed[value] = guard if known is None else known & guard

        for output in self.program.outputs:
            need(output.value, ALWAYS)
        for index in range(len(self.program.ops) - 1, -1, -1):
            op, guard = self.program.ops[index], needed[index] or ALWAYS
            if op.code == "choose":
                need(op.args[0], guard | {(str(op.attr), True)})
                need(op.args[1], guard | {(str(op.attr), False)})
            else:
                for arg in op.args:
                    need(arg, guard)
        return [guard or ALWAYS for guard in needed]

    def _inline(self, index: int) -> bool:
        op = self.program.ops[index]
        if op.code in {"input", "slot", "const"}:
            return True
        if op.name or index in self.outputs or len(self.users[index]) != 1:
            return False
        user = self.users[index][0]
        return self.guards[index] == self.guards[user] or self.program.ops[user].code == "choose"

    def _positions(self) -> list[int]:
        """The statement that each value is computed in: its own, or that of the value it is written into."""
        position = list(range(len(self.program.ops)))
        for index in range(len(position) - 1, -1, -1):
            if self.inlined[index] and self.users[index]:
                position[index] = max(position[user] for user in self.users[index])
        return position

    def _last_use(self, value: int, but: int | None = None) -> int:
        if value in self.outputs and but is None:
            return _FOREVER
        return max((self.position[user] for user in self.users[value] if user != but), default=-1)

    # -------------------------------------------------------------- naming

    def _claim(self, index: int, wanted: str) -> str:
        """A variable for value `index`: `wanted`, unless an older value in it is still to be read."""
        name, number = wanted, 1
        while name in self.taken or (name in self.holder and self._last_use(self.holder[name]) > index):
            number += 1
            name = f"{wanted}_{number}"
        self.holder[name] = index
        self.variable[index] = name
        return name

    def _merge(self, index: int) -> bool:
        """Whether value `index` is the new side of a guarded assignment: `if c: x = ...`, else `x` keeps its value."""
        if len(self.users[index]) != 1 or index in self.outputs:
            return False
        choose = self.users[index][0]
        op = self.program.ops[choose]
        if op.code != "choose" or op.name is None or op.name != self.program.ops[index].name:
            return False
        old = op.args[1] if op.args[0] == index else op.args[0]
        name = self._name_of(old)
        if name != op.name or self.holder.get(name) != old or self._last_use(old, but=choose) > index:
            return False
        if old in self.outputs:
            return False
        self.variable[index] = self.variable[choose] = name
        self.holder[name] = choose
        self.merged.add(choose)
        return True

    def _name_of(self, index: int) -> str | None:
        return self.variable.get(index)

    # -------------------------------------------------------------- printing

    def body(self) -> Body:
        """All statements, grouped by guard."""
        statements: list[tuple[Guard, str, str]] = []
        for index, op in enumerate(self.program.ops):
            if op.code == "input":
                self.variable[index] = str(op.attr)
                self.holder[str(op.attr)] = index
        temporaries = 0
        for index, op in enumerate(self.program.ops):
            if self.inlined[index] or index in self.merged:
                continue
            value = self._expression(op)
            guard = self.guards[index]
            if self._merge(index):
                pass
            elif op.name is None:
                temporaries += 1
                self._claim(index, f"t{temporaries}")
            else:
                self._claim(index, op.name)
            statements.append((guard, self.variable[index], value.text))
        results = {output.name: self._result(output.value) for output in self.program.outputs}
        return Body(_layout(statements), results)

    def _result(self, value: int) -> str:
        """A new value of the gradient's shape: what may be one number for all coordinates is spread over them."""
        shown = self.text(value).text
        return f"tl.where(grad == grad, {shown}, {shown})" if self.may_be_uniform[value] else shown

    def text(self, index: int) -> Text:
        """The text that stands for value `index` where it is read."""
        op = self.program.ops[index]
        if index in self.variable:
            return Text(self.variable[index])
        if op.code == "slot":
            return text.compare("!=", Text(str(op.attr)), Text("0")) if op.boolean else Text(str(op.attr))
        if op.code == "const":
            value = constant(op)
            return Text(str(bool(value))) if op.boolean else _literal(value)
        return self._expression(op)

    def _helper(self, name: str, *args: Text) -> Text:
        return text.call(f"device_math.{name}", *args)

    def _expression(self, op: Op) -> Text:
        args = [self.text(arg) for arg in op.args]
        code = op.code
        if code in _INFIX:
            return text.binary(_INFIX[code], args[0], args[1])
        if code in _COMPARE:
            return text.compare(_COMPARE[code], args[0], args[1])
        if code in _DEVICE_MATH:
            return self._helper(_RENAMED.get(code, code) + ("_exact" if self.exact else ""), *args)
        match code:
            case "div":
                return text.call("tl.div_rn", *args) if self.exact else self._helper("divide", *args)
            case "rcp":
                return self._helper("divide", Text("1.0"), args[0])
            case "sqrt":
                return text.call("tl.sqrt_rn" if self.exact else "tl.sqrt", args[0])
            case "rsqrt" if self.exact:
                return text.call("tl.div_rn", Text("1.0"), text.call("tl.sqrt_rn", args[0]))
            case "rsqrt":
                return text.call("tl.rsqrt", args[0])
            case "neg":
                # Triton's unary minus is `0 - x`, which makes +0 of +0.
                return text.binary("*", text.number(-1.0), args[0])
            case "abs":
                return text.call("tl.abs", args[0])
            case "not":
                return text.invert(args[0])
            case "and" | "or":
                return self._logical(code, op.args, args)
            case "select":
                return text.call("tl.where", *args)
            case "choose":
                choice = text.ternary(args[0], Text(str(op.attr)), args[1])
                if {self.program.ops[arg].code for arg in op.args} == {"const"}:
                    # Of two literals it would be a Python number, which functions of Triton do not take.
                    return text.call("tl.cast", choice, "tl.int1" if op.boolean else "tl.float32")
                return choice
        return self._helper(_RENAMED.get(code, code), *args)

    def _logical(self, code: str, values: tuple[int, ...], args: list[Text]) -> Text:
        always, sometimes = ([found[value] for value in values] for found in (self.uniform, self.may_be_uniform))
        if all(always) or not any(sometimes):
            return text.binary("&" if code == "and" else "|", args[0], args[1])
        # Triton's interpreter takes a condition on scalars for a number where it meets a block, and `&` then fails.
        scalar, block = args if sometimes[0] and not always[1] else reversed(args)
        choices = (block, "False") if code == "and" else ("True", block)
        return text.call("tl.where", scalar, *choices)


def _literal(value: float) -> Text:
    """An fp32 constant in its shortest form; where fp32 has no normal number, Triton would make it a float64."""
    if math.isfinite(value) and 0 < abs(value) < 2.0**-126:
        return text.call("tl.cast", text.number(value), "tl.float32")
    shortest = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return text.number(next((short for short in shortest if round_fp32(short) == value), value))


def _layout(statements: list[tuple[Guard, str, str]]) -> list[str]:
    """Lines, with one `if` for each run of statements under the same guard."""
    lines: list[str] = []
    open_guard: Guard = ALWAYS
    for guard, name, value in statements:
        if name == value:
            continue
        if guard != open_guard and guard:
            literals = [name if wanted else f"not {name}" for name, wanted in sorted(guard)]
            lines.append(f"    if {' and '.join(literals)}:")
        open_guard = guard
        lines += wrap(f"{name} = ", value, "", 8 if guard else 4)
    return lines
