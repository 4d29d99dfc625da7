"""Domains: warnings about roots, logarithms, quotients and powers of tensors that may leave the numbers, and states
that may leave their declared domain.

Every name gets an interval, and the rule is followed once in two ways. Signs are judged with each hyper anywhere in
its range (narrowed by `require`), zeros with each hyper at its default: a range that holds 0 for `eps` is what torch
allows, not what a quotient is written for. A product with equal factors is a square, so `(1 - b) * g * g` is not
negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from forge_dsl.analysis import fold
from forge_dsl.analysis import intervals as iv
from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.intervals import ALL, Interval
from forge_dsl.analysis.products import Factors, sum_of
from forge_dsl.analysis.report import Report
from forge_dsl.analysis.switches import Switches
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.spec import Range

Judged = Literal["signs", "zeros"]
Env = dict[str, Interval]

STEP = Interval(1.0, math.inf, False, True)
# What a recurrent scalar without a declared range may turn out to stay in, narrowest first.
GUESSES = (Interval(0.0, 1.0, True, False), Interval(0.0, 1.0), Interval(0.0, math.inf, True, True), iv.NON_NEGATIVE)
MAX_ROUNDS = 12
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_INCREASING: dict[str, tuple[Callable[[float], fold.Value], Interval]] = {
    "sqrt": (fold.FUNCTIONS["sqrt"], iv.NON_NEGATIVE),
    "log": (fold.FUNCTIONS["log"], iv.NON_NEGATIVE),
    "log1p": (fold.FUNCTIONS["log1p"], Interval(-1.0)),
    "exp": (fold.FUNCTIONS["exp"], ALL),
    "expm1": (fold.FUNCTIONS["expm1"], ALL),
}


def check(checked: Checked, scalar_domains: Mapping[str, Range], switches: Switches, report: Report) -> None:
    """Adds the warnings of a spec that has no errors."""
    for judged in ("signs", "zeros"):
        _Judge(checked, scalar_domains, switches, report, judged).run()


@dataclass(slots=True)
class _Judge:
    checked: Checked
    scalar_domains: Mapping[str, Range]
    switches: Switches
    report: Report
    judged: Judged
    env: Env = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    differs: dict[int, bool] = field(default_factory=dict)
    nonzero: frozenset[str] = frozenset()
    in_update: bool = False

    def run(self) -> None:
        """Follows the rule from its declarations to its last statement."""
        self._start()
        self._scalars()
        domains = {state.name: iv.of_range(state.domain) for state in self.checked.states if state.domain is not None}
        self.tensors = {"grad", "weight", *domains, *(state.name for state in self.checked.states)}
        self.tensors |= {node.name for node in self.checked.update}
        self.differs.clear()
        self._initial_values(domains)
        self.env.update(domains)
        last = self._last_assignments()
        self.in_update = True
        for index, node in enumerate(self.checked.update):
            value = self.value(node.value)
            if node.name in domains and index in last and not value.within(domains[node.name]):
                self._leaves(node.name, domains[node.name], node.value.span)
                value = iv.meet(value, domains[node.name])
            conditional = node.when is not None and node.name in self.env
            self.env[node.name] = iv.hull(self.env[node.name], value) if conditional else value

    # -------------------------------------------------------------- what is known before the body

    def _start(self) -> None:
        unpacked = {node.value.id: node.names for node in self._unpackings() if isinstance(node.value, syntax.Name)}
        for hyper in self.checked.hypers:
            values = hyper.default if isinstance(hyper.default, tuple) else (hyper.default,)
            names = unpacked.get(hyper.name, ()) if isinstance(hyper.default, tuple) else (hyper.name,)
            for name, value, valid in zip(names, values, hyper.ranges, strict=False):
                self.env[name] = iv.point(value) if self.judged == "zeros" else iv.of_range(valid)
        self.env["step"] = STEP
        if self.judged == "signs":
            for require in self.checked.requires:
                self._narrow(require.condition, True)

    def _unpackings(self) -> list[syntax.Let]:
        return [node for node in self.checked.scalar_program if isinstance(node, syntax.Let) and len(node.names) > 1]

    def _scalars(self) -> None:
        """Intervals of lets and recurrent scalars: a declared range is believed, and warned about where it can be
        left; for the others the narrowest guess that the program preserves is found.
        """
        guesses: dict[str, list[Interval]] = {}
        for name, initial in self.checked.scalars:
            declared = self.scalar_domains.get(name)
            fitting = [guess for guess in GUESSES if guess.has(initial)]
            guesses[name] = [iv.of_range(declared)] if declared is not None else [*fitting, ALL]
        for _ in range(MAX_ROUNDS):
            self.env.update({name: options[0] for name, options in guesses.items()})
            self._scalar_program()
            left = [name for name, options in guesses.items() if not self.env[name].within(options[0])]
            if not any(len(guesses[name]) > 1 for name in left):
                break
            for name in left:
                if len(guesses[name]) > 1:
                    guesses[name].pop(0)
        else:
            self.env.update({name: ALL for name in guesses if name not in self.scalar_domains})
            self._scalar_program()
        for node in self.checked.scalar_program:
            if isinstance(node, syntax.Assign) and node.name in self.scalar_domains:
                domain = iv.of_range(self.scalar_domains[node.name])
                if not self.env[node.name].within(domain):
                    self._leaves(node.name, domain, node.value.span)
                self.env[node.name] = iv.meet(self.env[node.name], domain)

    def _scalar_program(self) -> None:
        for node in self.checked.scalar_program:
            if isinstance(node, syntax.Assign):
                self.env[node.name] = self.value(node.value)
            elif len(node.names) == 1:
                self.env[node.names[0]] = self.value(node.value)

    def _initial_values(self, domains: Mapping[str, Interval]) -> None:
        for state in self.checked.states:
            domain = domains.get(state.name)
            if state.initial is not None and domain is not None and not self.value(state.initial).within(domain):
                self._leaves(state.name, domain, state.initial.span)

    def _last_assignments(self) -> set[int]:
        """The statements whose value is stored, in some variant."""
        open_in: dict[str, int] = {}
        last = set()
        for index in range(len(self.checked.update) - 1, -1, -1):
            node = self.checked.update[index]
            where = self.switches.where(node.when)
            variants = self.switches.everywhere if where is None else where
            if variants & open_in.get(node.name, self.switches.everywhere):
                last.add(index)
            open_in[node.name] = open_in.get(node.name, self.switches.everywhere) & ~variants
        return last

    # -------------------------------------------------------------- warnings

    def _leaves(self, name: str, domain: Interval, span: syntax.Span) -> None:
        if self.judged == "signs":
            help_ = f"keep it inside, for instance with `max(..., {domain.low:g})`"
            if math.isfinite(domain.high):
                help_ = "keep it inside with `clamp`"
            message = f"`{name}` may leave its domain {_shown(domain)} here"
            self.report.warning("W0804", message, span, help=help_)

    def _root(self, what: str, argument: syntax.Expr, value: Interval, edge: float = 0.0) -> None:
        if self.judged == "signs":
            help_ = f"keep it inside, for instance with `max(..., {edge:g})`"
            if isinstance(argument, syntax.Name) and argument.id in {state.name for state in self.checked.states}:
                help_ = f"if it cannot be negative, declare it: `state {argument.id} in [0, inf)`"
            message = f"{what} is NaN for a value below {edge:g}, and this may be"
            self.report.warning("W0801", message, argument.span, f"it lies in {_shown(value)}", help=help_)

    def _zero(self, what: str, divisor: syntax.Expr, value: Interval) -> None:
        known = isinstance(divisor, syntax.Name) and divisor.id in self.nonzero
        if self.judged == "zeros" and not known:
            note = f"with every hyper at its default it lies in {_shown(value)}"
            shown = format_expr(divisor)
            help_ = f"add a small hyper to it: `{shown} + eps`" if len(shown) < 40 and value.low >= 0 else None
            if any(self._vanishes(node) for node in syntax.walk(divisor)):
                note, help_ = f"{note}: a number below 7.1e-46 is 0 in fp32", None
            self.report.warning("W0802", f"{what} may be zero", divisor.span, note, help=help_)

    def _vanishes(self, node: syntax.Node) -> bool:
        value = ALL
        if isinstance(node, syntax.Name):
            value = self.env.get(node.id, ALL)
        elif isinstance(node, syntax.Number):
            value = iv.point(node.value)
        return value.low == value.high != 0 and abs(value.low) <= fold.FP32_ZERO

    # -------------------------------------------------------------- values

    def is_tensor(self, expr: syntax.Node) -> bool:
        """Whether `expr` differs from coordinate to coordinate. Remembered, so that judging a tree stays linear."""
        known = self.differs.get(id(expr))
        if known is None:
            known = isinstance(expr, syntax.Name) and expr.id in self.tensors
            known = known or any(self.is_tensor(child) for child in syntax.children(expr))
            self.differs[id(expr)] = known
        return known

    def value(self, expr: syntax.Expr) -> Interval:
        """Where the value of `expr` lies; conditions have no interval, but what is in them is judged.

        A scalar is rounded to fp32 where it meets a tensor: too small a number is 0 there.
        """
        if not self.in_update or self.is_tensor(expr):
            return self._value(expr)
        self.in_update = False
        value = self._value(expr)
        self.in_update = True
        vanishes = value.low == value.high and abs(value.low) <= fold.FP32_ZERO
        return iv.point(0.0) if vanishes and self.judged == "zeros" else value

    def _value(self, expr: syntax.Expr) -> Interval:
        match expr:
            case syntax.Number(value=value):
                return iv.point(value)
            case syntax.Name(id=name):
                return self.env.get(name, ALL)
            case syntax.Unary(op=op, operand=operand):
                inner = self.value(operand)
                return iv.negate(inner) if op == "-" else inner
            case syntax.Binary(op="*"):
                return self._factors(expr).product()
            case syntax.Binary():
                return self._binary(expr)
            case syntax.Compare(operands=operands) | syntax.Logical(operands=operands):
                for operand in operands:
                    self.value(operand)
                return ALL
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                return self._choice(condition, then, otherwise)
            case syntax.Call(function="where", args=(condition, then, otherwise)):
                return self._choice(condition, then, otherwise)
            case syntax.Call(function="first"):
                return ALL
            case syntax.Call():
                return self._call(expr)
        return ALL

    def _factors(self, expr: syntax.Expr) -> Factors:
        """The factors of a product with their intervals, signs drawn out; of anything else, itself."""
        found: list[tuple[syntax.Expr, Interval]] = []
        negative = False
        stack: list[syntax.Expr] = [expr]
        while stack:
            factor = stack.pop()
            match factor:
                case syntax.Binary(op="*", left=left, right=right) if not self.in_update or self.is_tensor(factor):
                    stack += [right, left]
                case syntax.Unary(op="-", operand=operand):
                    negative = not negative
                    stack.append(operand)
                case _:
                    found.append((factor, self.value(factor)))
        return Factors(found, negative)

    def _binary(self, expr: syntax.Binary) -> Interval:
        if expr.op == "+":
            return sum_of(self._factors(expr.left), self._factors(expr.right))
        left, right = self.value(expr.left), self.value(expr.right)
        match expr.op:
            case "-":
                return iv.point(0.0) if expr.left == expr.right else iv.subtract(left, right)
            case "/":
                if right.has(0.0) and self.is_tensor(expr):
                    self._zero("this divisor", expr.right, right)
                return iv.divide(left, right)
            case "**":
                if self.is_tensor(expr):
                    self._power(expr, left, right)
                return iv.power(left, right)
            case "%":
                return iv.hull(iv.point(0.0), right)
        return ALL

    def _power(self, expr: syntax.Binary, base: Interval, exponent: Interval) -> None:
        known = exponent.low == exponent.high
        if base.may_be_negative and not (known and exponent.low.is_integer()):
            what = "a fractional power" if known else "a power whose exponent may be a fraction"
            self._root(what, expr.left, base)
        if base.has(0.0) and exponent.low < 0:
            self._zero("the base of this negative power", expr.left, base)
        literal = isinstance(expr.right, syntax.Number)
        if self.judged == "zeros" and base.has(0.0) and exponent.has(0.0) and not literal:
            self.report.warning("W0803", "this may be `0 ** 0`, which is 1", expr.span)

    def _choice(self, condition: syntax.Expr, then: syntax.Expr, otherwise: syntax.Expr) -> Interval:
        """Each branch is judged knowing that it was chosen: the one not taken never poisons the result."""
        self.value(condition)
        kept, nonzero = dict(self.env), self.nonzero
        self._narrow(condition, True)
        first = self.value(then)
        self.env, self.nonzero = dict(kept), nonzero
        self._narrow(condition, False)
        second = self.value(otherwise)
        self.env, self.nonzero = kept, nonzero
        return iv.hull(first, second)

    def _call(self, call: syntax.Call) -> Interval:
        name, args = call.function, [self.value(arg) for arg in call.args]
        if name in {"sqrt", "rsqrt", "log", "log1p"} and self.is_tensor(call):
            edge = -1.0 if name == "log1p" else 0.0
            if args[0].low < edge:
                self._root(
                    {"sqrt": "the root", "rsqrt": "the root"}.get(name, "the logarithm"), call.args[0], args[0], edge
                )
            elif name != "sqrt" and args[0].has(edge):
                what = "the argument of `rsqrt`" if name == "rsqrt" else "the argument of this logarithm"
                if name != "log1p":
                    self._zero(what, call.args[0], args[0])
        if name in _INCREASING:
            function, domain = _INCREASING[name]
            image = iv.increasing(lambda x: float(function(x)), args[0], domain)
            # It comes near 0 and does not reach it.
            return iv.meet(image, iv.POSITIVE) if name == "exp" else image
        match name, args:
            case "rsqrt", [x]:
                return iv.reciprocal(iv.increasing(lambda v: float(fold.FUNCTIONS["sqrt"](v)), x, iv.NON_NEGATIVE))
            case "sign", [x]:
                return iv.sign(x)
            case "tanh", [x]:
                return Interval(math.tanh(x.low), math.tanh(x.high))  # closed: it does round to 1
            case "abs", [x]:
                return iv.absolute(x)
            case "min" | "max", [first, *rest]:
                for other in rest:
                    first = iv.minimum(first, other) if name == "min" else iv.maximum(first, other)
                return first
            case "clamp", [x, low, high]:
                return iv.minimum(iv.maximum(x, low), high)
            case "lerp", [a, b, t]:
                return iv.lerp(a, b, t)
        return ALL

    # -------------------------------------------------------------- what a condition says

    def _narrow(self, condition: syntax.Expr, holds: bool) -> None:
        """Narrows the intervals of names by a condition that holds, or does not."""
        match condition:
            case syntax.Unary(op="not", operand=operand):
                self._narrow(operand, not holds)
            case syntax.Logical(op=op, operands=operands) if (op == "and") == holds:
                for operand in operands:
                    self._narrow(operand, holds)
            case syntax.Compare(operands=operands, ops=ops) if holds or len(ops) == 1:
                for op, left, right in zip(ops, operands, operands[1:], strict=False):
                    said = op if holds else _OPPOSITE[op]
                    if isinstance(left, syntax.Name):
                        self._bound(left.id, said, self._quiet(right))
                    if isinstance(right, syntax.Name):
                        self._bound(right.id, _MIRRORED[said], self._quiet(left))

    def _quiet(self, expr: syntax.Expr) -> Interval:
        """The interval of `expr`, judged elsewhere already. A choice within it stays unknown: following it from every
        condition that contains it would take time exponential in their depth.
        """
        if any(isinstance(n, syntax.Conditional) or _called(n) == "where" for n in syntax.walk(expr)):
            return ALL
        report, self.report = self.report, Report()
        value = self.value(expr)
        self.report = report
        return value

    def _bound(self, name: str, op: str, other: Interval) -> None:
        value = self.env.get(name, ALL)
        match op:
            case "<" | "<=":
                value = iv.meet(value, Interval(high=other.high, high_open=op == "<" or other.high_open))
            case ">" | ">=":
                value = iv.meet(value, Interval(low=other.low, low_open=op == ">" or other.low_open))
            case "==":
                value = iv.meet(value, other)
            case "!=" if other.low == other.high:
                if other.low == 0:
                    self.nonzero |= {name}
                if value.low == value.high == other.low:
                    value = ALL  # this cannot hold, so the branch is not taken
                else:
                    ends = value.low == other.low, value.high == other.low
                    value = Interval(value.low, value.high, value.low_open or ends[0], value.high_open or ends[1])
        self.env[name] = value


def _called(node: syntax.Node) -> str | None:
    return node.function if isinstance(node, syntax.Call) else None


def _shown(value: Interval) -> str:
    valid = Range(low=value.low, high=value.high, low_open=value.low_open, high_open=value.high_open)
    return str(valid).replace("[-inf", "(-inf").replace("inf]", "inf)")
