"""The canonical printer of whole specs: aligned declarations, comments kept. `parse(format_spec(tree)) == tree`.

Consecutive declarations of one kind are set in columns, and so are the `=` of consecutive statements, except after long
names. A statement too long for a line is broken inside parentheses, at its loosest operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from forge_dsl.language import syntax
from forge_dsl.language.format_expr import broken, format_expr

__all__ = ["format_expr", "format_spec"]

WIDTH = 120
INDENT = "  "
# What stands before an `=` and is longer than this stands out of the column instead of widening it.
LONG_HEAD = 13
_COLUMNS = (syntax.Hyper, syntax.Flag, syntax.State, syntax.Scalar)

Comments = tuple[str | None, ...]


def format_spec(tree: syntax.Spec) -> str:
    """The text of a spec in canonical form. Formatting it again changes nothing."""
    lines: list[str] = []
    lines += _comments(tree.leading, "", lines)
    lines.append(f"optimizer {tree.name}{_trailing(tree.trailing)}")
    _statements(tree.declarations, "", lines)
    # A blank line sets the rule itself apart.
    lines += _comments((None, *tree.update_leading), "", lines)
    lines.append(f"update:{_trailing(tree.update_trailing)}")
    _statements(tree.update, INDENT, lines, first_in_block=True)
    lines += _comments(tree.closing, INDENT, lines)
    lines += _comments(tree.footer, "", lines)
    return "\n".join(lines).rstrip("\n") + "\n"


def _statements(nodes: Sequence[syntax.Statement], indent: str, lines: list[str], first_in_block: bool = False) -> None:
    for run in _runs(nodes):
        leading = run[0].leading
        if first_in_block and run[0] is nodes[0]:
            leading = tuple(_without_first_blanks(leading))
        lines += _comments(leading, indent, lines)
        for node, text in zip(run, _run(run, indent), strict=True):
            lines.append(f"{indent}{text}{_trailing(node.trailing)}")
            if isinstance(node, syntax.Block):
                _statements(node.body, indent + INDENT, lines, first_in_block=True)


def _runs(nodes: Sequence[syntax.Statement]) -> Iterator[list[syntax.Statement]]:
    """Statements of one sort that follow each other without a comment or a blank line between."""
    run: list[syntax.Statement] = []
    for node in nodes:
        if run and (node.leading or _sort(node) is not _sort(run[0])):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _sort(node: syntax.Statement) -> type[syntax.Statement]:
    return syntax.Assign if isinstance(node, syntax.Let) else type(node)


def _run(run: Sequence[syntax.Statement], indent: str) -> list[str]:
    if isinstance(run[0], _COLUMNS):
        return _aligned([_cells(node) for node in run])
    width = max((len(head) for head in map(_head, run) if len(head) <= LONG_HEAD), default=0)
    return [_statement(node, width, indent) for node in run]


def _head(node: syntax.Statement) -> str:
    """What stands before the `=` that is set in a column; a `let` that takes a tuple apart stands out of it."""
    match node:
        case syntax.Let(names=(name,)):
            return f"let {name}"
        case syntax.Assign(name=name):
            return name
    return ""


# ------------------------------------------------------------------ declarations in columns


def _cells(node: syntax.Statement) -> tuple[str, str, str, str]:
    """The columns of a declaration: kind and name, initial value, range, condition; empty where absent."""
    match node:
        case syntax.Hyper(name=name, default=default, ranges=ranges):
            return f"hyper {name}", _initial(default), _ranges(ranges), ""
        case syntax.Flag(name=name, default=default):
            return f"flag  {name}", _initial(default), "", ""
        case syntax.State(name=name, initial=initial, domain=domain, when=when):
            return f"state {name}", _initial(initial), _ranges([domain] if domain else []), _when(when)
        case syntax.Scalar(name=name, initial=initial, domain=domain):
            return f"scalar {name}", _initial(initial), _ranges([domain] if domain else []), ""
    raise TypeError(type(node).__name__)


def _initial(value: syntax.Expr | None) -> str:
    return "" if value is None else f"= {format_expr(value)}"


def _ranges(ranges: Iterable[syntax.Bounds]) -> str:
    texts = [
        f"{'(' if r.low_open else '['}{format_expr(r.low)}, {format_expr(r.high)}{')' if r.high_open else ']'}"
        for r in ranges
    ]
    return f"in {', '.join(texts)}" if texts else ""


def _when(condition: syntax.Expr | None) -> str:
    return "" if condition is None else f"when {format_expr(condition)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows with their cells in columns. Only a cell that something follows widens its column; a condition takes the
    column of a range that is absent."""
    cells = [(a, b, c, d) if c else (a, b, d, "") for a, b, c, d in rows]
    widths = [max((len(row[i]) for row in cells if any(row[i + 1 :])), default=0) for i in range(4)]
    starts, end, gap = [0], widths[0], 1
    for width in widths[1:]:
        # One blank after a name, two after a value: `lr = 1e-3  in [0, inf)`.
        starts.append(end + gap)
        if width:
            end, gap = starts[-1] + width, 2
    lines = []
    for row in cells:
        text = ""
        for start, cell in zip(starts, row, strict=True):
            text = text.ljust(start) + cell if cell else text
        lines.append(text)
    return lines


