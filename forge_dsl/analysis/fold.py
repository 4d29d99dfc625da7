"""Scalar expressions in IEEE float64, the way the generated prologue computes them: never an exception, never complex.

Work is bounded: every operation is one float64 operation (`9 ** 9 ** 9` is inf, not a long integer), and the parser
bounds the number and depth of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from forge_dsl.analysis.builtins import BUILTINS
from forge_dsl.language import syntax

Value = float | bool
INF = math.inf
NAN = math.nan
# From here on a float64 is rounded to infinity in fp32: the largest fp32 number and half of its last place.
FP32_END = (2.0 - 2.0**-24) * 2.0**127
# And up to here to zero: half of the smallest fp32 number, where a tie goes to zero.
FP32_ZERO = 2.0**-150


class NotConstant(Exception):
    """The expression reads something that has no value here, or is not scalar arithmetic. Carries the node."""

    def __init__(self, node: syntax.Node) -> None:
        super().__init__(node)
        self.node = node


def fold_scalar(expr: syntax.Expr, env: Mapping[str, Value]) -> float:
    """The value of a real scalar expression as a float64. Raises NotConstant if a name is not in `env`."""
    return float(evaluate(expr, env))


def evaluate(expr: syntax.Expr, env: Mapping[str, Value]) -> Value:
    """The value of a scalar expression: a float, or a bool for conditions. Raises NotConstant."""
    match expr:
        case syntax.Number(value=value):
            return value
        case syntax.Boolean(value=flag):
            return flag
        case syntax.Name(id=name) if name in env:
            value = env[name]
            return value if isinstance(value, bool) else float(value)
        case syntax.Unary(op=op, operand=operand):
            inner = evaluate(operand, env)
            return not inner if op == "not" else -float(inner) if op == "-" else float(inner)
        case syntax.Binary(op=op, left=left, right=right) if op in BINARY:
            return BINARY[op](float(evaluate(left, env)), float(evaluate(right, env)))
        case syntax.Compare(operands=operands, ops=ops):
            values = [evaluate(operand, env) for operand in operands]
            return all(COMPARE[op](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case syntax.Logical(op=op, operands=operands):
            truths = [bool(evaluate(operand, env)) for operand in operands]
            return all(truths) if op == "and" else any(truths)
        case syntax.Conditional(then=then, condition=condition, otherwise=otherwise):
            return evaluate(then if evaluate(condition, env) else otherwise, env)
        case syntax.Call(function="where", args=(condition, then, otherwise), keywords=()):
            return evaluate(then if evaluate(condition, env) else otherwise, env)
        case syntax.Call(function=function, args=args, keywords=()) if function in FUNCTIONS and fits(function, args):
            return FUNCTIONS[function](*(float(evaluate(arg, env)) for arg in args))
        case _:
            raise NotConstant(expr)


def fits(function: str, args: tuple[syntax.Expr, ...]) -> bool:
    """Whether the function takes so many arguments."""
    return BUILTINS[function].min_args <= len(args) <= BUILTINS[function].max_args


def divide(a: float, b: float) -> float:
    """a / b, with 1 / 0 = inf and 0 / 0 = NaN."""
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return NAN
    return math.copysign(INF, a) * math.copysign(1.0, b)


def modulo(a: float, b: float) -> float:
    """The remainder with the sign of `b`, as in Python and torch; NaN for b = 0 or infinite a."""
    return a % b if b != 0 and not math.isinf(a) else NAN


def power(a: float, b: float) -> float:
    """a ** b, as C's pow: 0 ** 0 = 1, overflow is inf, a negative base to a fraction is NaN."""
    try:
        return math.pow(a, b)
    except OverflowError:
        return -INF if a < 0 and b % 2 == 1 else INF
    except ValueError:
        if a != 0:
            return NAN
        return math.copysign(INF, a) if b % 2 == 1 else INF


def _sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0 else NAN


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -INF if x == 0 else NAN


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1 else -INF if x == -1 else NAN


def _guarded(function: Callable[[float], float]) -> Callable[[float], float]:
    def call(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return INF

    return call


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


def minimum(*values: float) -> float:
    """The smallest value, NaN if any is NaN."""
    return NAN if any(map(math.isnan, values)) else min(values)


def maximum(*values: float) -> float:
    """The largest value, NaN if any is NaN."""
    return NAN if any(map(math.isnan, values)) else max(values)


BINARY: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divide,
    "%": modulo,
    "**": power,
}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
FUNCTIONS: dict[str, Callable[..., Value]] = {
    "sqrt": _sqrt,
    "rsqrt": lambda x: divide(1.0, _sqrt(x)),
    "exp": _guarded(math.exp),
    "log": _log,
    "log1p": _log1p,
    "expm1": _guarded(math.expm1),
    "tanh": math.tanh,
    "abs": abs,
    "sign": _sign,
    "min": minimum,
    "max": maximum,
    "clamp": lambda x, low, high: minimum(maximum(x, low), high),
    "lerp": lambda a, b, t: a + t * (b - a),
    "isfinite": math.isfinite,
}
