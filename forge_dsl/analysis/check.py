"""`check`: runs every analysis over a tree and gives the typed tree, or all errors at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forge_dsl.analysis import definedness, domains, finiteness, liveness, names, separability, switches
from forge_dsl.analysis.checked import Checked, CheckedHyper, CheckedState
from forge_dsl.analysis.declarations import Declarations
from forge_dsl.analysis.kinds import NUMBER, Kind, Kinds
from forge_dsl.analysis.names import Names
from forge_dsl.analysis.report import Report
from forge_dsl.analysis.switches import Switches
from forge_dsl.diagnostics import Diagnostic, DiagnosticError, ordered
from forge_dsl.language import syntax
from forge_dsl.language.source import MAX_ERRORS
from forge_dsl.spec import Range


@dataclass(slots=True)
class _Parts:
    """What the declarations amount to, as they are read."""

    hypers: list[CheckedHyper] = field(default_factory=list)
    flags: list[tuple[str, bool]] = field(default_factory=list)
    states: list[CheckedState] = field(default_factory=list)
    scalars: list[tuple[str, float]] = field(default_factory=list)
    scalar_domains: dict[str, Range] = field(default_factory=dict)
    program: list[syntax.Let | syntax.Assign] = field(default_factory=list)
    requires: list[syntax.Require] = field(default_factory=list)


def check(tree: syntax.Spec, source: str, filename: str) -> tuple[Checked, tuple[Diagnostic, ...]]:
    """The checked spec and its warnings. Raises DiagnosticError with every error (and warning) that was found."""
    report = Report()
    known = names.collect(tree, report)
    separability.check(tree, known, report)
    kinds = Kinds(known, report)
    before = len(report.found)
    choices = switches.collect(tree, known, kinds, report)
    choices_known = len(report.found) == before
    parts = _declarations(tree, known, kinds, report)
    update = _update(tree, known, kinds, choices, report)
    if len(update) == len(tree.update):
        # A refused block or bare expression hides reads and assignments, and is reported already.
        if choices_known:
            definedness.check(update, known, choices, tree, report)
        names.check_used(tree, known, report)
    checked = Checked(
        tree=tree,
        source=source,
        filename=filename,
        hypers=tuple(parts.hypers),
        flags=tuple(parts.flags),
        states=tuple(parts.states),
        scalars=tuple(parts.scalars),
        scalar_program=tuple(parts.program),
        requires=tuple(parts.requires),
        update=update,
        switches=choices.atoms,
        first=_first(tree),
        uses_step="step" in known.read,
    )
    warnings = Report()
    finiteness.check(checked, report, warnings)
    if not report.failed:
        report.found += warnings.found
        domains.check(checked, parts.scalar_domains, choices, report)
        liveness.check(checked, choices, report)
    found = ordered(report.found)
    if report.failed:
        raise DiagnosticError(found[:MAX_ERRORS], source, filename)
    return checked, found


def _declarations(tree: syntax.Spec, known: Names, kinds: Kinds, report: Report) -> _Parts:
    parts = _Parts()
    declarations = Declarations(known, kinds, report)
    for order, node in enumerate(tree.declarations):
        match node:
            case syntax.Hyper():
                hyper = declarations.hyper(node)
                if hyper is not None:
                    parts.hypers.append(hyper)
            case syntax.Flag():
                parts.flags.append(declarations.flag(node))
            case syntax.State():
                parts.states.append(declarations.state(node))
            case syntax.Scalar():
                name, initial, domain = declarations.scalar(node)
                parts.scalars.append((name, initial))
                if domain is not None:
                    parts.scalar_domains[name] = domain
            case syntax.Let():
                _let(node, order, known, kinds, report)
                parts.program.append(node)
            case syntax.Assign() | syntax.AugmentedAssign():
                assign = _plain(node)
                _scalar_assignment(assign, order, known, kinds, report)
                parts.program.append(_without_when(assign))
            case syntax.Require():
                parts.requires.append(node)
    for require in parts.requires:
        declarations.require(require, parts.hypers, parts.flags)
    return parts


def _let(node: syntax.Let, order: int, known: Names, kinds: Kinds, report: Report) -> None:
    names.resolve(node.value, names.LET, known, report, order)
    symbol = known.symbols.get(node.value.id) if isinstance(node.value, syntax.Name) else None
    if symbol is not None and symbol.arity is not None:
        if len(node.names) != symbol.arity:
            count = f"are {len(node.names)} names" if len(node.names) > 1 else "is one name"
            message = f"`{symbol.name}` has {symbol.arity} elements, and here {count}"
            report.error("E0307", message, node.span)
        for name in node.names:
            kinds.values[name] = NUMBER
        return
    if len(node.names) > 1:
        report.error(
            "E0307", "only a tuple hyper can be taken apart", node.value.span, help="as in `let beta1, beta2 = betas`"
        )
    kind = kinds.infer(node.value)
    for name in node.names:
        kinds.values[name] = kind


def _scalar_assignment(node: syntax.Assign, order: int, known: Names, kinds: Kinds, report: Report) -> None:
    """An assignment among the declarations: its target must be a recurrent scalar."""
    kind = known.kind(node.name)
    if kind is None:
        help_ = f"write `let {node.name} = ...`, or declare `scalar {node.name} = 1` above if it carries over"
        report.error("E0205", f"`{node.name}` is not a scalar", node.name_span, help=help_)
    elif kind != "scalar":
        _read_only(node, kind, "among the declarations only a `scalar` is assigned", report)
    names.resolve(node.value, names.SCALAR, known, report, order)
    kinds.number(node.value, "a scalar")
    if node.when is not None:
        names.resolve(node.when, names.WHEN, known, report)
        kinds.condition(node.when, "what stands after `when`")


def _without_when(node: syntax.Assign) -> syntax.Assign:
    """`x = a when c` as `x = a if c else x`: a scalar is computed once per step, whatever the variant."""
    if node.when is None:
        return node
    kept = syntax.Name(node.name, span=node.name_span)
    value = syntax.Conditional(node.value, node.when, kept, span=node.value.span)
    return replace(node, value=value, when=None)


def _update(
    tree: syntax.Spec, known: Names, kinds: Kinds, choices: Switches, report: Report
) -> tuple[syntax.Assign, ...]:
    """The statements of the body as plain assignments; those that are refused are left out."""
    plain = []
    for node in tree.update:
        if not isinstance(node, syntax.Assign | syntax.AugmentedAssign):
            continue
        assign = _plain(node)
        names.resolve(assign.value, names.UPDATE, known, report)
        target = known.kind(assign.name)
        if target in {"state", "weight"}:
            kinds.number(assign.value, f"`{assign.name}`")
        else:
            kind = kinds.infer(assign.value)
            if target == "local":
                tensor = None if kind is None else Kind(kind.boolean, tensor=True)
                kinds.define(assign.name, tensor, assign.name_span)
            elif target is not None:
                _read_only(assign, target, "`update:` assigns the weight, states and locals", report)
        plain.append(assign)
    return tuple(plain)


_WHY_READ_ONLY = {
    "hyper": "a hyper is set by the user, through the param group",
    "flag": "a flag is set by the user, at construction",
    "let": "a `let` is computed once per step, before any coordinate",
    "scalar": "a scalar belongs to the weight, not to a coordinate: assign it above `update:`",
    "state": "a state is a tensor: assign it in `update:`",
    "weight": "it is a tensor: assign it in `update:`",
    "step": "it counts this weight's updates by itself",
    "grad": "it is given; use a local, as in `g = -grad`",
}


def _read_only(node: syntax.Assign, kind: str, rule: str, report: Report) -> None:
    what = f"`{node.name}`" if node.name == kind else f"the {kind} `{node.name}`"
    report.error("E0205", f"{what} cannot be assigned here", node.name_span, _WHY_READ_ONLY[kind], rule)


def _plain(node: syntax.Assign | syntax.AugmentedAssign) -> syntax.Assign:
    """`x += y` as `x = x + y`, so that the checks after its refusal say nothing more about it."""
    if isinstance(node, syntax.Assign):
        return node
    value = syntax.Binary(node.op[:-1], syntax.Name(node.name, span=node.span), node.value, span=node.span)
    return syntax.Assign(node.name, value, None, node.span, span=node.span)


def _first(tree: syntax.Spec) -> tuple[str, ...]:
    """The states that `first` is asked about, in order of appearance."""
    found: dict[str, None] = {}
    for node in syntax.walk(tree):
        if isinstance(node, syntax.Call) and node.function == "first":
            found.update((arg.id, None) for arg in node.args if isinstance(arg, syntax.Name))
    return tuple(found)
