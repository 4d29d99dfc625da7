"""The parts of a generated module that run in Python: facts, checks of arguments, per-step scalars, the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge_dsl.compile import Compiled
from forge_dsl.emit import text
from forge_dsl.emit.initial import initial_states
from forge_dsl.emit.layout import WIDTH, block, bracketed
from forge_dsl.emit.literals import quoted, spec_literal, tuple_text
from forge_dsl.emit.reference import ReferencePrinter, borrowed, reference_body, switch_text
from forge_dsl.emit.tree import HostScalars
from forge_dsl.emit.wrap import item, lines_inside, wrap
from forge_dsl.ir.names import distinct
from forge_dsl.ir.table import is_boolean, scalar_names
from forge_dsl.language import syntax
from forge_dsl.spec import HyperSpec

_OPTIONS = (
    "state_dtype: StateDtype = None",
    'arithmetic: str = "fast"',
    'schedule: str = "auto"',
    "stochastic_rounding: bool | None = None",
    "seed: int = 0",
    "extra_bits: int = 0",
    "saved_activations: str | None = None",
    "gradient_bits: int = 24",
)
# The keys of `torch_layout.Switches` and `SGDSwitches`, which the compiler does not import: it needs no torch.
_SWITCHES = frozenset({"foreach", "capturable", "differentiable", "fused"})
_OF_MOMENTUM = frozenset({"momentum", "dampening", "nesterov"})


@dataclass
class Sections:
    """Template values, and the modules of `forge_dsl.runtime` that their text refers to."""

    context: dict[str, Any] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


def host_sections(compiled: Compiled) -> Sections:
    """Everything for the host side of `optimizer.py.j2`."""
    found = Sections()
    spec, checked = compiled.spec, compiled.checked
    arguments = [f"{hyper.name}: {annotation(hyper)}" for hyper in spec.hypers]
    arguments += [f"{flag.name}: bool" for flag in spec.flags]
    # The runtime gives these functions hypers as plain numbers.
    printer = HostScalars(plain=spec.hyper_names)
    switches = [printer.text(atom).text for atom in compiled.layout.switches]
    conditions = [None if s.when is None else switch_text(s.when, compiled.layout).text for s in checked.states]
    parameters = [switch.name for switch in spec.switches]
    found.context = {
        "spec": block(spec_literal(spec)),
        "check_arguments": _signature("check_arguments", ["*", *arguments], "None"),
        "requires": [_require(printer.text(r.condition).text, r.message) for r in checked.requires],
        "switches": _signature("switches", ["*", *arguments], "tuple[bool, ...]"),
        "switch_values": tuple_text(switches),
        "present": _signature("present", [f"{name}: bool" for name in parameters], "tuple[bool, ...]"),
        "present_values": tuple_text([condition or "True" for condition in conditions]),
        "hypers": [_documented(hyper) for hyper in spec.hypers],
        "flags": spec.flags,
        "torch_keywords": _torch_keywords(compiled),
        "switches_name": distinct("switches", _arguments(compiled)),
        "constructor": block(_constructor(compiled)),
        "super_call": block(_super_call(compiled)),
    }
    found.context |= _step_scalars(compiled, arguments, found.modules)
    found.context |= _reference(compiled, conditions, found.modules)
    values, names = initial_states(compiled, printer, found.modules)
    hypers = [f"{hyper.name}: {annotation(hyper)}" for hyper in spec.hypers if hyper.name in names]
    # `state` and `weight` cannot be the name of a hyper.
    first = ["state: str", "weight: Tensor", *(["*"] if hypers else []), *hypers, "**_: object"]
    found.context |= {"initial_state": _signature("initial_state", first, "Tensor"), "initial_values": values}
    if printer.uses_ieee:
        found.modules.add("ieee")
    return found


def _require(condition: str, message: str) -> str:
    test = f"    if not ({condition}):"
    lines = [test] if len(test) <= WIDTH else ["    if not (", *lines_inside(condition, 8), "    ):"]
    return block([*lines, *wrap("raise ", f"ValueError({quoted(message)})", "", 8)])


def annotation(hyper: HyperSpec, number: str = "float") -> str:
    if isinstance(hyper.default, tuple):
        return f"tuple[{', '.join([number] * len(hyper.default))}]"
    return number


def default_text(value: float | tuple[float, ...]) -> str:
    """A default as a person writes it: `1e-8`, `0.001`, `(0.9, 0.999)`, `0`."""
    if isinstance(value, tuple):
        inner = ", ".join(default_text(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    short = f"{value:g}"
    if float(short) == value and "e" in short:
        return short.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
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


def _step_scalars(compiled: Compiled, arguments: list[str], modules: set[str]) -> dict[str, Any]:
    spec, checked, printer = compiled.spec, compiled.checked, HostScalars()
    parameters = ["step: float"] if spec.uses_step else []
    parameters += [f"{scalar.name}: float" for scalar in spec.scalars]
    parameters += [f"first_{name}: bool" for name in spec.first]
    lines: list[str] = []
    for statement in checked.scalar_program:
        value = printer.text(statement.value)
        if not is_boolean(statement.value, compiled.layout.booleans) and printer.is_plain(statement.value):
            value = printer.helper("Real", value)
        names = statement.names if isinstance(statement, syntax.Let) else (statement.name,)
        lines += wrap(f"{', '.join(names)} = ", value.text, "", 4)
    # Names of the spec are the variables here.
    table = distinct("table", scalar_names(checked))
    lines.append(f"    {table} = (")
    for slot in compiled.table:
        shown = printer.text(slot.expr).text
        comment = "" if shown == slot.name else f"  # {slot.name}"
        lines += item(shown, f",{comment}", 8)
    lines.append("    )")
    lines.append(f"    return {table}, {tuple_text([scalar.name for scalar in spec.scalars])}")
    if printer.uses_ieee:
        modules.add("ieee")
    result = "tuple[tuple[float, ...], tuple[float, ...]]"
    signature = _signature("step_scalars", ["*", *parameters, *arguments], result)
    return {"step_scalars": signature, "scalar_lines": lines}


def _reference(compiled: Compiled, conditions: list[str | None], modules: set[str]) -> dict[str, Any]:
    spec, printer = compiled.spec, ReferencePrinter(compiled.layout)
    exact = tuple(compiled.layout.slots.values())
    lines = unpack([slot.name for slot in exact], f"s[:{len(exact)}].unbind()")
    lines.append("    weight, grad = weight.to(s.dtype), grad.to(s.dtype)")
    for state, condition in zip(spec.states, conditions, strict=True):
        read = f'{state.name} = state["{state.name}"].to(s.dtype)'
        lines += [f"    if {condition}:", f"        {read}"] if condition else [f"    {read}"]
    lines += reference_body(compiled.checked, compiled.layout, printer)
    copied = borrowed(compiled.checked, compiled.layout)
    values = {name: f"{name}.clone()" if name in copied else name for name in ("weight", *spec.state_names)}
    always = [f'"{s.name}": {values[s.name]}' for s, c in zip(spec.states, conditions, strict=True) if not c]
    lines += bracketed("state = ", always, "", 4, "{}")
    for state, condition in zip(spec.states, conditions, strict=True):
        if condition:
            lines.extend([f"    if {condition}:", f'        state["{state.name}"] = {values[state.name]}'])
    lines.append(f"    return {values['weight']}, state")
    parameters = ["weight: Tensor", "grad: Tensor", "state: dict[str, Tensor]", "s: Tensor"]
    flags = dict(compiled.checked.flags)
    parameters += [f"{switch.name}: bool = {flags.get(switch.text, False)}" for switch in spec.switches]
    signature = _signature(f"{compiled.stem}_reference", parameters, "tuple[Tensor, dict[str, Tensor]]")
    if printer.uses_math:
        modules.add("reference_math")
    return {"reference": signature, "reference_lines": lines}


def unpack(names: list[str], value: str, indent: int = 4) -> list[str]:
    """`a, b = value`, one name a line where it does not fit."""
    pad = " " * indent
    if len(names) == 1:
        return [f"{pad}({names[0]},) = {value}"]
    line = f"{pad}{', '.join(names)} = {value}"
    return [line] if len(line) <= WIDTH else bracketed("", names, f" = {value}", indent)


def _torch_keywords(compiled: Compiled) -> str:
    """The type of what torch.optim's constructors take beside what the spec declares; empty if it declares some of it,
    since type checkers allow no parameter beside a key of the same name.
    """
    names = _arguments(compiled)
    if names & _SWITCHES:
        return ""
    return "SGDSwitches" if compiled.spec.name == "SGD" and not names & _OF_MOMENTUM else "Switches"


def _arguments(compiled: Compiled) -> set[str]:
    return {*compiled.spec.hyper_names, *compiled.spec.flag_names}


def _constructor(compiled: Compiled) -> list[str]:
    spec, names = compiled.spec, _arguments(compiled)
    # A hyper that selects the variant must be a number that the host knows.
    numbers = ["float" if h.name in spec.switching_hypers else "float | Tensor" for h in spec.hypers]
    parameters = ["self", "params: ParamsT"]
    parameters += [
        f"{h.name}: {annotation(h, number)} = {default_text(h.default)}"
        for h, number in zip(spec.hypers, numbers, strict=True)
    ]
    parameters += ["*", *(f"{flag.name}: bool = {flag.default}" for flag in spec.flags), *_OPTIONS]
    hint = _torch_keywords(compiled)
    parameters.append(f"**{distinct('switches', names)}" + (f": Unpack[{hint}]" if hint else ""))
    return bracketed("def __init__", parameters, " -> None:", 4)


def _super_call(compiled: Compiled) -> list[str]:
    spec = compiled.spec
    arguments = _arguments(compiled)
    hypers, flags = distinct("hypers", arguments), distinct("flags", arguments)
    lines = bracketed(f"{hypers}: dict[str, Hyper] = ", [f'"{h.name}": {h.name}' for h in spec.hypers], "", 8, "{}")
    lines += bracketed(f"{flags} = ", [f'"{f.name}": {f.name}' for f in spec.flags], "", 8, "{}")
    options = [f"{name}={name}" for name in (option.split(":")[0] for option in _OPTIONS)]
    options.append(f"**{distinct('switches', arguments)}")
    return [*lines, *bracketed("super().__init__", ["params", hypers, flags, *options], "", 8)]
