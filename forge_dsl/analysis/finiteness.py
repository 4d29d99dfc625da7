"""Finiteness: constants that are not finite, scalars that are no fp32 numbers where they meet a tensor, and bounds of
`clamp` in the wrong order.

Every expression is folded once, bottom up, as far as its names have values. What is made of numbers alone is the same
in every run: a result that is not finite is warned about where it arises, since scalars are IEEE float64 and may be
meant so, and is an error where it meets a tensor, whose every coordinate it would spoil. Infinity that is meant is
written `inf`. What also reads hypers and flags is folded at their defaults, and warned about where it meets a tensor:
`min(1, step / warmup)` is right for `warmup = 0`. `step`, recurrent scalars, the gradient, the weight and the states
have no value here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forge_dsl.analysis import fold
from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.fold import FP32_END, FP32_ZERO, Value
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr

_MEANT = "write `inf` where infinity is meant"
_SCALARS_FIRST = "multiply numbers with numbers first, or choose another default"
_NUMBERS_FIRST = "multiply numbers with numbers first, or write one that fp32 can hold"
# A bound that is infinite in fp32 bounds as little as the number that was written.
_BOUNDS = frozenset({"min", "max", "clamp", "isfinite", "first"})
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class _Known:
    """The value of an expression.

    literal  it is made of numbers alone; else it is the value at the defaults
    meant    its infinity comes from an `inf` of the spec
    first    it depends on `step`, and is the value at the first one
    """

    value: Value
    literal: bool
    meant: bool = False
    first: bool = False

    @property
    def where(self) -> str:
        """What a message about the value begins with."""
        if self.literal:
            return ""
        return f"{'at the first step, ' * self.first}with every hyper and flag at its default, "


def check(checked: Checked, report: Report, warnings: Report) -> None:
    """Adds the errors to `report`, the warnings to `warnings`. `checked` may have other errors."""
    _Folder(report, warnings).run(checked)


@dataclass(slots=True)
class _Folder:
    report: Report
    warnings: Report
    env: dict[str, _Known | None] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    differs: dict[int, bool] = field(default_factory=dict)
    in_update: bool = False
    live: bool = True
    later: bool = False  # within a choice that may leave the first step out

    def run(self, checked: Checked) -> None:
        """Follows the rule from its declarations to its last statement."""
        tuples: dict[str, tuple[float, ...]] = {}
        for hyper in checked.hypers:
            if isinstance(hyper.default, tuple):
                tuples[hyper.name] = hyper.default
            else:
                self.env[hyper.name] = _Known(hyper.default, False)
        self.env.update({name: _Known(default, False) for name, default in checked.flags})
        self.env["step"] = _Known(1.0, False, first=True)
        for node in checked.tree.declarations:
            self._declaration(node)
        for node in checked.scalar_program:
            if isinstance(node, syntax.Let) and len(node.names) > 1:
                values = tuples.get(node.value.id, ()) if isinstance(node.value, syntax.Name) else ()
                self.env.update({name: _Known(v, False) for name, v in zip(node.names, values, strict=False)})
                continue
            known = self.fold(node.value)
            self.env[node.names[0] if isinstance(node, syntax.Let) else node.name] = known
        self.in_update = True
        self.differs.clear()
        self.tensors = {"grad", "weight", *(s.name for s in checked.states), *(node.name for node in checked.update)}
        for assign in checked.update:
            taken = None if assign.when is None else self.fold(assign.when)
            self.live = taken is None or bool(taken.value)
            known = self.fold(assign.value)
            self.live = True
            self._met(assign.value, known)
            self.env[assign.name] = known if assign.when is None else None

    def _declaration(self, node: syntax.Statement) -> None:
        """Conditions, and initial values that are not numbers alone, which E0401 is about."""
        match node:
            case syntax.State(when=when, initial=initial):
                if when is not None:
                    self.fold(when)
                if initial is not None and any(isinstance(inner, syntax.Name) for inner in syntax.walk(initial)):
                    self.tensors, self.in_update = {"weight"}, True
                    self._met(initial, self.fold(initial))
                    self.tensors, self.in_update = set(), False
            case syntax.Require(condition=condition):
                self.fold(condition)

    # -------------------------------------------------------------- values

    def fold(self, expr: syntax.Expr) -> _Known | None:
        """The value of `expr`, None if it is not known; what is not finite in it is reported where it arises."""
        match expr:
            case syntax.Number(value=value) | syntax.Boolean(value=value):
                return _Known(value, True, meant=math.isinf(value))
            case syntax.Name(id=name):
                return self.env.get(name)
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                return self._choice(expr, condition, then, otherwise)
            case syntax.Call(function="where", args=(condition, then, otherwise)):
                return self._choice(expr, condition, then, otherwise)
            case syntax.Logical(operands=operands):
                return self._logical(expr, operands)
            case syntax.Unary(operand=operand):
                return self._made(expr, (operand,))
            case syntax.Binary(left=left, right=right):
                return self._made(expr, (left, right))
            case syntax.Compare(operands=operands):
                return self._made(expr, operands)
            case syntax.Call(args=args, keywords=()):
                return self._made(expr, args)
        return None

    def _made(self, expr: syntax.Expr, operands: Sequence[syntax.Expr]) -> _Known | None:
        """An operation on these operands."""
        known = [self.fold(operand) for operand in operands]
        free = isinstance(expr, syntax.Compare) or (isinstance(expr, syntax.Call) and expr.function in _BOUNDS)
        if self.in_update and not free and any(map(self._is_tensor, operands)):
            for operand, one in zip(operands, known, strict=True):
                if not self._is_tensor(operand):
                    self._met(operand, one)
        if isinstance(expr, syntax.Binary) and expr.op in "/%":
            divisor = known[1]
            if divisor is not None and divisor.literal and divisor.value == 0:
                self._zero(expr)
                value = None if known[0] is None else _applied(expr, [known[0].value, divisor.value])
                return None if value is None or known[0] is None else replace(known[0], value=value, meant=False)
        if isinstance(expr, syntax.Call) and expr.function == "clamp" and len(known) == 3:
            self._bounds(expr, known[1], known[2])
        sure = [one for one in known if one is not None]
        if len(sure) < len(known):
            return None
        return self._result(expr, sure)

    def _result(self, expr: syntax.Expr, operands: Sequence[_Known]) -> _Known | None:
        value = _applied(expr, [one.value for one in operands])
        if value is None:
            return None
        meant = math.isinf(value) and any(one.meant for one in operands)
        found = _Known(value, all(one.literal for one in operands), meant, any(one.first for one in operands))
        fresh = all(one.meant or math.isfinite(one.value) for one in operands)
        if found.literal and fresh and not math.isfinite(value) and not meant:
            self.warnings.warning("W0805", f"{_shown(expr)} is {_named(value)}", expr.span, help=_help(value))
        return found

    def _choice(
        self, expr: syntax.Expr, condition: syntax.Expr, then: syntax.Expr, otherwise: syntax.Expr
    ) -> _Known | None:
        """The branch that is not taken never poisons the result, so what is in it is judged by its numbers alone."""
        known = self.fold(condition)
        branches: list[_Known | None] = []
        live, later = self.live, self.later
        self.later = later or (known is None and any(map(_asks_for_time, syntax.walk(condition))))
        for branch, taken in ((then, True), (otherwise, False)):
            chosen = known is None or bool(known.value) is taken
            if known is not None and known.literal and not chosen:
                branches.append(None)
                continue
            self.live = live and chosen
            branches.append(self.fold(branch))
            if self._is_tensor(expr) and not self._is_tensor(branch):
                self._met(branch, branches[-1])
            self.live = live
        self.later = later
        if known is None:
            return None
        result = branches[0] if known.value else branches[1]
        if result is None:
            return None
        return replace(result, literal=result.literal and known.literal, first=result.first or known.first)

    def _logical(self, expr: syntax.Logical, operands: Sequence[syntax.Expr]) -> _Known | None:
        """Operands after the one that decides are judged like a branch that is not taken."""
        live, decided, sure = self.live, None, []
        for operand in operands:
            known = self.fold(operand)
            if known is not None:
                sure.append(known)
                if bool(known.value) is (expr.op == "or"):
                    decided = _Known(known.value, known.literal, first=known.first)
                    self.live = False
        self.live = live
        if decided is not None or len(sure) < len(operands):
            return decided
        return _Known(expr.op == "and", all(one.literal for one in sure), first=any(one.first for one in sure))

    def _is_tensor(self, expr: syntax.Node) -> bool:
        """Whether `expr` differs from coordinate to coordinate. Remembered, so that folding a tree stays linear."""
        known = self.differs.get(id(expr))
        if known is None:
            known = isinstance(expr, syntax.Name) and expr.id in self.tensors
            known = self.differs[id(expr)] = known or any(map(self._is_tensor, syntax.children(expr)))
        return known

    # -------------------------------------------------------------- what is said

    def _zero(self, expr: syntax.Binary) -> None:
        note = "the result is infinite, or not a number for 0 / 0"
        if expr.op == "%":
            self.warnings.warning("W0805", "a remainder by 0 is not a number", expr.right.span)
        elif self.in_update and self._is_tensor(expr):
            self.report.error("E0407", "this divisor is 0", expr.right.span, note, help=_MEANT)
        else:
            self.warnings.warning("W0805", "this divisor is 0", expr.right.span, note, help=_MEANT)

    def _bounds(self, expr: syntax.Call, low: _Known | None, high: _Known | None) -> None:
        """`clamp` takes the upper bound last, so it is the result where the lower one is above it."""
        if low is None or high is None or low.first or high.first or not low.value > high.value:
            return
        literal = low.literal and high.literal
        if self.live or literal:
            note = f"the lower bound {low.value:g} is above the upper bound {high.value:g}"
            message = f"this clamp always gives {high.value:g}"
            if not literal:
                message = f"with every hyper and flag at its default, {message}"
            self.warnings.warning("W0807", message, expr.span, note, help="write `clamp(x, low, high)`")

    def _met(self, expr: syntax.Expr, known: _Known | None) -> None:
        """A scalar becomes an operand of a tensor, or its new value."""
        if known is None or known.meant or not (self.live or known.literal) or (known.first and self.later):
            return
        if known.literal and not math.isfinite(known.value):
            message = f"{_shown(expr)} is {_named(known.value)}, and it meets a tensor"
            self.report.error("E0407", message, expr.span, help=_help(known.value))
        elif not math.isfinite(known.value):
            message = f"{known.where}{_shown(expr)} is {_named(known.value)}"
            help_ = "choose another default, or ask first, as in `lr / k if k != 0 else lr`"
            if known.first:
                help_ = "ask for the step first, as in `lr / k if step > 1 else lr`, or choose another default"
            self.warnings.warning("W0805", message, expr.span, help=help_)
        elif abs(known.value) >= FP32_END and self.live:
            message = f"{_shown(expr)} is {known.value:.3g}, which is infinite in fp32"
            note = "what meets a tensor is rounded to fp32, whose largest number is 3.4e38"
            self.warnings.warning("W0806", message, expr.span, note, help=_fits_help(known))
        elif 0 < abs(known.value) <= FP32_ZERO and self.live:
            message = f"{_shown(expr)} is {known.value:.3g}, which is 0 in fp32"
            note = "what meets a tensor is rounded to fp32, whose smallest number above 0 is 1.4e-45"
            self.warnings.warning("W0806", message, expr.span, note, help=_fits_help(known))


def _asks_for_time(node: syntax.Node) -> bool:
    return (isinstance(node, syntax.Call) and node.function == "first") or (
        isinstance(node, syntax.Name) and node.id == "step"
    )


def _fits_help(known: _Known) -> str:
    return _NUMBERS_FIRST if known.literal else _SCALARS_FIRST


def _help(value: float) -> str | None:
    return None if math.isnan(value) else _MEANT


def _shown(expr: syntax.Expr) -> str:
    text = format_expr(expr)
    return f"`{text}`" if len(text) <= _SHOWN else "this"


def _named(value: float) -> str:
    return "not a number" if math.isnan(value) else "-infinity" if value < 0 else "infinity"


def _applied(expr: syntax.Expr, values: Sequence[Value]) -> Value | None:
    """The operation of `expr` on these operands; None for one that has no value or that another check refuses."""
    numbers = [float(value) for value in values]
    match expr:
        case syntax.Unary(op=op):
            return not values[0] if op == "not" else -numbers[0] if op == "-" else numbers[0]
        case syntax.Binary(op=op) if op in fold.BINARY:
            return fold.BINARY[op](*numbers)
        case syntax.Compare(ops=ops) if all(op in fold.COMPARE for op in ops):
            return all(fold.COMPARE[op](a, b) for op, a, b in zip(ops, numbers, numbers[1:], strict=False))
        case syntax.Call(function=function, args=args) if function in fold.FUNCTIONS and fold.fits(function, args):
            return fold.FUNCTIONS[function](*numbers)
    return None
