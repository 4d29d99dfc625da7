"""The canonical printer of expressions: no needless parentheses. `parse` reads the result back as the same tree."""

from __future__ import annotations

import math

from forge_dsl.language import syntax

# How tightly each form binds, loosest first; an operand that binds less than its place asks for is parenthesised.
_CONDITIONAL, _OR, _AND, _NOT, _COMPARE, _SUM, _TERM, _SIGN, _POWER, _POSTFIX = range(1, 11)


def format_expr(expr: syntax.Expr) -> str:
    """`expr` on one line, with the parentheses it needs and no others."""
    return _expr(expr, _CONDITIONAL)


def _expr(expr: syntax.Expr, at_least: int) -> str:
    text, binding = _print(expr)
    return f"({text})" if binding < at_least else text


def _print(expr: syntax.Expr) -> tuple[str, int]:
    match expr:
        case syntax.Number():
            return _number(expr), _POSTFIX
        case syntax.Boolean(value=value):
            return "true" if value else "false", _POSTFIX
        case syntax.Name(id=name):
            return name, _POSTFIX
        case syntax.Unary(op="not", operand=operand):
            return f"not {_expr(operand, _NOT)}", _NOT
        case syntax.Unary(op=op, operand=operand):
            return f"{op}{_expr(operand, _SIGN)}", _SIGN
        case syntax.Binary(op=op, left=left, right=right):
            binding, left_binding, right_binding = _binary(op)
            return f"{_expr(left, left_binding)} {op} {_expr(right, right_binding)}", binding
        case syntax.Compare(operands=operands, ops=ops):
            parts = [_expr(operands[0], _SUM)]
            parts += [f"{op} {_expr(operand, _SUM)}" for op, operand in zip(ops, operands[1:], strict=True)]
            return " ".join(parts), _COMPARE
        case syntax.Logical(op=op, operands=operands):
            outer, asked = _logical(op)
            return f" {op} ".join(_expr(operand, asked) for operand in operands), outer
        case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
            head = f"{_expr(then, _OR)} if {_expr(condition, _OR)}"
            return f"{head} else {_expr(otherwise, _CONDITIONAL)}", _CONDITIONAL
        case syntax.Call(function=function, args=args, keywords=keywords):
            return f"{function}({_arguments(args, keywords)})", _POSTFIX
        case syntax.Tuple(items=items):
            inner = ", ".join(format_expr(item) for item in items)
            return f"({inner},)" if len(items) == 1 else f"({inner})", _POSTFIX
        case syntax.Subscript(base=base, indices=indices):
            return f"{_base(base)}[{', '.join(format_expr(index) for index in indices)}]", _POSTFIX
        case syntax.Attribute(base=base, name=name):
            return f"{_base(base)}.{name}", _POSTFIX
        case syntax.MethodCall(base=base, name=name, args=args, keywords=keywords):
            return f"{_base(base)}.{name}({_arguments(args, keywords)})", _POSTFIX


def _binary(op: str) -> tuple[int, int, int]:
    """How tightly the operator binds, and what it asks of its left and right operand."""
    if op == "**":
        return _POWER, _POSTFIX, _SIGN
    return (_SUM, _SUM, _TERM) if op in "+-" else (_TERM, _TERM, _SIGN)


def _logical(op: str) -> tuple[int, int]:
    """The same for `and` and `or`. An `and` inside an `or` is parenthesised though it need not be: few know the
    order.
    """
    return (_OR, _NOT) if op == "or" else (_AND, _NOT)


def _base(base: syntax.Expr) -> str:
    text = _expr(base, _POSTFIX)
    return f"({text})" if isinstance(base, syntax.Number) else text


def _arguments(args: tuple[syntax.Expr, ...], keywords: tuple[tuple[str, syntax.Expr], ...]) -> str:
    return ", ".join([format_expr(arg) for arg in args] + [f"{name}={format_expr(value)}" for name, value in keywords])


def _number(number: syntax.Number) -> str:
    """As it was written; a number that no text came with is printed so that it reads back equal."""
    if number.text:
        return number.text
    value = number.value
    if math.isinf(value):
        return "inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e16 else repr(value)


def broken(expr: syntax.Expr) -> tuple[str, list[str], str] | None:
    """An expression in pieces, one a line, between an opening and a closing bracket: cut at its loosest operator.

    None if it is in one piece.
    """
    match expr:
        case syntax.Binary(op=op) if op != "**":
            level = _binary(op)[0]
            pieces: list[str] = []
            left: syntax.Expr = expr
            while isinstance(left, syntax.Binary) and left.op != "**" and _binary(left.op)[0] == level:
                pieces.insert(0, f"{left.op} {_expr(left.right, _binary(left.op)[2])}")
                left = left.left
            return "(", [_expr(left, level), *pieces], ")"
        case syntax.Logical(op=op, operands=operands):
            first, *rest = (_expr(operand, _logical(op)[1]) for operand in operands)
            return "(", [first, *(f"{op} {piece}" for piece in rest)], ")"
        case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
            branch = f"else {_expr(otherwise, _CONDITIONAL)}"
            return "(", [_expr(then, _OR), f"if {_expr(condition, _OR)}", branch], ")"
        case syntax.Call(function=function, args=args, keywords=()) if len(args) > 1:
            return f"{function}(", [f"{format_expr(arg)}," for arg in args], ")"
    return None
