"""Expression text with precedence, so that printers write as few parentheses as a person would."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forge_dsl.ir.passes.fold import round_fp32

TERNARY, OR, AND, NOT, COMPARE, BIT_OR, BIT_AND, ADD, MUL, UNARY, POWER, ATOM = range(12)
_BINARY = {"+": ADD, "-": ADD, "*": MUL, "/": MUL, "%": MUL, "&": BIT_AND, "|": BIT_OR}
_SIMPLE = re.compile(r"-?[\w.]+")


@dataclass(frozen=True, slots=True)
class Text:
    """Source text and the precedence of its outermost operator."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The text, in parentheses if it binds more loosely than `level`."""
        return self.text if self.level >= level else f"({self.text})"


def binary(op: str, left: Text, right: Text) -> Text:
    """A left-associative operator."""
    level = _BINARY[op]
    return Text(f"{left.at(level)} {op} {right.at(level + 1)}", level)


def power(base: Text, exponent: Text) -> Text:
    """`base ** exponent`, without spaces around simple operands, as formatters write it."""
    left, right = base.at(ATOM), exponent.at(UNARY)
    simple = _SIMPLE.fullmatch(left) and _SIMPLE.fullmatch(right)
    return Text(f"{left}**{right}" if simple else f"{left} ** {right}", POWER)


def negate(operand: Text) -> Text:
    """`-operand`."""
    return Text(f"-{operand.at(UNARY)}", UNARY)


def invert(operand: Text) -> Text:
    """`~operand`: not, for boolean tensors."""
    return Text(f"~{operand.at(UNARY)}", UNARY)


def logical_not(operand: Text) -> Text:
    """`not operand`."""
    return Text(f"not {operand.at(NOT)}", NOT)


def join(op: str, operands: list[Text]) -> Text:
    """`a and b and c`, or with `or`."""
    level = AND if op == "and" else OR
    return Text(f" {op} ".join(operand.at(level + 1) for operand in operands), level)


def compare(op: str, left: Text, right: Text) -> Text:
    """`left op right`."""
    return Text(f"{left.at(COMPARE + 1)} {op} {right.at(COMPARE + 1)}", COMPARE)


def ternary(then: Text, condition: Text, otherwise: Text) -> Text:
    """`then if condition else otherwise`."""
    return Text(f"{then.at(TERNARY + 1)} if {condition.at(TERNARY + 1)} else {otherwise.at(TERNARY)}", TERNARY)


def call(function: str, *args: Text | str) -> Text:
    """`function(args)`."""
    return Text(f"{function}({', '.join(arg if isinstance(arg, str) else arg.text for arg in args)})")


def number(value: float, whole: bool = False) -> Text:
    """A literal: the shortest that reads back as `value`; whole numbers without a point if `whole`."""
    if math.isnan(value):
        return Text('float("nan")')
    if math.isinf(value):
        return Text('float("inf")') if value > 0 else Text('-float("inf")', UNARY)
    short = whole and value.is_integer() and abs(value) < 2**53
    text = str(int(value)) if short else repr(float(value)).replace("e+", "e")
    return Text(text, UNARY if text.startswith("-") else ATOM)


def single(value: float) -> Text:
    """A literal that is to become fp32: as `number`, but rounded where fp32 has no normal number for it."""
    return number(value if value == 0 or 2.0**-126 <= abs(value) < 2.0**128 else round_fp32(value))
