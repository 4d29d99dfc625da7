"""Names: what each one declares, where it may be read, and whether anything reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from forge_dsl.analysis import builtins
from forge_dsl.analysis.builtins import words
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.language.syntax import NOWHERE, Span

# Characters of names compared in search of the nearest one: hundreds of long names would take seconds.
MAX_COMPARED = 30_000
TENSORS = frozenset({"state", "local", "grad", "weight"})


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name. `kind` is hyper, flag, state, scalar, let, local, step, grad or weight; `arity` counts a tuple's
    elements.
    """

    name: str
    kind: str
    span: Span = NOWHERE
    arity: int | None = None
    order: int = -1


@dataclass(slots=True)
class Names:
    """All symbols of a spec, and which of them something reads. Of the excused it is not said that nothing does: they
    are misspelled somewhere, declared twice, or cannot be declared at all.
    """

    symbols: dict[str, Symbol]
    read: set[str] = field(default_factory=set)
    excused: set[str] = field(default_factory=set)
    compared: int = 0

    def kind(self, name: str) -> str | None:
        """The kind of the symbol, None if there is no such name."""
        symbol = self.symbols.get(name)
        return symbol.kind if symbol else None

    def nearest(self, name: str, candidates: list[str]) -> str | None:
        """The candidate that `name` is probably a misspelling of; None once a spec has had enough of them compared."""
        self.compared += len(name) * len(candidates)
        return builtins.nearest(name, candidates) if self.compared < MAX_COMPARED else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression stands: what to call it, which kinds of names it may read, and that rule in words."""

    what: str
    allowed: frozenset[str]
    rule: str
    code: str = "E0309"


def _constant(what: str) -> Place:
    return Place(what, frozenset(), f"{what} is made of numbers alone")


_BEFORE = "hypers, flags, scalars, `step` and the lets above it"
DEFAULT = _constant("a default")
BOUND = _constant("the end of a range")
SCALAR_START = _constant("the initial value of a scalar")
STATE_START = Place(
    "the initial value of a state",
    words("hyper weight"),
    "the initial value of a state reads hypers and `weight`",
)
LET = Place("a `let`", words("hyper flag scalar let step"), f"a `let` reads {_BEFORE}")
SCALAR = Place("a scalar", words("hyper flag scalar let step"), f"a scalar reads {_BEFORE}")
WHEN = Place("`when`", words("hyper flag"), "`when` reads flags and hypers", "E0310")
REQUIRE = Place("`require`", words("hyper flag"), "`require` reads hypers and flags", "E0312")
UPDATE = Place("`update:`", words("hyper flag state scalar let local step grad weight"), "`update:` reads every name")


def collect(tree: syntax.Spec, report: Report) -> Names:
    """The symbols that a spec declares. Reports reserved names, duplicates, and an unfit name of the optimizer."""
    _check_optimizer_name(tree, report)
    symbols = {name: Symbol(name, name) for name in ("step", "grad", "weight")}
    excused: set[str] = set()
    for order, statement in enumerate(tree.declarations):
        for name, span, kind, arity in _declared(statement):
            if name in {"step", "grad", "weight"}:
                _unfit(name, span, kind, report)
                continue
            # A name that cannot be declared is known all the same, so that its uses say nothing more.
            if _unfit(name, span, kind, report):
                excused.add(name)
            known = symbols.get(name)
            if known is not None:
                message = f"`{name}` is declared twice"
                again = known.kind == "scalar" and kind == "let"
                help_ = f"write `{name} = ...` without `let`: a scalar is assigned" if again else None
                report.error("E0202", message, span, f"it is a {known.kind} since line {known.span.line}", help=help_)
                excused.add(name)
                continue
            symbols[name] = Symbol(name, kind, span, arity, order)
    states = {name for name, symbol in symbols.items() if symbol.kind == "state"}
    for name, symbol in list(symbols.items()):
        stem = name.removeprefix("first_").removeprefix("written_")
        if stem != name and stem in states:
            message = f"`{name}` is taken: it is how the generated code counts the writes of `{stem}`"
            report.error("E0203", message, symbol.span)
    _check_entries(symbols, states, report)
    for name, span in _assigned(tree.update):
        if name not in symbols:
            if _unfit(name, span, "local", report):
                excused.add(name)
            symbols[name] = Symbol(name, "local", span)
    return Names(symbols, excused=excused)


def _check_entries(symbols: dict[str, Symbol], states: set[str], report: Report) -> None:
    """Report states and scalars under whose names the optimizer's state already has something else."""
    for name, symbol in symbols.items():
        if symbol.kind not in ("state", "scalar"):
            continue
        stem = name.removesuffix("_scale")
        if name in builtins.STATE_ENTRIES:
            reason = "it is an entry that checkpoints hold beside the states"
        elif stem != name and stem in states:
            reason = f"it is where the scales of `{stem}` are when that is kept in 8 bits"
        else:
            continue
        report.error("E0203", f"`{name}` is taken: {reason}", symbol.span, help=f"call it `{name}_`")


