"""Declarations: defaults and ranges folded to numbers, tuples and their ranges, initial values, `require`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge_dsl.analysis import names as scope
from forge_dsl.analysis.checked import CheckedHyper, CheckedState
from forge_dsl.analysis.fold import NotConstant, Value, evaluate, fold_scalar
from forge_dsl.analysis.kinds import MAX_ELEMENTS, Kinds
from forge_dsl.analysis.names import Names
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.spec import Range


class Declarations:
    """Checks the declarations of one spec."""

    def __init__(self, names: Names, kinds: Kinds, report: Report) -> None:
        self.names = names
        self.kinds = kinds
        self.report = report

    def constant(self, expr: syntax.Expr, place: scope.Place, finite: bool = True) -> float | None:
        """The value of an expression without names; None if it has none, which is reported."""
        before = len(self.report.found)
        scope.resolve(expr, place, self.names, self.report)
        self.kinds.number(expr, place.what)
        if len(self.report.found) > before:
            return None
        try:
            value = fold_scalar(expr, {})
        except NotConstant as error:
            # Whatever else has no value is reported by the check that it belongs to.
            if isinstance(error.node, syntax.Call) and error.node.function == "first":
                self.report.error("E0309", f"{place.rule}; `first` asks about a state", error.node.span)
            return None
        written = any(isinstance(node, syntax.Number) and math.isinf(node.value) for node in syntax.walk(expr))
        if math.isnan(value) or (math.isinf(value) and (finite or not written)):
            shown = "not a number" if math.isnan(value) else f"{value:g}"
            rule = "finite" if finite else "a number or `inf`"
            self.report.error("E0401", f"{place.what} is {rule}, and this is {shown}", expr.span)
            return None
        return value

    def bounds(self, bounds: syntax.Bounds | None) -> Range | None:
        """The range that `[low, high)` means; None if there is none, or an unfit one, which is reported."""
        if bounds is None:
            return None
        low = self.constant(bounds.low, scope.BOUND, finite=False)
        high = self.constant(bounds.high, scope.BOUND, finite=False)
        if low is None or high is None:
            return None
        if low > high or (low == high and (bounds.low_open or bounds.high_open)):
            self.report.error("E0403", "this range is empty", bounds.span)
            return None
        return Range(low=low, high=high, low_open=bounds.low_open, high_open=bounds.high_open)

    def hyper(self, node: syntax.Hyper) -> CheckedHyper | None:
        """The folded hyper; None if something is reported about it."""
        if node.default is None:
            help_ = f"write `hyper {node.name} = 1e-3`, or the value that its paper recommends"
            self.report.error("E0406", f"the hyper `{node.name}` has no default", node.name_span, help=help_)
            return None
        is_tuple = isinstance(node.default, syntax.Tuple)
        items: Sequence[syntax.Expr] = node.default.items if isinstance(node.default, syntax.Tuple) else (node.default,)
        if is_tuple and not 2 <= len(items) <= MAX_ELEMENTS:
            self.report.error("E0306", f"a tuple has 2 to {MAX_ELEMENTS} elements", node.default.span)
            return None
        if len(node.ranges) > 1 and len(node.ranges) != len(items):
            what = f"{len(node.ranges)} ranges for {len(items)} element{'s' if len(items) > 1 else ''}"
            self.report.error("E0404", what, node.ranges[-1].span, help="write one range for all, or one for each")
            return None
        values = [self.constant(item, scope.DEFAULT) for item in items]
        ranges = [self.bounds(bounds) for bounds in node.ranges] or [None]
        ranges = ranges * len(items) if len(ranges) == 1 else ranges
        for item, value, valid in zip(items, values, ranges, strict=True):
            if value is not None and valid is not None and value not in valid:
                self.report.error("E0402", f"the default {value:g} is not in {valid}", item.span)
                return None
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        return CheckedHyper(node.name, tuple(known) if is_tuple else known[0], tuple(ranges))

    def flag(self, node: syntax.Flag) -> tuple[str, bool]:
        """The flag and its default, which is false if unstated."""
        match node.default:
            case None:
                return node.name, False
            case syntax.Boolean(value=value):
                return node.name, value
            case syntax.Name(id="True" | "False" as word, span=span):
                self.report.error("E0208", f"`{word}` is Python", span, help=f"write `{word.lower()}`")
            case other:
                self.report.error("E0301", "the default of a flag is `true` or `false`", other.span)
        return node.name, False

    def state(self, node: syntax.State) -> CheckedState:
        """The state with its folded domain and its initial value, None for zeros."""
        domain = self.bounds(node.domain)
        initial = node.initial
        if initial is not None:
            scope.resolve(initial, scope.STATE_START, self.names, self.report)
            self.kinds.number(initial, scope.STATE_START.what)
        value: float | None = 0.0
        if initial is not None:
            try:
                value = fold_scalar(initial, {})
            except NotConstant:
                value = None
        if value is not None and (math.isnan(value) or math.isinf(value)) and initial is not None:
            shown = "not a number" if math.isnan(value) else f"{value:g}"
            self.report.error("E0401", f"the initial value of a state is finite, and this is {shown}", initial.span)
        elif value is not None and domain is not None and value not in domain:
            span = initial.span if initial is not None else node.name_span
            self.report.error("E0402", f"the state starts at {value:g}, which is not in {domain}", span)
        if value == 0 and math.copysign(1.0, value) > 0:
            initial = None
        return CheckedState(node.name, initial, domain, node.when)

    def scalar(self, node: syntax.Scalar) -> tuple[str, float, Range | None]:
        """The recurrent scalar, the number it starts from (0 if unstated), and its range."""
        domain = self.bounds(node.domain)
        value = 0.0 if node.initial is None else self.constant(node.initial, scope.SCALAR_START)
        if value is not None and domain is not None and value not in domain:
            span = node.initial.span if node.initial is not None else node.name_span
            self.report.error("E0402", f"the scalar starts at {value:g}, which is not in {domain}", span)
        return node.name, value or 0.0, domain

    def require(self, node: syntax.Require, hypers: Sequence[CheckedHyper], flags: Sequence[tuple[str, bool]]) -> None:
        """Checks a `require`, and that the defaults meet it."""
        before = len(self.report.found)
        scope.resolve(node.condition, scope.REQUIRE, self.names, self.report)
        self.kinds.condition(node.condition, "what `require` states")
        if not node.message.strip():
            self.report.error("E0112", "the message of this `require` is empty", node.span)
        if len(self.report.found) > before:
            return
        env: dict[str, Value] = {hyper.name: hyper.default for hyper in hypers if isinstance(hyper.default, float)}
        env.update(flags)
        try:
            holds = evaluate(node.condition, env)
        except NotConstant:
            return
        if not holds:
            message = "with the defaults of its hypers and flags this optimizer could not be constructed"
            self.report.error("E0405", message, node.condition.span, help="change a default, or the requirement")
