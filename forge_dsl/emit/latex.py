"""Expressions as LaTeX, for the documentation page of an optimizer."""

from __future__ import annotations

import re

from forge_dsl.emit.text import ADD, ATOM, COMPARE, MUL, TERNARY, UNARY, Text
from forge_dsl.language import syntax

_GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "eta", "kappa", "lambda", "mu", "nu", "rho", "sigma", "tau"}
)
_SHORT = {"eps": "epsilon"}
_COMPARE = {"<": "<", "<=": r"\le", ">": ">", ">=": r"\ge", "==": "=", "!=": r"\ne"}
_FUNCTIONS = {"exp", "log", "tanh", "min", "max"}


def equation(name: str, value: syntax.Expr, when: syntax.Expr | None) -> str:
    """One line of an `aligned` block: `name &\\leftarrow value`, with its condition."""
    condition = "" if when is None else rf" \quad \text{{when }} {latex(when).text}"
    return rf"{symbol(name)} &\leftarrow {latex(value).text}{condition}"


def symbol(name: str) -> str:
    r"""`beta1` is `\beta_1`, `exp_avg` stays a word."""
    match = re.fullmatch(r"([a-z]+?)_?(\d*)", name)
    if match:
        letters, digits = _SHORT.get(match[1], match[1]), match[2]
        index = f"_{{{digits}}}" if digits else ""
        if letters in _GREEK:
            return rf"\{letters}{index}"
        if len(letters) == 1:
            return f"{letters}{index}"
    escaped = name.replace("_", r"\_")
    return rf"\mathrm{{{escaped}}}"


def latex(expr: syntax.Expr) -> Text:
    """LaTeX of an expression, with parentheses only where they are needed."""
    match expr:
        case syntax.Number(value=value, text=text):
            return Text(_number(text or f"{value:g}"))
        case syntax.Boolean(value=value):
            return Text(rf"\text{{{str(value).lower()}}}")
        case syntax.Name(id=name):
            return Text(symbol(name))
        case syntax.Unary(op="not", operand=operand):
            return Text(rf"\lnot {latex(operand).at(ATOM)}", UNARY)
        case syntax.Unary(op=op, operand=operand):
            return Text(f"{op}{latex(operand).at(UNARY)}", UNARY)
        case syntax.Binary(op="/", left=left, right=right):
            return Text(rf"\frac{{{latex(left).text}}}{{{latex(right).text}}}", MUL)
        case syntax.Binary(op="**", left=left, right=right):
            return Text(f"{latex(left).at(ATOM)}^{{{latex(right).text}}}", UNARY)
        case syntax.Binary(op="*", left=left, right=right):
            return Text(rf"{latex(left).at(MUL)} \, {latex(right).at(MUL + 1)}", MUL)
        case syntax.Binary(op=op, left=left, right=right):
            sign = r"\bmod" if op == "%" else op
            level = MUL if op == "%" else ADD
            return Text(f"{latex(left).at(level)} {sign} {latex(right).at(level + 1)}", level)
        case syntax.Compare(operands=operands, ops=ops):
            parts = [latex(operands[0]).at(COMPARE + 1)]
            for op, operand in zip(ops, operands[1:], strict=True):
                parts += [_COMPARE[op], latex(operand).at(COMPARE + 1)]
            return Text(" ".join(parts), COMPARE)
        case syntax.Logical(op=op, operands=operands):
            joint = r" \land " if op == "and" else r" \lor "
            return Text(joint.join(latex(operand).at(COMPARE) for operand in operands), TERNARY)
        case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
            return _cases(then, condition, otherwise)
        case syntax.Call(function="where", args=(condition, then, otherwise)):
            return _cases(then, condition, otherwise)
        case syntax.Call(function="sqrt", args=(arg,)):
            return Text(rf"\sqrt{{{latex(arg).text}}}")
        case syntax.Call(function="abs", args=(arg,)):
            return Text(rf"\lvert {latex(arg).text} \rvert")
        case syntax.Call(function=function, args=args):
            name = rf"\{function}" if function in _FUNCTIONS else rf"\operatorname{{{function}}}"
            return Text(rf"{name}({', '.join(latex(arg).text for arg in args)})")
    raise AssertionError(f"a checked spec holds no {type(expr).__name__}")


def _cases(then: syntax.Expr, condition: syntax.Expr, otherwise: syntax.Expr) -> Text:
    first = rf"{latex(then).text} & \text{{if }} {latex(condition).text}"
    return Text(rf"\begin{{cases}} {first} \\ {latex(otherwise).text} & \text{{otherwise}} \end{{cases}}")


def _number(text: str) -> str:
    if text == "inf":
        return r"\infty"
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:
        return mantissa
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa in {"1", "1.0"} else rf"{mantissa} \cdot {power}"