def _declared(statement: syntax.Statement) -> Iterator[tuple[str, Span, str, int | None]]:
    match statement:
        case syntax.Hyper(name=name, default=default, name_span=span):
            yield name, span, "hyper", len(default.items) if isinstance(default, syntax.Tuple) else None
        case syntax.Flag(name=name, name_span=span):
            yield name, span, "flag", None
        case syntax.State(name=name, name_span=span):
            yield name, span, "state", None
        case syntax.Scalar(name=name, name_span=span):
            yield name, span, "scalar", None
        case syntax.Let(names=names, name_spans=spans):
            for index, name in enumerate(names):
                yield name, spans[index] if index < len(spans) else statement.span, "let", None


def _assigned(statements: Iterable[syntax.Statement]) -> Iterator[tuple[str, Span]]:
    for statement in statements:
        match statement:
            case syntax.Assign(name=name, name_span=span):
                yield name, span
            case syntax.AugmentedAssign(name=name, span=span):
                yield name, span
            case syntax.Block(keyword=keyword, header=header, body=body):
                if keyword == "for":
                    yield from ((name.id, name.span) for name in header[:-1] if isinstance(name, syntax.Name))
                yield from _assigned(body)


def _unfit(name: str, span: Span, kind: str, report: Report) -> bool:
    """Whether `name` cannot be declared; reports why. Assigning `weight`, `grad`, `step` is another check's matter."""
    if kind == "local" and name in {"weight", "grad", "step"}:
        return True
    if name in builtins.RESERVED:
        report.error(
            "E0203", f"`{name}` cannot be declared: it is {builtins.RESERVED[name]}", span, help=f"call it `{name}_`"
        )
        return True
    if name.startswith("_"):
        bare = name.strip("_")
        report.error(
            "E0204",
            f"the name `{name}` begins with `_`",
            span,
            help=f"call it `{bare}`" if bare.isidentifier() else None,
        )
        return True
    return False


def _check_optimizer_name(tree: syntax.Spec, report: Report) -> None:
    name = tree.name
    reason = builtins.RESERVED.get(name)
    if name in builtins.RESERVED_CLASSES:
        reason = "a name that the generated module uses itself"
    if name.startswith("_"):
        report.error("E0204", f"the optimizer's name `{name}` begins with `_`", tree.name_span)
    elif reason is not None:
        help_ = f"call it `My{name}`" if name.isidentifier() else None
        report.error("E0203", f"an optimizer cannot be called `{name}`: it is {reason}", tree.name_span, help=help_)


# ------------------------------------------------------------------ reads


def reads(expr: syntax.Node) -> Iterator[syntax.Name]:
    """Every variable that `expr` reads. The argument of `first` is looked at, not read; an index is refused as a
    whole.
    """
    stack: list[syntax.Node] = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, syntax.Name):
            yield node
        elif isinstance(node, syntax.Call) and node.function == "first":
            stack.extend(arg for arg in node.args if not isinstance(arg, syntax.Name))
        elif isinstance(node, syntax.Subscript):
            stack.append(node.base)
        elif not isinstance(node, syntax.MethodCall | syntax.Attribute) or module_of(node) is None:
            stack.extend(reversed(list(syntax.children(node))))
        elif isinstance(node, syntax.MethodCall):
            stack.extend(node.args)


def module_of(node: syntax.Node) -> str | None:
    """`torch` for `torch.linalg.norm(x)`: the module that a dotted expression begins with."""
    while isinstance(node, syntax.MethodCall | syntax.Attribute):
        node = node.base
    return node.id if isinstance(node, syntax.Name) and node.id in builtins.MODULES else None


def resolve(
    expr: syntax.Expr, place: Place, names: Names, report: Report, order: int | None = None, help: str | None = None
) -> None:
    """Checks every name that `expr` reads, and notes it as read. `order` is the statement's place among the
    declarations, `help` what to write instead where a name is of a kind that may not be read here.
    """
    for name in reads(expr):
        symbol = names.symbols.get(name.id)
        if symbol is None:
            _undefined(name, place, names, report)
            continue
        names.read.add(name.id)
        if symbol.kind not in place.allowed:
            _not_here(name, symbol, place, report, help)
        elif order is not None and symbol.kind == "let" and symbol.order >= order:
            if symbol.order == order:
                message, help_ = (
                    f"`{name.id}` is read in its own definition",
                    "a `scalar` carries over from step to step",
                )
            else:
                message = f"`{name.id}` is read before line {symbol.span.line}, where it gets its value"
                help_ = "move that line up"
            report.error("E0701", message, name.span, help=help_)


