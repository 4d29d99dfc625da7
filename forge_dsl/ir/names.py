"""Names for what the author wrote without one, switches and table entries: they are read in code and in tracebacks."""

from __future__ import annotations

import keyword
from collections.abc import Container

from forge_dsl.language import syntax

_WORDS = {"0": "zero", "1": "one", "2": "two", "0.5": "half"}
_COMPARE = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_LONGEST = 44


def phrase(expr: syntax.Expr) -> str:
    """An identifier that says what `expr` is: `1 - beta1` is `one_minus_beta1`, `lr / bias1` is `lr_over_bias1`."""
    match expr:
        case syntax.Name(id=name):
            return name
        case syntax.Number(value=value):
            text = f"{value:g}"
            return _WORDS.get(text, text.replace(".", "p").replace("-", "m").replace("+", ""))
        case syntax.Boolean(value=truth):
            return "true" if truth else "false"
        case syntax.Unary(op=op, operand=operand):
            return {"-": "minus_", "not": "not_", "+": ""}[op] + phrase(operand)
        case syntax.Binary(op="/", left=syntax.Number(value=1), right=right):
            return "inv_" + phrase(right)
        case syntax.Binary(op=op, left=left, right=right):
            joint = {"+": "_plus_", "-": "_minus_", "*": "_", "/": "_over_", "%": "_mod_", "**": "_to_"}[op]
            return phrase(left) + joint + phrase(right)
        case syntax.Compare(operands=operands, ops=ops):
            tail = "".join(f"_{_COMPARE[op]}_{phrase(right)}" for op, right in zip(ops, operands[1:], strict=True))
            return phrase(operands[0]) + tail
        case syntax.Logical(op=op, operands=operands):
            return f"_{op}_".join(map(phrase, operands))
        case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
            return f"{phrase(then)}_if_{phrase(condition)}_else_{phrase(otherwise)}"
        case syntax.Call(function=function, args=args):
            return "_".join([function, *map(phrase, args)])
    return "scalar"


def distinct(wanted: str, taken: Container[str]) -> str:
    """`wanted`, with a number behind it where it is in `taken` or a keyword."""
    name, number = wanted, 1
    while name in taken or keyword.iskeyword(name):
        number += 1
        name = f"{wanted}_{number}"
    return name


class Namer:
    """Hands out identifiers that are distinct from each other and from everything in `taken`."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = set(taken)

    def fresh(self, wanted: str, fallback: str = "scalar") -> str:
        """`wanted` if it is a free and short identifier, else a numbered name."""
        if len(wanted) > _LONGEST or not wanted.isidentifier() or keyword.iskeyword(wanted):
            wanted = fallback
        name = distinct(wanted, self._taken)
        self._taken.add(name)
        return name


def switch_phrase(expr: syntax.Expr) -> str:
    """The name of a switch: a flag's own, `has_momentum` for `momentum != 0` and `momentum > 0`, else a phrase."""
    match expr:
        case syntax.Compare(operands=(syntax.Name(id=name), syntax.Number(value=0)), ops=("!=" | ">",)):
            return f"has_{name}"
    return phrase(expr)
