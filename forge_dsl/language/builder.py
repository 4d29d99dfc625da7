"""From Lark's tree of one logical line to a syntax node. Bottom up and without recursion, so that depth is bounded
here.

What a node cannot represent (a slice, `a, b = c`, a `when` on a `let`) is reported here, in words for its author.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lark import Token, Tree

from forge_dsl.diagnostics import Diagnostic
from forge_dsl.language import syntax
from forge_dsl.language.source import MAX_DEPTH, SourceText
from forge_dsl.language.syntax import NOWHERE, Span

SLICE = (
    "the update of one coordinate sees that coordinate of the weight, the gradient and the states, and has no position"
)
# What stands in the text and not in the tree is not counted as nesting.
_FLAT = frozenset({"group", "arguments", "index"})
_CHAINS = frozenset({"compare", "logical"})
_ESCAPES = {'\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True, slots=True)
class OptimizerLine(syntax.Statement):
    """`optimizer NAME`."""

    name: str
    name_span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class UpdateLine(syntax.Statement):
    """`update:`."""


def _levels(node: Tree[Token]) -> int:
    """How many levels of nesting an operation is; a chain becomes one for each of its links."""
    return len(node.children) // 2 if node.data in _CHAINS else int(node.data not in _FLAT)


class Refused(Exception):
    """A line parses but cannot become a node; carries the diagnostic."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.diagnostic = diagnostic