# Names that sound like tensors of other parameters, or of the whole model.
_OF_OTHERS = re.compile(
    r"param|weight|grad|bias(?!_?(corr|\d))|other|layer|model|neighbou?r|^[wpWP]_?\d*$", re.IGNORECASE
)
_PYTHON_VALUES = {"True": "true", "False": "false", "None": None}


def _undefined(name: syntax.Name, place: Place, names: Names, report: Report) -> None:
    if name.id in _PYTHON_VALUES:
        spelling = _PYTHON_VALUES[name.id]
        spelled = f"write `{spelling}`" if spelling else "there is no missing value; a choice is a flag"
        report.error("E0208", f"`{name.id}` is Python", name.span, help=spelled)
        return
    if name.id in {"nan", "NaN"}:
        report.error("E0201", "NaN is not a number one can write", name.span)
        return
    candidates = [n for n, symbol in names.symbols.items() if symbol.kind in place.allowed or not place.allowed]
    guess = names.nearest(name.id, candidates)
    help_ = f"did you mean `{guess}`?" if guess else None
    if guess:
        names.excused.add(guess)
    elif name.id in builtins.BUILTINS:
        help_ = f"`{name.id}` is a function: write `{name.id}({builtins.BUILTINS[name.id].signature})`"
    elif name.id in {"param", "params", "p", "w", "W", "theta", "parameter"}:
        help_ = "the weight at this coordinate is called `weight`"
    elif name.id in {"gradient", "g", "dw", "dW", "d_p"}:
        help_ = "the gradient at this coordinate is called `grad`"
    elif name.id in {"t", "iteration", "n_steps", "step_count", "global_step"}:
        help_ = "the number of this weight's updates, from 1, is called `step`"
    elif place in (LET, SCALAR) or (place is UPDATE and not _OF_OTHERS.search(name.id)):
        help_ = f"{'assign' if place is UPDATE else 'define'} it above, or declare it: `hyper {name.id} = ...`"
    elif place is WHEN:
        help_ = f"declare it: `flag {name.id}`"
    notes = (
        ("other parameters' tensors cannot be read: a rule sees one coordinate of one weight",)
        if place is UPDATE and help_ is None and _OF_OTHERS.search(name.id)
        else ()
    )
    report.error("E0201", f"there is no name `{name.id}`", name.span, *notes, help=help_)


def _not_here(name: syntax.Name, symbol: Symbol, place: Place, report: Report, help_: str | None) -> None:
    what = f"is a {symbol.kind}"
    if symbol.kind in TENSORS:
        what = "is a local of `update:`" if symbol.kind == "local" else "is a tensor"
    elif symbol.kind == "step":
        what = "counts updates"
    code = "E0303" if symbol.kind in TENSORS else place.code
    if symbol.kind in TENSORS and place in (LET, SCALAR):
        help_ = "compute it in `update:`"
    if symbol.kind == "let" and place in (WHEN, REQUIRE):
        help_ = "write what it stands for, in hypers; for an element of a tuple declare a hyper of its own"
    report.error(code, f"{place.rule}; `{name.id}` {what}", name.span, help=help_)


def check_used(tree: syntax.Spec, names: Names, report: Report) -> None:
    """Reports hypers, flags, states, scalars and lets that nothing reads."""
    for symbol in names.symbols.values():
        if symbol.kind not in {"hyper", "flag", "state", "scalar", "let"}:
            continue
        if symbol.name in names.read or symbol.name in names.excused:
            continue
        help_ = "remove it, or read it in `update:`"
        if symbol.kind == "state" and (local := _nearest_local(symbol.name, names)) is not None:
            help_ = f"did you mean `{local.name}`, which is assigned on line {local.span.line}? Then declare that"
        report.error("E0206", f"nothing reads the {symbol.kind} `{symbol.name}`", symbol.span, help=help_)


def _nearest_local(name: str, names: Names) -> Symbol | None:
    """The local that a state was probably declared for."""
    guess = names.nearest(name, [symbol.name for symbol in names.symbols.values() if symbol.kind == "local"])
    return None if guess is None else names.symbols[guess]
