"""Constant folding, and the identities that hold bit for bit in IEEE arithmetic.

`x + 0` is not among them (`-0 + 0` is `+0`), nor is `x * 0` (NaN, infinity, the sign).
"""

from __future__ import annotations

import math
import struct

from forge_dsl.analysis.fold import BINARY, COMPARE, FUNCTIONS
from forge_dsl.ir.passes.rebuild import rebuild
from forge_dsl.ir.program import Builder, Op, Program, constant

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def fold(program: Program) -> Program:
    """Fold constants in fp32 and apply exact identities.

    Float64 has digits enough that a sum, difference, product, quotient or root of fp32 numbers, rounded twice, is
    correctly rounded. Other functions are rounded from float64, as the reference does.
    """
    return rebuild(program, _fold)


def round_fp32(value: float) -> float:
    """`value` rounded to fp32, to nearest even; too large becomes infinite."""
    if not math.isfinite(value):
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _fold(build: Builder, op: Op) -> int:
    args = [build.ops[arg] for arg in op.args]
    constants = [constant(arg) for arg in args if arg.code == "const"]
    if args and len(constants) == len(args):
        value = _evaluate(op, constants)
        if value is not None:
            return build.add(Op("const", attr=float(value), boolean=op.boolean))
    match op.code, args:
        case "choose" | "select", _ if op.args[-1] == op.args[-2]:
            return op.args[-1]
        case "select", [Op(code="const", attr=truth), _, _]:
            return op.args[1] if truth else op.args[2]
        case "neg", [Op(code="neg", args=(inner,))]:
            return inner
        case "not", [Op(code="not", args=(inner,))]:
            return inner
        case "mul", [Op(code="const", attr=1.0), _]:
            return op.args[1]
        case "mul" | "div", [_, Op(code="const", attr=1.0)]:
            return op.args[0]
        case "and" | "or", [Op(code="const", attr=truth), _]:
            return op.args[1] if bool(truth) == (op.code == "and") else op.args[0]
        case "and" | "or", [_, Op(code="const", attr=truth)]:
            return op.args[0] if bool(truth) == (op.code == "and") else op.args[1]
    return build.add(op)


def _evaluate(op: Op, values: list[float]) -> float | None:
    values = list(map(round_fp32, values))
    match op.code:
        case "neg":
            return -values[0]
        case "not":
            return float(not values[0])
        case "min" | "max":
            return float(FUNCTIONS[op.code](*values)) + 0.0
        case "rsqrt":
            return round_fp32(BINARY["/"](1.0, round_fp32(float(FUNCTIONS["sqrt"](*values)))))
        case code if code in _OPERATORS:
            return round_fp32(BINARY[_OPERATORS[code]](*values))
        case code if code in _COMPARISONS:
            return float(COMPARE[_COMPARISONS[code]](*values))
        case code if code in FUNCTIONS:
            return round_fp32(float(FUNCTIONS[code](*values)))
    return None