class Builder:
    """Makes nodes for the lines of one source. Raises Refused."""

    def __init__(self, source: SourceText) -> None:
        self._source = source

    def build(self, tree: Tree[Token] | Token) -> syntax.Node:
        """The node of a whole line."""
        if isinstance(tree, Token):
            raise TypeError("a line is never a single token")
        order: list[Tree[Token]] = [tree]
        for parent in order:
            order.extend(child for child in parent.children if isinstance(child, Tree))
        values: dict[int, Any] = {}
        depths: dict[int, int] = {}
        for node in reversed(order):
            depth = _levels(node) + max((depths[id(c)] for c in node.children if isinstance(c, Tree)), default=0)
            children = [values[id(c)] if isinstance(c, Tree) else c for c in node.children]
            if depth > MAX_DEPTH:
                message = f"this expression is nested more than {MAX_DEPTH} deep; name a part of it"
                raise self._refuse("E0004", message, self._cover(children))
            depths[id(node)] = depth
            make: Callable[[list[Any]], Any] = getattr(self, f"_{node.data}")
            values[id(node)] = make(children)
        result = values[id(tree)]
        assert isinstance(result, syntax.Node)
        return result

    # -------------------------------------------------------------- places

    def _cover(self, parts: Sequence[Any]) -> Span:
        """The span from the first to the last of `parts` (tokens, nodes, lists of them, Nones)."""
        present = [part for part in parts if part is not None and part != []]
        return self._source.span(_start(present[0]), _end(present[-1]))

    def _token(self, token: Token) -> Span:
        return self._cover([token])

    def _refuse(self, code: str, message: str, span: Span, help_: str | None = None) -> Refused:
        return Refused(Diagnostic(code, "error", message, span, (), help_))

    # -------------------------------------------------------------- lines

    def _optimizer(self, parts: list[Any]) -> OptimizerLine:
        return OptimizerLine(str(parts[1]), self._token(parts[1]), span=self._cover(parts))

    def _update(self, parts: list[Any]) -> UpdateLine:
        return UpdateLine(span=self._cover(parts))

    def _declaration(self, parts: list[Any]) -> syntax.Statement:
        kind, name, _, initial, in_, ranges, when, condition = parts
        span, name_span = self._cover(parts), self._token(name)
        if isinstance(initial, list):
            raise self._refuse_bare_tuple(initial)
        if ranges is not None and (kind == "flag" or (kind in {"state", "scalar"} and len(ranges) > 1)):
            what = "a flag has no range" if kind == "flag" else f"a {kind} has one range"
            raise self._refuse("E0112", what, self._cover([in_, *ranges]))
        if when is not None and kind != "state":
            help_ = "only a state can exist conditionally; a choice among values is written `a if c else b`"
            raise self._refuse("E0112", f"a {kind} takes no `when`", self._cover([when, condition]), help_)
        if kind == "hyper":
            return syntax.Hyper(str(name), initial, tuple(ranges or ()), name_span, span=span)
        if kind == "flag":
            return syntax.Flag(str(name), initial, name_span, span=span)
        node = syntax.State if kind == "state" else syntax.Scalar
        return node(str(name), initial, ranges[0] if ranges else None, condition, name_span, span=span)

    def _let(self, parts: list[Any]) -> syntax.Let:
        _, names, _, value, when, condition = parts
        if isinstance(value, list):
            raise self._refuse_bare_tuple(value)
        if when is not None:
            help_ = "write `let x = a if c else b`"
            raise self._refuse("E0112", "a `let` takes no `when`", self._cover([when, condition]), help_)
        spans = tuple(self._token(name) for name in names)
        return syntax.Let(tuple(str(name) for name in names), value, spans, span=self._cover(parts))

    def _require(self, parts: list[Any]) -> syntax.Require:
        _, condition, _, message = parts
        if message is None:
            help_ = 'write `require condition, "what the user must do"`'
            raise self._refuse("E0112", "`require` needs a message", self._cover(parts), help_)
        return syntax.Require(condition, self._unescape(message), span=self._cover(parts))

    def _assign(self, parts: list[Any]) -> syntax.Assign:
        targets, _, value, _, when = parts
        if len(targets) > 1:
            help_ = "assign one name a line; only `let` unpacks a tuple: `let a, b = betas`"
            raise self._refuse("E0113", "an assignment has one name on its left", self._cover(targets), help_)
        target = targets[0]
        if not isinstance(target, syntax.Name):
            raise self._refuse("E0113", *_bad_target(target))
        if isinstance(value, list):
            raise self._refuse_bare_tuple(value)
        return syntax.Assign(target.id, value, when, target.span, span=self._cover(parts))

    def _augmented(self, parts: list[Any]) -> syntax.AugmentedAssign:
        target, op, value = parts
        if not isinstance(target, syntax.Name):
            raise self._refuse("E0113", *_bad_target(target))
        return syntax.AugmentedAssign(target.id, str(op), value, span=self._cover(parts))

    def _block(self, parts: list[Any]) -> syntax.Block:
        keyword, *header, _ = parts
        if keyword == "for":
            names, _, iterable = header
            header = [*(syntax.Name(str(name), span=self._token(name)) for name in names), iterable]
        return syntax.Block(str(keyword), tuple(header), (), span=self._cover(parts))

    def _expression(self, parts: list[Any]) -> syntax.ExpressionStatement:
        return syntax.ExpressionStatement(parts[0], span=self._cover(parts))

    def _refuse_bare_tuple(self, items: list[Any]) -> Refused:
        help_ = "a tuple is written in parentheses: `hyper betas = (0.9, 0.999)`"
        return self._refuse("E0112", "one value is expected here", self._cover(items), help_)

    # -------------------------------------------------------------- parts of lines

    def _names(self, parts: list[Any]) -> list[Token]:
        return [part for part in parts if part.type == "NAME"]

    def _nodes(self, parts: list[Any]) -> list[Any]:
        return [part for part in parts if not isinstance(part, Token)]

    _targets = _ranges = _bare_tuple = _nodes

    def _range(self, parts: list[Any]) -> syntax.Bounds:
        left, low, _, high, right = parts
        return syntax.Bounds(low, high, left == "(", right == ")", span=self._cover(parts))

    def _unescape(self, token: Token) -> str:
        text, out, position = str(token), [], 1
        while position < len(text) - 1:
            if text[position] == "\\":
                pair = text[position : position + 2]
                if pair not in _ESCAPES:
                    start = token.start_pos or 0
                    span = self._source.span(start + position, start + position + 2)
                    help_ = 'only `\\"` and `\\\\` are known'
                    raise self._refuse("E0104", f"unknown escape `{pair}` in a message", span, help_)
                out.append(_ESCAPES[pair])
                position += 2
            else:
                out.append(text[position])
                position += 1
        return "".join(out)

    # -------------------------------------------------------------- expressions

    def _conditional(self, parts: list[Any]) -> syntax.Conditional:
        then, _, condition, _, otherwise = parts
        return syntax.Conditional(then, condition, otherwise, span=self._cover(parts))

    def _logical(self, parts: list[Any]) -> syntax.Logical:
        return syntax.Logical(str(parts[1]), tuple(parts[::2]), span=self._cover(parts))

    def _unary(self, parts: list[Any]) -> syntax.Unary:
        return syntax.Unary(str(parts[0]), parts[1], span=self._cover(parts))

    def _compare(self, parts: list[Any]) -> syntax.Compare:
        return syntax.Compare(tuple(parts[::2]), tuple(str(op) for op in parts[1::2]), span=self._cover(parts))

    def _binary(self, parts: list[Any]) -> syntax.Binary:
        left, op, right = parts
        return syntax.Binary(str(op), left, right, span=self._cover(parts))

    def _subscript(self, parts: list[Any]) -> syntax.Subscript:
        indices = [part for part in parts[2:-1] if part is not None and not isinstance(part, Token)]
        if not all(isinstance(index, syntax.Node) for index in indices):
            raise self._refuse("E0503", f"slicing is not element-wise: {SLICE}", self._cover(parts))
        return syntax.Subscript(parts[0], tuple(indices), span=self._cover(parts))

    def _index(self, parts: list[Any]) -> Any:
        single = len(parts) == 1 and isinstance(parts[0], syntax.Node)
        return parts[0] if single else [part for part in parts if part is not None]

    def _attribute(self, parts: list[Any]) -> syntax.Attribute:
        return syntax.Attribute(parts[0], str(parts[2]), span=self._cover(parts))

    def _method(self, parts: list[Any]) -> syntax.MethodCall:
        base, _, name, _, arguments, _ = parts
        args, keywords = arguments or ((), ())
        return syntax.MethodCall(base, str(name), args, keywords, span=self._cover(parts))

    def _call(self, parts: list[Any]) -> syntax.Call:
        name, _, arguments, _ = parts
        args, keywords = arguments or ((), ())
        return syntax.Call(str(name), args, keywords, self._token(name), span=self._cover(parts))

    def _arguments(self, parts: list[Any]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        args = tuple(part for part in parts if isinstance(part, syntax.Node))
        return args, tuple(part for part in parts if isinstance(part, tuple))

    def _keyword(self, parts: list[Any]) -> tuple[str, Any]:
        return str(parts[0]), parts[2]

    def _number(self, parts: list[Any]) -> syntax.Number:
        return syntax.Number(float(parts[0]), str(parts[0]), span=self._cover(parts))

    def _boolean(self, parts: list[Any]) -> syntax.Boolean:
        return syntax.Boolean(parts[0] == "true", span=self._cover(parts))

    def _name(self, parts: list[Any]) -> syntax.Name:
        return syntax.Name(str(parts[0]), span=self._cover(parts))

    def _group(self, parts: list[Any]) -> syntax.Node:
        inner: syntax.Node = parts[1]
        return replace(inner, span=self._cover(parts))

    def _tuple(self, parts: list[Any]) -> syntax.Tuple:
        items: tuple[Any, ...] = tuple(part for part in parts if isinstance(part, syntax.Node))
        return syntax.Tuple(items, span=self._cover(parts))


def _start(part: Any) -> int:
    if isinstance(part, Token):
        return part.start_pos or 0
    if isinstance(part, list | tuple):
        return _start(part[0])
    return int(part.span.start)


def _end(part: Any) -> int:
    if isinstance(part, Token):
        return part.end_pos or 0
    if isinstance(part, list | tuple):
        return _end(part[-1])
    return int(part.span.end)


def _bad_target(target: syntax.Node) -> tuple[str, Span, str]:
    """Message, place and help for a left-hand side that is not a name."""
    match target:
        case syntax.Subscript(base=syntax.Name(id=name)):
            help_ = f"every coordinate is updated alike: write `{name} = ...`"
        case syntax.Attribute(name=name):
            help_ = f"states are plain names here: write `{name} = ...`"
        case _:
            help_ = "write `name = expression`"
    return "only a name can be assigned", target.span, help_
