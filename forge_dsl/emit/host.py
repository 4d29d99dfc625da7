"""The parts of a generated module that run in Python: facts, checks of arguments, per-step scalars, the reference."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_dsl.emit import text
from forge_dsl.emit.layout import WIDTH, block, bracketed
from forge_dsl.emit.reference import ReferencePrinter, reference_body, switch_text
from forge_dsl.emit.text import Text
from forge_dsl.emit.tree import HostScalars, TreePrinter
from forge_dsl.language import syntax
from forge_dsl.spec import HyperSpec, Range, StateSpec

if TYPE_CHECKING:
    from forge_dsl.compile import Compiled

_OPTIONS = ("state_dtype: torch.dtype | None = None", 'arithmetic: str = "fast"', 'schedule: str = "auto"')


@dataclass
class Sections:
    """Template values, and the modules of `forge_dsl.runtime` that their text refers to."""

    context: dict[str, Any] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


def host_sections(compiled: Compiled) -> Sections:
    """Everything for the host side of `optimizer.py.j2`."""
    found = Sections()
    spec, checked = compiled.spec, compiled.checked
    arguments = [f"{hyper.name}: {_annotation(hyper)}" for hyper in spec.hypers]
    arguments += [f"{flag.name}: bool" for flag in spec.flags]
    printer = HostScalars()
    switches = [printer.text(atom).text for atom in compiled.layout.switches]
    conditions = [None if s.when is None else switch_text(s.when, compiled.layout).text for s in checked.states]
    parameters = [switch.name for switch in spec.switches]
    found.context = {
        "spec": block(_spec_literal(compiled)),
        "check_arguments": _signature("check_arguments", ["*", *arguments], "None"),
        "requires": [(printer.text(r.condition).text, json.dumps(r.message)) for r in checked.requires],
        "switches": _signature("switches", ["*", *arguments], "tuple[bool, ...]"),
        "switch_values": _tuple(switches),
        "present": _signature("present", [f"{name}: bool" for name in parameters], "tuple[bool, ...]"),
        "present_values": _tuple([condition or "True" for condition in conditions]),
        "hypers": [_documented(hyper) for hyper in spec.hypers],
        "flags": spec.flags,
        "constructor": block(_constructor(compiled)),
        "super_call": block(_super_call(compiled)),
    }
    found.context |= _initial_state(compiled, printer)
    found.context |= _step_scalars(compiled, printer, arguments)
    reference, uses_math = _reference(compiled, conditions)
    found.context |= reference
    if printer.uses_ieee:
        found.modules.add("ieee")
    if uses_math:
        found.modules.add("reference_math")
    return found


def _annotation(hyper: HyperSpec) -> str:
    if isinstance(hyper.default, tuple):
        return f"tuple[{', '.join(['float'] * len(hyper.default))}]"
    return "float"


def default_text(value: float | tuple[float, ...]) -> str:
    """A default as a person writes it: `1e-8`, `0.001`, `(0.9, 0.999)`, `0`."""
    if isinstance(value, tuple):
        inner = ", ".join(default_text(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    short = f"{value:g}"
    if float(short) == value and "e" in short:
        return short.replace("e-0", "e-").replace("e+0", "e")
    return text.number(value, whole=True).text


def _documented(hyper: HyperSpec) -> dict[str, str]:
    ranges = sorted({str(limits) for limits in hyper.ranges if limits is not None})
    return {
        "name": hyper.name,
        "text": default_text(hyper.default),
        "ranges": f", in {' and '.join(ranges)}" if ranges else "",
    }


def _signature(name: str, parameters: list[str], result: str) -> str:
    if parameters == ["*"]:
        parameters = []
    return block(bracketed(f"def {name}", parameters, f" -> {result}:"))


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})" if items else "()"


def quoted(text: str) -> str:
    """An ASCII string literal, in double quotes, or in single ones where that saves escapes, as formatters prefer."""
    literal = json.dumps(text)
    if '"' in text and "'" not in text:
        return "'" + literal[1:-1].replace('\\"', '"') + "'"
    return literal


def _spec_literal(compiled: Compiled) -> list[str]:
    spec = compiled.spec
    texts = ("name", "stem", "title", "source", "sha256")
    lines = ["SPEC = Spec(", *(f"    {name}={quoted(getattr(spec, name))}," for name in texts)]
    lines += _entries("hypers", [_hyper_literal(hyper) for hyper in spec.hypers])
    lines += _entries(
        "flags", [("FlagSpec", [f"name={json.dumps(f.name)}", f"default={f.default}"]) for f in spec.flags]
    )
    lines += _entries("states", [_state_literal(state) for state in spec.states])
    scalars = [("ScalarSpec", [f"name={json.dumps(s.name)}", f"initial={_real(s.initial)}"]) for s in spec.scalars]
    lines += _entries("scalars", scalars)
    lines += _entries(
        "switches",
        [
            ("SwitchSpec", [f"name={json.dumps(s.name)}", f"text={json.dumps(s.text)}", f"is_flag={s.is_flag}"])
            for s in spec.switches
        ],
    )
    lines += bracketed("first=", _strings(spec.first), ",", 4)
    lines.append(f"    uses_step={spec.uses_step},")
    lines += bracketed("table=", _strings(spec.table), ",", 4)
    return [*lines, ")"]


def _strings(names: tuple[str, ...]) -> list[str]:
    quoted = [json.dumps(name) for name in names]
    return [f"{quoted[0]},"] if len(quoted) == 1 else quoted


def _entries(name: str, items: list[tuple[str, list[str]]]) -> list[str]:
    if not items:
        return [f"    {name}=(),"]
    single = "".join(f"    {name}=({constructor}({', '.join(arguments)}),)," for constructor, arguments in items)
    if len(items) == 1 and len(single) <= WIDTH:
        return [single]
    lines = [f"    {name}=("]
    for constructor, arguments in items:
        lines += bracketed(constructor, arguments, ",", 8)
    return [*lines, "    ),"]


def _real(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(float(value))


def _range_literal(limits: Range | None) -> str:
    if limits is None:
        return "None"
    parts = [f"low={_real(limits.low)}", f"high={_real(limits.high)}"]
    parts += [f"{name}=True" for name in ("low_open", "high_open") if getattr(limits, name)]
    return f"Range({', '.join(parts)})"


def _hyper_literal(hyper: HyperSpec) -> tuple[str, list[str]]:
    default = hyper.default
    value = _tuple([_real(item) for item in default]) if isinstance(default, tuple) else _real(default)
    ranges = _tuple([_range_literal(limits) for limits in hyper.ranges])
    return "HyperSpec", [f"name={json.dumps(hyper.name)}", f"default={value}", f"ranges={ranges}"]


def _state_literal(state: StateSpec) -> tuple[str, list[str]]:
    parts = [f"name={json.dumps(state.name)}"]
    if state.begins != "update":
        parts.append(f"begins={json.dumps(state.begins)}")
    if not state.zero:
        parts.append("zero=False")
    if state.domain is not None:
        parts.append(f"domain={_range_literal(state.domain)}")
    if state.when is not None:
        parts.append(f"when={json.dumps(state.when)}")
    return "StateSpec", parts


class _InitialPrinter(TreePrinter):
    """An initial value that reads the weight: torch functions on `weight`, Python numbers for hypers."""

    def call(self, function: str, args: tuple[syntax.Expr, ...]) -> Text:
        name = {"min": "minimum", "max": "maximum", "pow": "pow"}.get(function, function)
        return text.call(f"torch.{name}", *(text.call("torch.as_tensor", self.text(arg)) for arg in args))


def _initial_state(compiled: Compiled, printer: HostScalars) -> dict[str, Any]:
    values, names = [], []
    hypers = {hyper.name: hyper for hyper in compiled.spec.hypers}
    for state in compiled.checked.states:
        if state.initial is None or state.initial == syntax.Number(0.0):
            continue
        read = {node.id for node in syntax.walk(state.initial) if isinstance(node, syntax.Name)}
        names += [name for name in hypers if name in read and name not in names]
        if "weight" in read:
            value = _InitialPrinter().text(state.initial).text
            value = "weight.to(torch.float32, copy=True)" if value == "weight" else value
        else:
            value = f"torch.full_like(weight, {printer.text(state.initial).text}, dtype=torch.float32)"
        values.append((json.dumps(state.name), value))
    if any("weight." not in value and "full_like" not in value for _, value in values):
        values = [(name, value.replace("weight", "weight.float()")) for name, value in values]
    arguments = [f"{name}: {_annotation(hypers[name])}" for name in names]
    parameters = ["name: str", "weight: Tensor", *(["*"] if arguments else []), *arguments, "**_: object"]
    return {"initial_state": _signature("initial_state", parameters, "Tensor"), "initial_values": values}


def _step_scalars(compiled: Compiled, printer: HostScalars, arguments: list[str]) -> dict[str, Any]:
    spec, checked = compiled.spec, compiled.checked
    parameters = ["step: float"] if spec.uses_step else []
    parameters += [f"{scalar.name}: float" for scalar in spec.scalars]
    parameters += [f"first_{name}: bool" for name in spec.first]
    lines: list[str] = []
    for statement in checked.scalar_program:
        if isinstance(statement, syntax.Let):
            target = ", ".join(statement.names)
        else:
            target = statement.name
        lines += text.fit(f"{target} = ", printer.text(statement.value).text, 4)
    lines.append("    table = (")
    for slot in compiled.table:
        value = printer.text(slot.expr).text
        lines.append(f"        {value}," if value == slot.name else f"        {value},  # {slot.name}")
    lines.append("    )")
    lines.append(f"    return table, {_tuple([scalar.name for scalar in spec.scalars])}")
    result = "tuple[tuple[float, ...], tuple[float, ...]]"
    signature = _signature("step_scalars", ["*", *parameters, *arguments], result)
    return {"step_scalars": signature, "scalar_lines": lines}


def _reference(compiled: Compiled, conditions: list[str | None]) -> tuple[dict[str, Any], bool]:
    spec, printer = compiled.spec, ReferencePrinter(compiled.layout)
    exact = tuple(compiled.layout.slots.values())
    lines = unpack([slot.name for slot in exact], f"s[:{len(exact)}].unbind()")
    lines.append("    weight, grad = weight.to(s.dtype), grad.to(s.dtype)")
    for state, condition in zip(spec.states, conditions, strict=True):
        read = f'{state.name} = state["{state.name}"].to(s.dtype)'
        lines += [f"    if {condition}:", f"        {read}"] if condition else [f"    {read}"]
    lines += reference_body(compiled.checked, compiled.layout, printer)
    lines += bracketed(
        "state = ",
        [f'"{s.name}": {s.name}' for s, c in zip(spec.states, conditions, strict=True) if not c],
        "",
        4,
        "{}",
    )
    for state, condition in zip(spec.states, conditions, strict=True):
        if condition:
            lines.extend([f"    if {condition}:", f'        state["{state.name}"] = {state.name}'])
    lines.append("    return weight, state")
    parameters = ["weight: Tensor", "grad: Tensor", "state: dict[str, Tensor]", "s: Tensor"]
    parameters += [f"{switch.name}: bool = {_default(compiled, switch.name)}" for switch in spec.switches]
    signature = _signature(f"{compiled.stem}_reference", parameters, "tuple[Tensor, dict[str, Tensor]]")
    return {"reference": signature, "reference_lines": lines}, printer.uses_math


def unpack(names: list[str], value: str, indent: int = 4) -> list[str]:
    """`a, b = value`, one name a line where it does not fit."""
    pad = " " * indent
    if len(names) == 1:
        return [f"{pad}({names[0]},) = {value}"]
    line = f"{pad}{', '.join(names)} = {value}"
    return [line] if len(line) <= WIDTH else bracketed("", names, f" = {value}", indent)


def _default(compiled: Compiled, switch: str) -> bool:
    flags = dict(compiled.checked.flags)
    return flags.get(switch, False)


def _constructor(compiled: Compiled) -> list[str]:
    spec = compiled.spec
    parameters = ["self", "params: ParamsT"]
    parameters += [f"{h.name}: {_annotation(h)} = {default_text(h.default)}" for h in spec.hypers]
    parameters += ["*", *(f"{flag.name}: bool = {flag.default}" for flag in spec.flags), *_OPTIONS]
    return bracketed("def __init__", parameters, " -> None:", 4)


def _super_call(compiled: Compiled) -> list[str]:
    spec = compiled.spec
    hypers = bracketed("hypers: dict[str, Hyper] = ", [f'"{h.name}": {h.name}' for h in spec.hypers], "", 8, "{}")
    flags = bracketed("flags = ", [f'"{f.name}": {f.name}' for f in spec.flags], "", 8, "{}")
    options = [f"{name}={name}" for name in ("state_dtype", "arithmetic", "schedule")]
    return [*hypers, *flags, f"        super().__init__(params, hypers, flags, {', '.join(options)})"]