# ------------------------------------------------------------------ statements


def _statement(node: syntax.Statement, width: int, indent: str) -> str:
    match node:
        case syntax.Let(names=names, value=value):
            head = _head(node).ljust(width) if len(names) == 1 else f"let {', '.join(names)}"
            return _fitted(f"{head} = ", value, "", indent)
        case syntax.Assign(name=name, value=value, when=when):
            return _fitted(f"{name:<{width}} = ", value, f"  {_when(when)}" if when is not None else "", indent)
        case syntax.Require(condition=condition, message=message):
            return _fitted("require ", condition, f', "{_escaped(message)}"', indent)
        case syntax.AugmentedAssign(name=name, op=op, value=value):
            return _fitted(f"{name} {op} ", value, "", indent)
        case syntax.ExpressionStatement(value=value):
            return format_expr(value)
        case syntax.Block():
            return _block_header(node)
    raise TypeError(type(node).__name__)


def _block_header(node: syntax.Block) -> str:
    if node.keyword == "for":
        *names, iterable = node.header
        return f"for {', '.join(format_expr(name) for name in names)} in {format_expr(iterable)}:"
    return " ".join([node.keyword, *(format_expr(part) for part in node.header)]) + ":"


def _fitted(head: str, value: syntax.Expr, tail: str, indent: str) -> str:
    """`head value tail` on one line if it fits, else with the value broken inside parentheses."""
    line = f"{head}{format_expr(value)}{tail}"
    if len(indent) + len(line) <= WIDTH:
        return line
    parts = broken(value)
    if parts is None:
        return line
    opening, pieces, closing = parts
    inner = "".join(f"\n{indent}{INDENT}{piece}" for piece in pieces)
    return f"{head}{opening}{inner}\n{indent}{closing}{tail}"


def _escaped(message: str) -> str:
    return message.replace("\\", "\\\\").replace('"', '\\"')


# ------------------------------------------------------------------ comments


def _comments(leading: Iterable[str | None], indent: str, above: Sequence[str]) -> list[str]:
    """Comment lines; a blank line is kept as one, but not at the top of the file."""
    lines: list[str] = []
    for is_blank, group in groupby(leading, key=lambda text: text is None):
        if is_blank:
            lines += [""] if lines or above else []
        else:
            lines += [f"{indent}# {text}" if text else f"{indent}#" for text in group]
    return lines


def _without_first_blanks(leading: Comments) -> Iterator[str | None]:
    seen = False
    for text in leading:
        seen = seen or text is not None
        if seen:
            yield text


def _trailing(comment: str | None) -> str:
    if comment is None:
        return ""
    return f"  # {comment}" if comment else "  #"
