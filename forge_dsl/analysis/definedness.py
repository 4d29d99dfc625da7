"""Definedness: in every variant, what is read has a value, what is assigned is read, and the weight is assigned.

All variants are followed at once: a set of variants is an int (see switches.py), and each name carries the set in
which it has a value. A conditional made of switches is pruned, so each branch is read in its own variants only; every
other conditional is a select, which reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forge_dsl.analysis.names import Names
from forge_dsl.analysis.report import Report
from forge_dsl.analysis.switches import Switches
from forge_dsl.language import syntax
from forge_dsl.language.syntax import Span


@dataclass(slots=True)
class _Pending:
    """An assignment, the variants in which it is made, and those in which nothing has read it yet."""

    node: syntax.Assign
    made: int
    unread: int


@dataclass(slots=True)
class _Flow:
    names: Names
    switches: Switches
    report: Report
    present: dict[str, int]
    defined: dict[str, int] = field(default_factory=dict)
    pending: dict[str, list[_Pending]] = field(default_factory=dict)
    assigned_later: dict[str, syntax.Assign] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def read(self, name: syntax.Name, variants: int) -> None:
        """Notes that `name` is read in `variants`; reports those in which it has no value."""
        kind = self.names.kind(name.id)
        if kind == "state":
            self._state(name.id, name.span, variants, "read")
        elif kind == "local":
            self._local(name, variants)
        for pending in self.pending.get(name.id, ()):
            pending.unread &= ~variants

    def ask(self, call: syntax.Call, variants: int) -> None:
        """Reports variants in which the state that `first` is asked about does not exist."""
        for name in call.args:
            if isinstance(name, syntax.Name) and self.names.kind(name.id) == "state":
                self._state(name.id, name.span, variants, "asked about")

    def _state(self, name: str, span: Span, variants: int, what: str) -> None:
        missing = variants & ~self.present.get(name, 0)
        if not missing or name in self.reported:
            return
        self.reported.add(name)
        where = self.switches.describe(missing)
        declared = self.names.symbols[name].span.line
        help_ = (
            "add the state's own `when` to this statement"
            if what == "assigned"
            else "choose by the state's own condition: `a if c else b`"
        )
        message = f"the state `{name}` is {what} here also{where or ' where it is absent'}, and then it does not exist"
        self.report.error("E0702", message, span, f"its `when` is on line {declared}", help=help_)

    def _local(self, name: syntax.Name, variants: int) -> None:
        missing = variants & ~self.defined.get(name.id, 0)
        if not missing or name.id in self.reported:
            return
        self.reported.add(name.id)
        if self.defined.get(name.id, 0) == 0:
            later = self.assigned_later.get(name.id)
            line = "it is never assigned"
            if later is not None:
                same = later.span.line == name.span.line
                line = "this is its first assignment" if same else f"it is assigned on line {later.span.line}"
            message = f"`{name.id}` is read before it has a value"
            help_ = f"assign it first; if it is kept from step to step, declare `state {name.id}` above `update:`"
            self.report.error("E0701", message, name.span, line, help=help_)
            return
        where = self.switches.describe(missing)
        self.report.error(
            "E0701", f"`{name.id}` has no value here{where}", name.span, help="assign it for every choice"
        )

    def assign(self, node: syntax.Assign, variants: int) -> None:
        """Notes an assignment; reports an earlier one that it makes useless."""
        kind = self.names.kind(node.name)
        if kind == "state":
            self._state(node.name, node.name_span, variants, "assigned")
        earlier = self.pending.setdefault(node.name, [])
        for pending in earlier:
            lost = pending.unread & variants
            if lost:
                where = self.switches.describe(lost)
                message = f"this value of `{node.name}` is never read{where}"
                note = f"line {node.span.line} assigns `{node.name}` again"
                help_ = "choose in one statement: `x = a if c else b`" if where else None
                self.report.error("E0703", message, pending.node.name_span, note, help=help_)
            pending.unread &= ~variants
            pending.made &= ~variants
        earlier[:] = [pending for pending in earlier if pending.made]
        earlier.append(_Pending(node, variants, variants))
        self.defined[node.name] = self.defined.get(node.name, 0) | variants

    def finish(self) -> None:
        """Reports locals that nothing reads in any variant."""
        states = [name for name in self.present if name not in self.pending]
        for name, entries in self.pending.items():
            if self.names.kind(name) != "local" or name in self.names.excused | self.reported:
                continue
            for pending in entries:
                if pending.unread == pending.made:
                    guess = self.names.nearest(name, states)
                    help_ = f"did you mean the state `{guess}`?" if guess else None
                    self.report.error(
                        "E0703", f"this value of `{name}` is never read", pending.node.name_span, help=help_
                    )


def check(update: Sequence[syntax.Assign], names: Names, switches: Switches, tree: syntax.Spec, report: Report) -> None:
    """Follows the body through every variant."""
    everywhere = switches.everywhere
    present = {}
    for node in tree.declarations:
        if isinstance(node, syntax.State):
            where = switches.where(node.when)
            present[node.name] = everywhere if where is None else where
    later = {node.name: node for node in reversed(update)}
    flow = _Flow(names, switches, report, present, assigned_later=later)
    weight = 0
    for node in update:
        where = switches.where(node.when)
        variants = everywhere if where is None else where
        for read, read_in in _visited(node.value, variants, switches):
            if isinstance(read, syntax.Name):
                flow.read(read, read_in)
            else:
                flow.ask(read, read_in)
        flow.assign(node, variants)
        if node.name == "weight":
            weight |= variants
    flow.finish()
    _check_weight(weight, switches, tree, report)
    _check_written(update, names, tree, report)


def reads(expr: syntax.Expr, variants: int, switches: Switches) -> Iterator[tuple[syntax.Name, int]]:
    """Every variable that `expr` reads, and the variants, out of `variants`, in which it does."""
    for node, here in _visited(expr, variants, switches):
        if isinstance(node, syntax.Name):
            yield node, here


def _visited(expr: syntax.Expr, variants: int, switches: Switches) -> Iterator[tuple[syntax.Name | syntax.Call, int]]:
    """Every variable that `expr` reads and every call of `first`, and the variants in which it does."""
    stack: list[tuple[syntax.Node, int]] = [(expr, variants)]
    while stack:
        node, here = stack.pop()
        match node:
            case syntax.Name():
                yield node, here
            case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
                holds = switches.where(condition)
                if holds is None:
                    stack += [(otherwise, here), (then, here), (condition, here)]
                else:
                    stack += [(e, v) for e, v in ((otherwise, here & ~holds), (then, here & holds)) if v]
            case syntax.Call(function="first"):
                yield node, here
            case _:
                stack.extend((child, here) for child in reversed(list(syntax.children(node))))


def _check_weight(assigned: int, switches: Switches, tree: syntax.Spec, report: Report) -> None:
    missing = switches.everywhere & ~assigned
    if missing:
        where = switches.describe(missing) if assigned else ""
        help_ = "the rule ends with `weight = ...`"
        report.error("E0704", f"`weight` is never assigned{where}", tree.name_span, help=help_)


def _check_written(update: Sequence[syntax.Assign], names: Names, tree: syntax.Spec, report: Report) -> None:
    """Reports states and scalars that keep the number they start from."""
    assignments = syntax.Assign | syntax.AugmentedAssign
    written = {node.name for node in update} | {d.name for d in tree.declarations if isinstance(d, assignments)}
    for node in tree.declarations:
        if not isinstance(node, syntax.Scalar | syntax.State) or names.kind(node.name) not in {"scalar", "state"}:
            continue
        if node.name in names.excused:
            continue
        if isinstance(node, syntax.Scalar) and node.name not in written and node.name in names.read:
            help_ = f"assign it below, `{node.name} = ...`, or make it a `let`"
            report.error("E0705", f"the scalar `{node.name}` is never assigned", node.name_span, help=help_)
        elif (
            isinstance(node, syntax.State) and node.name not in written and node.name in names.read and _constant(node)
        ):
            help_ = f"assign it in `update:`: `{node.name} = ...`"
            report.error("E0705", f"the state `{node.name}` is read but never assigned", node.name_span, help=help_)


def _constant(node: syntax.State) -> bool:
    """Whether a state starts from a number; one that starts from the weight or a hyper may stay so (an anchor)."""
    return node.initial is None or not any(isinstance(n, syntax.Name) for n in syntax.walk(node.initial))
