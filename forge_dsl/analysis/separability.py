"""Separability: a rule may be fused if the new value of a coordinate depends on that coordinate alone.

The language has no expression that couples coordinates, so a spec that parses into known element-wise operations is
separable by construction, and `certificate` says what each result depends on. This module finds everything else that
people write and says, in the words of the papers, why it cannot be part of such a rule.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forge_dsl.analysis import papers
from forge_dsl.analysis.builtins import BUILTINS, REFUSED, SPELLED_OTHERWISE, nearest
from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.names import Names, module_of, reads
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.language.source import MAX_ERRORS
from forge_dsl.language.syntax_errors import CONTINUED, PYTHON_STATEMENTS

MATRIX_PRODUCT = "a matrix product mixes whole rows and columns"
_TRANSPOSES = frozenset({"T", "mT", "H", "mH"})
_SHAPES = frozenset({"shape", "size", "ndim", "numel", "dtype", "device", "stride"})
_CONSTANTS = {"inf": "inf", "pi": "3.141592653589793", "e": "2.718281828459045", "nan": None}


def check(tree: syntax.Spec, names: Names, report: Report) -> None:
    """Reports every expression and statement that couples coordinates, or that is not of this language."""
    finder = _Finder(names, report, papers.Hints.of(tree))
    for statement in (*tree.declarations, *tree.update):
        finder.statement(statement)


@dataclass(slots=True)
class _Finder:
    names: Names
    report: Report
    hints: papers.Hints
    said: set[str] = field(default_factory=set)

    # -------------------------------------------------------------- statements

    def statement(self, node: syntax.Statement) -> None:
        """Reports what is refused in a statement and in its body."""
        before = len(self.report.found)
        for expr in _expressions(node):
            self.expression(expr)
        match node:
            case syntax.Block(keyword=keyword, body=body):
                self._block(node, keyword)
                for inner in body:
                    self.statement(inner)
            case syntax.AugmentedAssign(name=name, op=op, value=value):
                plain = syntax.Binary(op[:-1], syntax.Name(name), value)
                help_ = f"write `{name} = {format_expr(plain)}`"
                self.report.error("E0602", f"there is no `{op}`", node.span, help=help_)
            case syntax.ExpressionStatement(value=syntax.Name(id=word)) if self._is_python(word):
                message = f"`{word}` is Python; an update rule has no such statement"
                self.report.error("E0208", message, node.span, help="leave the line out" if word == "pass" else None)
            case syntax.ExpressionStatement() if len(self.report.found) == before:
                message = "this computes a value and drops it"
                help_ = CONTINUED if _begins_with_sign(node.value) else "assign it: `name = expression`"
                if _is_arrow(node.value):
                    help_ = "write the arrow as `=`"
                self.report.error("E0603", message, node.span, help=help_)

    def _is_python(self, word: str) -> bool:
        return word in PYTHON_STATEMENTS and word not in self.names.symbols

    def _block(self, node: syntax.Block, keyword: str) -> None:
        header = syntax.Block(keyword, node.header, (), span=node.span)
        if keyword in {"for", "while"}:
            notes = [note for note in self.hints.loop_notes() if note not in self.said]
            self.said.update(notes)
            message = f"there is no `{keyword}`: an update is one fixed sequence of operations, for any shape"
            self.report.error("E0601", message, header.span, *notes, help="write the repeated statements out")
            return
        help_ = "write `x = a if c else b`; or, for a choice made by flags, `x = a  when c`"
        message = f"there is no `{keyword}` statement: every coordinate goes through the same operations"
        self.report.error("E0601", message, header.span, help=help_)

    # -------------------------------------------------------------- expressions

    def expression(self, expr: syntax.Expr) -> None:
        """Reports what is refused anywhere in `expr`."""
        stack: list[tuple[syntax.Node, bool]] = [(expr, False)]
        while stack and len(self.report.found) < MAX_ERRORS:
            node, in_product = stack.pop()
            product = in_product
            match node:
                case syntax.Binary(op="@") if in_product:
                    pass
                case syntax.Binary(op="@"):
                    self.refuse(
                        "E0502", f"`@` is not element-wise: {MATRIX_PRODUCT}", node, *self.hints.product_notes(node)
                    )
                    product = True
                case syntax.Call():
                    self._call(node)
                case syntax.MethodCall():
                    self._method(node)
                case syntax.Attribute() if not (in_product and node.name in _TRANSPOSES):
                    self._attribute(node)
                case syntax.Subscript():
                    self._subscript(node)
            product = product and isinstance(node, syntax.Binary)
            stack.extend((child, product) for child in reversed(list(_parts(node))))

    def refuse(self, code: str, message: str, node: syntax.Node, *notes: str, help: str | None = None) -> None:
        """Reports a coupling. Each note is given once in a file; the first coupling also explains why it matters."""
        fresh = [note for note in dict.fromkeys((*notes, papers.FUSION)) if note not in self.said]
        self.said.update(fresh)
        self.report.error(code, message, node.span, *fresh, help=help)

    def _coupling(self, name: str, node: syntax.Call | syntax.MethodCall) -> None:
        refusal = REFUSED[name]
        self.refuse(
            refusal.code, f"`{name}` is not element-wise: {refusal.reason}", node, *self.hints.call_notes(name, node)
        )

    def _call(self, node: syntax.Call) -> None:
        name = node.function
        if name in BUILTINS:
            if name in {"min", "max"} and len(node.args) == 1:
                message = f"`{name}` of one argument is not element-wise: it takes the {name}imum over all coordinates"
                notes = self.hints.call_notes(name, node)
                self.refuse("E0501", message, node, *notes, help=f"of two values, it is element-wise: `{name}(a, b)`")
            elif node.keywords:
                self._keywords(node)
            return
        symbol = self.names.symbols.get(name)
        if name in REFUSED and (symbol is None or node.args):
            self._coupling(name, node)
        elif symbol is not None:
            message = f"`{name}` is a {symbol.kind}, not a function"
            self.report.error("E0207", message, node.name_span, help=f"for a product write `{name} * (...)`")
        else:
            self._unknown(name, node)

    def _keywords(self, node: syntax.Call) -> None:
        word, value = node.keywords[0]
        message = f"functions take no keyword arguments, and here is `{word}=`"
        help_ = _call_in_words(node.function, node.args, node.keywords)
        self.report.error("E0305", message, value.span, help=help_)

    def _unknown(self, name: str, node: syntax.Call | syntax.MethodCall) -> None:
        bare = name if name in SPELLED_OTHERWISE else name.rstrip("_")
        if bare in SPELLED_OTHERWISE:
            self.report.error(
                "E0207", f"there is no function `{name}`", node.span, help=f"write `{SPELLED_OTHERWISE[bare]}`"
            )
            return
        guess = nearest(name, [*BUILTINS, *REFUSED])
        if guess in REFUSED:
            guess = None
        known = "the element-wise functions are " + " ".join(BUILTINS)
        help_ = f"did you mean `{guess}`?" if guess else None
        self.report.error("E0207", f"there is no function `{name}`", node.span, known, help=help_)

    def _method(self, node: syntax.MethodCall) -> None:
        name, bare = node.name, node.name.rstrip("_")
        module = module_of(node)
        if name in REFUSED or bare in REFUSED:
            self._coupling(name if name in REFUSED else bare, node)
        elif bare in {"min", "max"} and not _has_two_operands(node, module):
            message = f"`.{bare}()` is not element-wise: it takes the {bare}imum over all coordinates"
            help_ = f"of two values, it is element-wise: `{bare}(a, b)`"
            self.refuse("E0501", message, node, *self.hints.call_notes(bare, node), help=help_)
        elif module is not None and bare in BUILTINS:
            help_ = _call_in_words(bare, node.args, node.keywords)
            self.report.error(
                "E0208", f"functions are called by their name, without `{module}.`", node.span, help=help_
            )
        elif module is not None:
            self._unknown(name, node)
        else:
            spelled_here = _as_function(bare, node)
            self.report.error("E0506", f"values have no methods, and here is `.{name}()`", node.span, help=spelled_here)

    def _attribute(self, node: syntax.Attribute) -> None:
        module = module_of(node)
        if node.name in _TRANSPOSES:
            reason = "it moves every coordinate to another place"
            self.refuse("E0503", f"`.{node.name}` is not element-wise: {reason}", node)
        elif module == "self":
            self.names.read.add(node.name)
            message = "hypers, flags and states are plain names, without `self.`"
            self.report.error("E0208", message, node.span, help=f"write `{node.name}`")
        elif module is not None and node.name in _CONSTANTS:
            value = _CONSTANTS[node.name]
            spelled = f"write `{value}`" if value else "NaN is not a number one can write"
            self.report.error("E0208", f"there are no modules, and here is `{module}.`", node.span, help=spelled)
        elif node.name in _SHAPES:
            reason = "the update of one coordinate does not know the tensor around it"
            self.refuse("E0503", f"`.{node.name}` is not element-wise: {reason}", node)
        else:
            gradient = "the gradient at this coordinate is called `grad`" if node.name == "grad" else None
            self.report.error(
                "E0506", f"values have no attributes, and here is `.{node.name}`", node.span, help=gradient
            )

    def _subscript(self, node: syntax.Subscript) -> None:
        symbol = self.names.symbols.get(node.base.id) if isinstance(node.base, syntax.Name) else None
        if symbol is not None and symbol.arity is not None:
            names = ", ".join(f"b{i + 1}" for i in range(min(symbol.arity, 4)))
            help_ = f"take it apart with `let {names} = {symbol.name}`"
            self.report.error("E0306", f"the tuple `{symbol.name}` cannot be indexed", node.span, help=help_)
            return
        self.refuse("E0503", f"indexing is not element-wise: {papers.COORDINATE_ONLY}", node)


def _expressions(node: syntax.Statement) -> Iterator[syntax.Expr]:
    """The expressions of a statement, not those of the statements in its body."""
    match node:
        case syntax.Block(keyword="for"):
            return
        case syntax.Block(header=header):
            yield from header
        case _:
            stack: list[syntax.Node] = list(syntax.children(node))
            for child in stack:
                if isinstance(child, syntax.Bounds):
                    yield from (child.low, child.high)
                elif not isinstance(child, syntax.Statement):
                    yield child  # type: ignore[misc]


def _is_arrow(expr: syntax.Expr) -> bool:
    """Whether it is written like `m <- x`, which is a comparison with `-x`."""
    if not isinstance(expr, syntax.Compare) or expr.ops[0] != "<" or not isinstance(expr.operands[0], syntax.Name):
        return False
    inner: syntax.Node = expr.operands[1]
    while isinstance(inner, syntax.Binary):
        inner = inner.left
    return isinstance(inner, syntax.Unary) and inner.op == "-"


def _begins_with_sign(expr: syntax.Expr) -> bool:
    """Whether `expr` is written like the rest of a sum: `- lr * grad`."""
    while isinstance(expr, syntax.Binary):
        expr = expr.left
    return isinstance(expr, syntax.Unary) and expr.op in "+-"


def _has_two_operands(node: syntax.MethodCall, module: str | None) -> bool:
    """Whether `a.max(b)` or `torch.max(a, b)` compares values, and not along a dimension."""
    args = node.args if module is not None else (node.base, *node.args)
    return len(args) >= 2 and not node.keywords and not isinstance(args[1], syntax.Number | syntax.Unary)


def _parts(node: syntax.Node) -> Iterator[syntax.Node]:
    """What is looked at below `node`: not the modules of `torch.linalg.norm(x)`, which the call itself is refused
    with.
    """
    dotted = isinstance(node, syntax.MethodCall | syntax.Attribute) and module_of(node) is not None
    return (child for child in syntax.children(node) if not (dotted and child is node.base))  # type: ignore[attr-defined]


def _call_in_words(name: str, args: Sequence[syntax.Expr], keywords: Sequence[tuple[str, syntax.Expr]]) -> str:
    """How to write a call of a function that exists: with its arguments where they fit, else with its signature."""
    builtin = BUILTINS[name]
    given = dict(keywords)
    if name == "clamp" and 1 <= len(args) <= 3 and set(given) <= {"min", "max"}:
        bounds = dict(zip(("min", "max"), args[1:], strict=False)) | given
        if len(bounds) == 2:
            return f"write `{format_expr(syntax.Call(name, (args[0], bounds['min'], bounds['max'])))}`"
        for word, function in (("min", "max"), ("max", "min")):
            if word in bounds:
                return f"write `{format_expr(syntax.Call(function, (args[0], bounds[word])))}`"
    if not keywords and builtin.min_args <= len(args) <= builtin.max_args:
        return f"write `{format_expr(syntax.Call(name, tuple(args)))}`"
    return f"write `{name}({builtin.signature})`"


_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "multiply": "*",
    "divide": "/",
    "subtract": "-",
}


def _as_function(bare: str, node: syntax.MethodCall) -> str | None:
    """How to write a method call of torch: `sqrt(x)` for `x.sqrt()`, `m * 0.9` for `m.mul_(0.9)`."""
    if isinstance(node.base, syntax.MethodCall):
        return f"write `{SPELLED_OTHERWISE[bare]}`" if bare in SPELLED_OTHERWISE else None
    if bare in BUILTINS:
        return _call_in_words(bare, (node.base, *node.args), node.keywords)
    if bare in _OPERATORS and len(node.args) == 1 and not node.keywords:
        return f"write `{format_expr(syntax.Binary(_OPERATORS[bare], node.base, node.args[0]))}`"
    if SPELLED_OTHERWISE.get(bare) == "x":
        return f"write `{format_expr(node.base)}`"
    return f"write `{SPELLED_OTHERWISE[bare]}`" if bare in SPELLED_OTHERWISE else None


# ------------------------------------------------------------------ certificate


@dataclass(frozen=True, slots=True)
class Dependence:
    """What the new value of one stored tensor is computed from: tensors at the same coordinate, and scalars of the
    step.
    """

    target: str
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why a rule may be fused: per stored tensor what it depends on, and the operations that the rule is made of."""

    name: str
    statements: int
    dependences: tuple[Dependence, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(d.target) for d in self.dependences)
        count = "one statement uses" if self.statements == 1 else f"{self.statements} statements use"
        head = (
            f"{self.name} is element-wise separable: its {count} {' '.join(self.operations)}, each of which makes its "
            "result at a coordinate from its operands at that coordinate. So, statement by statement, every new value "
            "depends on these alone, all at the same coordinate:"
        )
        lines = textwrap.wrap(head, 100, break_on_hyphens=False, break_long_words=False)
        for d in self.dependences:
            scalars = f"   and the scalars {', '.join(d.scalars)}" if d.scalars else ""
            lines.append(f"    {d.target:<{width}} <- {', '.join(d.tensors) or 'no tensor'}{scalars}")
        return "\n".join(lines)


