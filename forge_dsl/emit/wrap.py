"""Breaking a long line of Python where a formatter would: arguments one a line, operators at the beginning of lines."""

from __future__ import annotations

import re

from forge_dsl.emit.layout import WIDTH

_STRING = re.compile(r"""\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""")
# From the loosest: a line is broken at the first kind that occurs outside brackets.
_OPERATORS = (
    (" if ", " else "),
    (" or ",),
    (" and ",),
    (" < ", " <= ", " > ", " >= ", " == ", " != "),
    (" | ",),
    (" & ",),
    (" + ", " - "),
    (" * ", " / ", " % "),
    (" ** ",),
)


def wrap(head: str, body: str, tail: str, indent: int) -> list[str]:
    """`head + body + tail` at `indent`, on as many lines as it needs; `body` is an expression."""
    line = " " * indent + head + body + tail
    if len(line) <= WIDTH:
        return [line]
    if _is_call(body):
        return _call(head, body, tail, indent)
    parts = split(body)
    if not parts:
        return [line]
    (_, first), (operator, last) = parts[0], parts[-1]
    opening = f"{head}{first} {operator}{last[: last.find('(') + 1]}"
    if len(parts) == 2 and operator not in {"if ", "else "} and indent + len(opening) <= WIDTH and _is_bracketed(last):
        # One operator before a bracket: the bracket's own lines are enough.
        return _operand(f"{head}{first} {operator}", last, indent, tail)
    return [" " * indent + head + "(", *lines_inside(body, indent + 4), " " * indent + ")" + tail]


def lines_inside(body: str, indent: int) -> list[str]:
    """An expression inside brackets: it may break at its operators without brackets of its own."""
    if indent + len(body) <= WIDTH:
        return [" " * indent + body]
    parts = split(body)
    if not parts:
        return _operand("", body, indent)
    lines: list[str] = []
    for operator, operand in parts:
        lines += _operand(operator, operand, indent)
    return lines


def _operand(operator: str, operand: str, indent: int, tail: str = "") -> list[str]:
    if indent + len(operator) + len(operand) + len(tail) <= WIDTH:
        return [" " * indent + operator + operand + tail]
    if _is_call(operand):
        return _call(operator, operand, tail, indent)
    if _is_bracketed(operand):
        return [" " * indent + operator + "(", *lines_inside(operand[1:-1], indent + 4), " " * indent + ")" + tail]
    sign = operand[:1] if operand[:1] in {"-", "~"} else ""
    parts = split(operand[len(sign) :])
    if not parts:
        inner = operand[len(sign) :]
        return _operand(operator + sign, inner, indent) if sign else [" " * indent + operator + operand]
    first, *rest = parts
    lines = _operand(operator + sign, first[1], indent)
    for tighter, factor in rest:
        lines += _operand(tighter, factor, indent)
    return lines


def _call(head: str, body: str, tail: str, indent: int) -> list[str]:
    opening = body.index("(")
    arguments = _arguments(body[opening + 1 : -1])
    pad, single = " " * (indent + 4), ", ".join(arguments)
    lines = [" " * indent + head + body[: opening + 1]]
    if len(pad) + len(single) <= WIDTH:
        lines.append(pad + single)
    else:
        for argument in arguments:
            lines += item(argument, ",", indent + 4)
    return [*lines, " " * indent + ")" + tail]


def item(body: str, tail: str, indent: int) -> list[str]:
    """An expression that stands in a list, with the comma or comment behind it."""
    if indent + len(body) + len(tail) <= WIDTH:
        return [" " * indent + body + tail]
    if _is_call(body):
        return _call("", body, tail, indent)
    lines = lines_inside(body, indent)
    return [*lines[:-1], lines[-1] + tail]


def split(body: str) -> list[tuple[str, str]]:
    """The operands of the loosest operators outside brackets, each with the operator before it; empty if none."""
    text = _masked(body)
    for operators in _OPERATORS:
        found: list[tuple[str, str]] = []
        depth, start, before, index = 0, 0, "", 0
        while index < len(text):
            depth += text[index] in "([{"
            depth -= text[index] in ")]}"
            operator = next((op for op in operators if depth == 0 and text.startswith(op, index)), None)
            if operator is None:
                index += 1
                continue
            found.append((before, body[start:index]))
            before, start = operator.lstrip(), index + len(operator)
            index = start
        if found:
            return [*found, (before, body[start:])]
    return []


def _is_bracketed(body: str) -> bool:
    return _is_call(body) or (body.startswith("(") and _closing(body, 0) == len(body) - 1)


def _is_call(body: str) -> bool:
    opening = body.find("(")
    if opening < 0 or _closing(body, opening) != len(body) - 1:
        return False
    # `f(x)`, `a.f(x)`, `name=f(x)`; a tuple breaks as a call does.
    name = body[:opening].replace(".", "").replace("=", "")
    return name.isidentifier() or (name == "" and len(_arguments(body[1:-1])) > 1)


def _closing(body: str, opening: int) -> int:
    """Where the bracket at `opening` closes."""
    depth, text = 0, _masked(body)
    for index in range(opening, len(text)):
        depth += text[index] in "([{"
        depth -= text[index] in ")]}"
        if depth == 0:
            return index
    raise AssertionError("brackets are balanced")


def _arguments(inside: str) -> list[str]:
    """The items of a list, commas inside brackets and strings left alone."""
    found, depth, start = [], 0, 0
    for index, char in enumerate(_masked(inside)):
        depth += char in "([{"
        depth -= char in ")]}"
        if char == "," and depth == 0:
            found.append(inside[start:index].strip())
            start = index + 1
    return [*found, inside[start:].strip()]


def _masked(body: str) -> str:
    """`body` with nothing in its strings that could be taken for an operator or a bracket."""
    return _STRING.sub(lambda found: "_" * len(found[0]), body)
