"""`SPEC = Spec(...)`: the facts of an optimizer as the source of a generated module."""

from __future__ import annotations

import json
import math

from forge_dsl.emit.layout import WIDTH, bracketed
from forge_dsl.emit.wrap import wrap
from forge_dsl.spec import HyperSpec, Range, Spec, StateSpec


def quoted(text: str) -> str:
    """A string literal of printable ASCII, in double quotes, or in single ones where that saves escapes."""
    literal = "".join(map(_escaped, json.dumps(text, ensure_ascii=False)))
    if '"' in text and "'" not in text:
        return "'" + literal[1:-1].replace('\\"', '"') + "'"
    return literal


def _escaped(char: str) -> str:
    # JSON would write what lies beyond 16 bits as two surrogates, which in Python are two characters.
    return char if char.isascii() and char.isprintable() else char.encode("unicode_escape").decode("ascii")


def tuple_text(items: list[str]) -> str:
    """`()`, `(a,)`, `(a, b)`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})" if items else "()"


def spec_literal(spec: Spec) -> list[str]:
    """The lines of the assignment."""
    texts = ("name", "stem", "title", "source", "sha256")
    lines = ["SPEC = Spec(", *(f"    {name}={quoted(getattr(spec, name))}," for name in texts)]
    lines += _entries("hypers", [_hyper(hyper) for hyper in spec.hypers])
    flags = [[f"name={quoted(flag.name)}", f"default={flag.default}"] for flag in spec.flags]
    lines += _entries("flags", [("FlagSpec", flag) for flag in flags])
    lines += _entries("states", [_state(state) for state in spec.states])
    scalars = [[f"name={quoted(scalar.name)}", f"initial={_real(scalar.initial)}"] for scalar in spec.scalars]
    lines += _entries("scalars", [("ScalarSpec", scalar) for scalar in scalars])
    switches = [
        [f"name={quoted(switch.name)}", f"text={quoted(switch.text)}", f"is_flag={switch.is_flag}"]
        for switch in spec.switches
    ]
    lines += _entries("switches", [("SwitchSpec", switch) for switch in switches])
    lines += bracketed("first=", _strings(spec.first), ",", 4)
    lines += [f"    uses_step={spec.uses_step},", f"    reads_step={spec.reads_step},"]
    lines += bracketed("table=", _strings(spec.table), ",", 4)
    return [*lines, ")"]


def _strings(names: tuple[str, ...]) -> list[str]:
    literals = [quoted(name) for name in names]
    return [f"{literals[0]},"] if len(literals) == 1 else literals


def _entries(name: str, items: list[tuple[str, list[str]]]) -> list[str]:
    if not items:
        return [f"    {name}=(),"]
    single = "".join(f"    {name}=({constructor}({', '.join(arguments)}),)," for constructor, arguments in items)
    if len(items) == 1 and len(single) <= WIDTH:
        return [single]
    lines = [f"    {name}=("]
    for constructor, arguments in items:
        lines += wrap("", f"{constructor}({', '.join(arguments)})", ",", 8)
    return [*lines, "    ),"]


def _real(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(float(value)).replace("e+", "e")


def _range(limits: Range | None) -> str:
    if limits is None:
        return "None"
    parts = [f"low={_real(limits.low)}", f"high={_real(limits.high)}"]
    parts += [f"{name}=True" for name in ("low_open", "high_open") if getattr(limits, name)]
    return f"Range({', '.join(parts)})"


def _hyper(hyper: HyperSpec) -> tuple[str, list[str]]:
    default = hyper.default
    value = tuple_text([_real(item) for item in default]) if isinstance(default, tuple) else _real(default)
    ranges = tuple_text([_range(limits) for limits in hyper.ranges])
    return "HyperSpec", [f"name={quoted(hyper.name)}", f"default={value}", f"ranges={ranges}"]


def _state(state: StateSpec) -> tuple[str, list[str]]:
    parts = [f"name={quoted(state.name)}"]
    if state.begins != "update":
        parts.append(f"begins={quoted(state.begins)}")
    if not state.zero:
        parts.append("zero=False")
    if state.domain is not None:
        parts.append(f"domain={_range(state.domain)}")
    if state.when is not None:
        parts.append(f"when={quoted(state.when)}")
    if state.precise:
        parts.append("precise=True")
    return "StateSpec", parts
