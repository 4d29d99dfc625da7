"""The syntax tree of a `.opt` file: frozen nodes, each with the place it came from.

Equality ignores spans and comments, so `parse(format(tree)) == tree` states that printing loses no meaning; the
formatter itself reads both. Nodes under "refused" exist so that a diagnostic can speak about what the author tried to
write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of the source: offsets in characters, lines and columns from 1."""

    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int


NOWHERE = Span(0, 0, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Node:
    """Base of every node; `span` takes no part in equality or hashing."""

    span: Span = field(default=NOWHERE, compare=False, kw_only=True, repr=False)


# ------------------------------------------------------------------ expressions


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal. `value` is what it means, `text` how it was written (`1e-8`, `0.9`, `2`, `inf`)."""

    value: float
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Boolean(Node):
    """`true` or `false`."""

    value: bool


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A variable: hyper, flag, state, scalar, let, local, `step`, `grad` or `weight`."""

    id: str


@dataclass(frozen=True, slots=True)
class Unary(Node):
    """`-x`, `+x` or `not x`."""

    op: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """`+ - * / % **`; also `@` and `//`, which are refused."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Compare(Node):
    """A chain `a < b <= c`: n + 1 operands, n operators out of `< <= > >= == !=`."""

    operands: tuple[Expr, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Logical(Node):
    """`a and b and c`, or the same with `or`."""

    op: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Conditional(Node):
    """`then if condition else otherwise`."""

    then: Expr
    condition: Expr
    otherwise: Expr


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`function(args)`. Keyword arguments parse so that their refusal can name them."""

    function: str
    args: tuple[Expr, ...]
    keywords: tuple[tuple[str, Expr], ...] = ()
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tuple(Node):
    """`(a, b)`: legal only as the default of a hyper."""

    items: tuple[Expr, ...]


# Refused expressions.


@dataclass(frozen=True, slots=True)
class Subscript(Node):
    """`x[i - 1]`."""

    base: Expr
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Attribute(Node):
    """`m.T`."""

    base: Expr
    name: str


@dataclass(frozen=True, slots=True)
class MethodCall(Node):
    """`g.norm(2)`."""

    base: Expr
    name: str
    args: tuple[Expr, ...]
    keywords: tuple[tuple[str, Expr], ...] = ()


Expr = (
    Number
    | Boolean
    | Name
    | Unary
    | Binary
    | Compare
    | Logical
    | Conditional
    | Call
    | Tuple
    | Subscript
    | Attribute
    | MethodCall
)


# ------------------------------------------------------------------ statements


@dataclass(frozen=True, slots=True)
class Bounds(Node):
    """`[low, high)`: the range of a hyper or the domain of a state."""

    low: Expr
    high: Expr
    low_open: bool
    high_open: bool


@dataclass(frozen=True, slots=True)
class Statement(Node):
    """Base of statements. `leading` are the comment lines above (without `#`), `trailing` the one at the end of the
    line.

    A blank line between comments or statements is kept as `None` in `leading`.
    """

    leading: tuple[str | None, ...] = field(default=(), compare=False, kw_only=True, repr=False)
    trailing: str | None = field(default=None, compare=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Hyper(Statement):
    """`hyper name = default in range`; `ranges` has one entry, or one per element of a tuple default."""

    name: str
    default: Expr | None
    ranges: tuple[Bounds, ...] = ()
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Flag(Statement):
    """`flag name = true|false`."""

    name: str
    default: Expr | None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class State(Statement):
    """`state name [= initial] [in domain] [when condition]`."""

    name: str
    initial: Expr | None = None
    domain: Bounds | None = None
    when: Expr | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Scalar(Statement):
    """`scalar name = initial`: a number of this weight that is carried from step to step."""

    name: str
    initial: Expr | None = None
    domain: Bounds | None = None
    when: Expr | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Let(Statement):
    """`let a, b = expr`: several names unpack a tuple hyper."""

    names: tuple[str, ...]
    value: Expr
    name_spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Require(Statement):
    """`require condition, "message"`."""

    condition: Expr
    message: str


@dataclass(frozen=True, slots=True)
class Assign(Statement):
    """`name = expr [when condition]`: in `update:` a local, state or the weight; among the lets a recurrent scalar."""

    name: str
    value: Expr
    when: Expr | None = None
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)


# Refused statements.


@dataclass(frozen=True, slots=True)
class AugmentedAssign(Statement):
    """`x += y`."""

    name: str
    op: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Block(Statement):
    """`if c:`, `elif c:`, `else:`, `for i in x:` or `while c:` with an indented body."""

    keyword: str
    header: tuple[Expr, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class ExpressionStatement(Statement):
    """A bare expression, such as `grad.clamp_(-1, 1)`."""

    value: Expr


Declaration = Hyper | Flag | State | Scalar | Let | Require | Assign


@dataclass(frozen=True, slots=True)
class Spec(Node):
    """One file. `leading` are the comments above `optimizer`; after the last statement come those in `closing`, which
    are indented like it, and those in `footer`.
    """

    name: str
    declarations: tuple[Statement, ...]
    update: tuple[Statement, ...]
    name_span: Span = field(default=NOWHERE, compare=False, repr=False)
    leading: tuple[str | None, ...] = field(default=(), compare=False, repr=False)
    trailing: str | None = field(default=None, compare=False, repr=False)
    update_leading: tuple[str | None, ...] = field(default=(), compare=False, repr=False)
    update_trailing: str | None = field(default=None, compare=False, repr=False)
    closing: tuple[str | None, ...] = field(default=(), compare=False, repr=False)
    footer: tuple[str | None, ...] = field(default=(), compare=False, repr=False)


def children(node: Node) -> Iterator[Node]:
    """The nodes directly below `node`, in source order."""
    for item in fields(node):
        yield from _nodes(getattr(node, item.name))


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple):
        for element in value:
            yield from _nodes(element)


def walk(node: Node) -> Iterator[Node]:
    """`node` and everything below it, parents first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(list(children(current))))
