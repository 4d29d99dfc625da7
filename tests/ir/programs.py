"""Programs as text, `(sub weight (mul $lr grad))`, and what they compute, by an interpreter of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from forge_dsl.compile import Compiled, compile_source
from forge_dsl.ir.program import Builder, Op, Output, Program, Slot
from forge_dsl.language import syntax

Array = np.ndarray[Any, Any]
BOOLEAN = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "isfinite"}


def compiled(update: str, declarations: str = "", stem: str = "t") -> Compiled:
    """A spec whose body is `update`; it declares `lr` and what `declarations` says, and reads all of it."""
    body = "\n".join(f"  {line}" for line in update.strip().splitlines())
    text = f"optimizer Subject\nhyper lr = 0.5\n{declarations}\nupdate:\n{body}\n"
    return compile_source(text, f"{stem}.opt")


def build(*outputs: str, slots: Mapping[str, syntax.Expr] | None = None) -> Program:
    """A program from texts `weight = (mul $lr grad)`; a slot's expression is its name unless given."""
    make, ends, known = Builder(), [], dict(slots or {})
    for text in outputs:
        name, _, body = text.partition(" = ")
        tokens = re.findall(r"[()]|[^\s()]+", body)
        value, rest = _parse(tokens, make, known)
        assert not rest, rest
        ends.append(Output(name, value))
    return Program(tuple(make.ops), tuple(ends), tuple(Slot(n, e) for n, e in known.items()))


def _parse(tokens: list[str], make: Builder, slots: dict[str, syntax.Expr]) -> tuple[int, list[str]]:
    head, *rest = tokens
    if head != "(":
        return _leaf(head, make, slots), rest
    code, *rest = rest
    args: list[int] = []
    while rest[0] != ")":
        value, rest = _parse(rest, make, slots)
        args.append(value)
    code, _, switch = code.partition(":")
    boolean = code in BOOLEAN or (code in {"select", "choose"} and make.ops[args[-1]].boolean)
    return make.add(Op(code, tuple(args), switch or None, boolean=boolean)), rest[1:]


def _leaf(text: str, make: Builder, slots: dict[str, syntax.Expr]) -> int:
    if text.startswith("$"):
        slots.setdefault(text[1:], syntax.Name(text[1:]))
        return make.add(Op("slot", attr=text[1:], name=text[1:]))
    if text in {"true", "false"}:
        return make.add(Op("const", attr=float(text == "true"), boolean=True))
    try:
        return make.add(Op("const", attr=float(text)))
    except ValueError:
        return make.add(Op("input", attr=text, name=text))


def show(program: Program, output: str = "weight") -> str:
    """The value of one output as text."""
    (value,) = (out.value for out in program.outputs if out.name == output)
    return _show(program, value)


def _show(program: Program, value: int) -> str:
    op = program.ops[value]
    if op.code == "const":
        number = float(str(op.attr))
        return str(bool(number)).lower() if op.boolean else f"{number:.9g}"
    if op.code in {"input", "slot"}:
        return ("$" if op.code == "slot" else "") + str(op.attr)
    code = f"choose:{op.attr}" if op.code == "choose" else op.code
    return f"({' '.join([code, *(_show(program, arg) for arg in op.args)])})"


def rounded(function: Any, *args: Array) -> Array:
    """`function` in float64, rounded once to the type of the arguments."""
    return function(*(arg.astype(np.float64) for arg in args)).astype(args[0].dtype)


def _sign(x: Array) -> Array:
    return np.where(np.isnan(x), 0, np.sign(x)).astype(x.dtype) + x.dtype.type(0)


_FUNCTIONS: dict[str, Any] = {
    "neg": np.negative, "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "rcp": lambda x: x.dtype.type(1) / x, "sqrt": np.sqrt, "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "abs": np.abs, "sign": _sign,
    "min": lambda x, y: np.minimum(x, y) + 0, "max": lambda x, y: np.maximum(x, y) + 0,
    "isfinite": np.isfinite, "select": np.where,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
    "pow": partial(rounded, np.power), "exp": partial(rounded, np.exp), "log": partial(rounded, np.log),
    "log1p": partial(rounded, np.log1p), "expm1": partial(rounded, np.expm1), "tanh": partial(rounded, np.tanh),
}  # fmt: skip


def run(
    program: Program,
    inputs: Mapping[str, Array],
    slots: Mapping[str, float],
    switches: Mapping[str, bool] | None = None,
) -> dict[str, Array]:
    """Every output of a program, in the precision of `inputs`. Slots are float64, rounded once to that precision."""
    kind = next(iter(inputs.values())).dtype
    values: list[Array] = []
    with np.errstate(all="ignore"):
        for op in program.ops:
            args = [values[arg] for arg in op.args]
            if op.code == "input":
                value = inputs[str(op.attr)]
            elif op.code == "slot":
                number = np.asarray(slots[str(op.attr)], dtype=np.float64)
                value = number != 0 if op.boolean else number.astype(kind)
            elif op.code == "const":
                number = np.asarray(op.attr, dtype=np.float64)
                value = number != 0 if op.boolean else number.astype(kind)
            elif op.code == "choose":
                assert switches is not None, "a choice in a specialised program"
                value = args[0] if switches[str(op.attr)] else args[1]
            else:
                value = _FUNCTIONS[op.code](*args)
            values.append(np.asarray(value, dtype=bool if op.boolean else kind))
    return {out.name: values[out.value] for out in program.outputs}


def same_bits(a: Array, b: Array) -> bool:
    """Equal as bits, any NaN being as good as another."""
    a, b = (np.array(one, ndmin=1) for one in np.broadcast_arrays(a, b))
    if a.dtype == bool:
        return bool(np.all(a == b))
    both = np.isnan(a) & np.isnan(b)
    return bool(np.all(both | (a.view(np.uint32) == b.view(np.uint32))))


def numbers(shape: Sequence[int], seed: int) -> Array:
    """fp32 numbers of all magnitudes, with zeros of both signs, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape)).astype(np.float32)
    specials = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38], dtype=np.float32)
    flat = values.reshape(-1)
    flat[: len(specials)] = specials[: len(flat)]
    rng.shuffle(flat)
    return values