def certificate(checked: Checked) -> Certificate:
    """The dependences of a checked spec, over all of its variants."""
    states = [state.name for state in checked.states]
    known: dict[str, dict[str, None]] = {name: {name: None} for name in ("grad", "weight", *states)}
    stored: dict[str, None] = {}
    for node in checked.update:
        found: dict[str, None] = {}
        for read in reads(node.value):
            found.update(known.get(read.id, {read.id: None}))
        if node.when is not None and node.name in known:
            found = {**known[node.name], **found}
        known[node.name] = found
        if node.name == "weight" or node.name in states:
            stored[node.name] = None
    order = ["weight", *(name for name in states if name in stored)]
    tensors = {"weight", "grad", *states}
    dependences = []
    for name in order:
        inputs = [t for t in ("weight", "grad", *states) if t in known[name]]
        scalars = [s for s in known[name] if s not in tensors]
        dependences.append(Dependence(name, tuple(inputs), tuple(scalars)))
    return Certificate(checked.tree.name, len(checked.update), tuple(dependences), _operations(checked.update))


def _operations(update: Sequence[syntax.Assign]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for statement in update:
        for node in syntax.walk(statement):
            match node:
                case syntax.Binary(op=op) | syntax.Unary(op=op) | syntax.Logical(op=op):
                    found[op] = None
                case syntax.Compare(ops=ops):
                    found.update(dict.fromkeys(ops))
                case syntax.Conditional():
                    found["if/else"] = None
                case syntax.Call(function=function) if function != "first":
                    found[function] = None
    return tuple(found) or ("=",)
