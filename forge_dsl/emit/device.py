"""The parts of a generated module that run on the device: the rule for one coordinate, and the kernels around it."""

from __future__ import annotations

from typing import Any

from forge_dsl.compile import Compiled
from forge_dsl.emit.host import Sections, unpack
from forge_dsl.emit.layout import WIDTH, block, bracketed
from forge_dsl.emit.reference import switch_text
from forge_dsl.emit.tree import DeviceScalars
from forge_dsl.emit.triton import print_program
from forge_dsl.emit.wrap import wrap
from forge_dsl.ir import words
from forge_dsl.ir.names import distinct
from forge_dsl.ir.table import scalar_names
from forge_dsl.ir.units import multipliers
from forge_dsl.language import syntax

_STRIDES = ("weight_row", "weight_column", "state_row", "state_column")
_PART = [
    "slices[part]",
    "device_tiles.part_rows(first_row, BLOCK_O, SLICES_O, part // SLICES_I)",
    "first_column + part % SLICES_I * width",
]
_STORAGE = ("formats: tl.constexpr", "draws: tl.constexpr")
_EXACT_DOC = "Exact: every division and root correctly rounded, nothing fused or re-associated."
_FAST_DOC = "Fast: approximate roots and quotients; what has no coordinate was multiplied out once per step."


def device_sections(compiled: Compiled) -> Sections:
    """Everything for the device side of `optimizer.py.j2`."""
    found = Sections(modules={"device_hopper", "device_operands", "device_slices", "device_storage", "device_tiles"})
    stem, spec = compiled.stem, compiled.spec
    states = list(spec.state_names)
    switches = [switch.name for switch in spec.switches]
    variables = words.renamed(states, words.SLICE | words.functions(stem), frozenset(switches))
    pointers: list[str] = []
    for name in states:
        taken = words.KERNELS | words.functions(stem) | {*states, *variables.values(), *pointers, *switches}
        pointers.append(distinct(f"{name}_ptr", taken))
    types = [distinct(f"{name}_type", words.KERNELS | {*states, *pointers, *switches}) for name in states]
    constants = [f"{name}: tl.constexpr" for name in switches]
    written = {output.name for output in compiled.exact.outputs} | {output.name for output in compiled.fast.outputs}
    conditions = [
        None if s.when is None else switch_text(s.when, compiled.layout).text for s in compiled.checked.states
    ]
    results = ["weight", *(name for name in states if name in written)]
    stored = [variables.get(name, name) for name in results]
    fetched = ["weight", *(variables[name] for name in states)]
    tensors = ["weight", "grad", *states]
    arguments = ["weight", "grad", *variables.values(), "s", *switches]
    taken_names = frozenset({slot.name for slot in compiled.table} | {*switches} | words.UPDATE)
    updates = []
    for suffix, program, doc in (("", compiled.fast, _FAST_DOC), ("_exact", compiled.exact, _EXACT_DOC)):
        body = print_program(program, bool(suffix), taken_names)
        updates.append(
            {
                "signature": block(bracketed(f"def {stem}_update{suffix}", [*tensors, "s", *constants], ":")),
                "doc": doc,
                "lines": [*unpack([slot.name for slot in compiled.table], "s"), *body.lines],
                "results": ", ".join(body.results.get(name, name) for name in results),
            }
        )
    tile = ["grad", "rows", "first_column", "weight_ptr", *pointers, "extras", "s", "keys"]
    tile += ["n_rows", "n_columns", "place", *_STRIDES]
    domains = [state.nonnegative for state in spec.states]
    places = {slot.name: place for place, slot in enumerate(compiled.table)}
    factors = {name: [places[slot] for slot in slots] for name, slots in multipliers(compiled.fast).items() if slots}
    found.context = {
        "updates": updates,
        "states": [
            {
                "name": variables[name],
                "pointer": pointer,
                "type": kind,
                "condition": condition,
                "written": name in written,
                "load": _load(variables[name], pointer, stream, nonnegative, 4 if condition is None else 8),
                "store": _store(variables[name], pointer, stream, nonnegative, 4 if condition is None else 8),
                **_hopper_tensor(
                    variables[name], pointer, stream, nonnegative, factors.get(name, []), 4 if condition is None else 8
                ),
            }
            for stream, (name, pointer, kind, condition, nonnegative) in enumerate(
                zip(states, pointers, types, conditions, domains, strict=True), 1
            )
        ],
        "weight": {
            "load": _load("weight", "weight_ptr", 0, False, 4),
            "store": _store("weight", "weight_ptr", 0, False, 4),
            **_hopper_tensor("weight", "weight_ptr", 0, False, factors.get("weight", []), 4),
        },
        "keys": _keys(compiled),
        "spec_width": len(compiled.table),
        "table_loads": _table_loads(compiled),
        "tile": block(
            bracketed(
                f"def {stem}_tile", [*tile, *constants, "exact: tl.constexpr", *_STORAGE, "flat: tl.constexpr"], ":"
            )
        ),
        "stored": ", ".join(fetched) if states else "(weight,)",
        "call_exact": _update_call(f"{stem}_update_exact", stored, arguments),
        "call_fast": _update_call(f"{stem}_update", stored, arguments),
        "linear_kernel": _linear_signature(stem, pointers, constants),
        "linear_tile": _tile_call(stem, _PART, pointers, "(0, 1, n_rows)", switches, indent=12),
        **_hopper_sections(stem, pointers, switches, constants),
        "elementwise_kernel": _elementwise_signature(stem, pointers, constants),
        "elementwise_tile": _tile_call(
            stem,
            ["grad", "rows", "first_column"],
            pointers,
            "(base, 1, block_stride)",
            switches,
            indent=4,
        ),
        "many_kernel": _many_signature(stem, types, constants),
        "many_tile": _many_tile(stem, pointers, switches),
    }
    found.context |= _scalars_kernel(compiled)
    lines = [line for update in updates for line in update["lines"]] + found.context["device_lines"]
    if any("device_math." in line for line in lines):
        found.modules.add("device_math")
    return found


def _table_loads(compiled: Compiled) -> list[str]:
    names = [slot.name for slot in compiled.table]
    return [f"tl.load({_offset('table', index)}),  # {name}" for index, name in enumerate(names)]


def _keys(compiled: Compiled) -> str:
    """What draws are made of stands in the table after its scalars: a word for all tensors, then one for each."""
    width = len(compiled.table)
    keys = [f"device_storage.key({_offset('table', width)}, True)"]
    streams = range(1 + len(compiled.spec.states))
    keys += [f"device_storage.key(table + {width + 1 + i}, draws[{i}])" for i in streams]
    return block(["    return (", *(f"        {key}," for key in keys), "    )"])


def _offset(pointer: str, index: int) -> str:
    return f"{pointer} + {index}" if index else pointer


def _update_call(function: str, results: list[str], arguments: list[str]) -> str:
    target = ", ".join(results)
    return block(bracketed(f"{target} = {function}", arguments, "", 8))


def _load(name: str, pointer: str, stream: int, nonnegative: bool, indent: int) -> str:
    """A tensor's tile as it is kept, in fp32. stream: the tensor's place among the weight and the states."""
    at = "weight_at" if stream == 0 else "state_at"
    arguments = [pointer, "extras", at, "part", "formats", str(stream)]
    arguments += ["NONNEGATIVE=True"] if nonnegative else []
    return block(bracketed(f"{name} = device_storage.load", arguments, "", indent))


def _store(name: str, pointer: str, stream: int, nonnegative: bool, indent: int) -> str:
    at = "weight_at" if stream == 0 else "state_at"
    arguments = [pointer, "extras", at, name, "part", "keys", "formats", "draws", "exact", "flat", str(stream)]
    arguments += ["NONNEGATIVE=True"] if nonnegative else []
    return block(bracketed("device_storage.store", arguments, "", indent))


def _hopper_tensor(
    name: str, pointer: str, stream: int, nonnegative: bool, factors: list[int], indent: int
) -> dict[str, str]:
    """A tensor's slice in the Hopper kernel: started to load, in fp32, and stored.

    factors: places in the table of the scalars that can take its scales, see `ir.units`.
    """
    at = "weight_at" if stream == 0 else "state_at"
    number, domain = str(stream), ["NONNEGATIVE=True"] if nonnegative else []
    fetch = [pointer, "extras", at, "formats", "even", number]
    widen = [pointer, at, name, "formats", number]
    put = [pointer, "extras", at, name, "keys", "formats", "draws", "exact", "even", number]
    if factors:
        head, widen = f"{name}, s = device_slices.widen_for", [*widen, "s", _tuple([*map(str, factors)]), "exact"]
    else:
        head = f"{name} = device_slices.widen"
    return {
        "fetch": block(bracketed(f"{name} = device_slices.fetch", fetch, "", indent)),
        "widen": block(bracketed(head, [*widen, *domain], "", indent)),
        "put": block(bracketed("device_slices.store", [*put, *domain], "", indent)),
    }


def _tile_call(stem: str, head: list[str], pointers: list[str], place: str, switches: list[str], indent: int) -> str:
    arguments = [*head, "weight_ptr", *pointers, "extras", "s", "keys", "n_rows", "n_columns", place]
    arguments += [*_STRIDES, *switches, "exact", "formats", "draws", "False"]
    return block(bracketed(f"{stem}_tile", arguments, "", indent))


def _linear_signature(stem: str, pointers: list[str], constants: list[str]) -> str:
    parameters = ["x", "dy", "weight_ptr", *pointers, "extras", "scaled", "table", "tokens", "n_rows", "n_columns"]
    parameters += ["x_token", "x_column", "dy_token", "dy_row", *_STRIDES, *constants]
    names = (
        "exact",
        "formats",
        "draws",
        "even",
        "wide",
        "upcast",
        "precision",
        "operands",
        "BLOCK_O",
        "BLOCK_I",
        "BLOCK_T",
        "SLICES_O",
        "SLICES_I",
        "GROUP",
    )
    parameters += [f"{name}: tl.constexpr" for name in names]
    return block(bracketed(f"def {stem}_linear_kernel", parameters, ":"))


def _hopper_sections(stem: str, pointers: list[str], switches: list[str], constants: list[str]) -> dict[str, str]:
    """What of the Hopper kernel depends on the spec; the rest is `runtime/device_hopper.py`."""
    tensors = ["weight_ptr", *pointers]
    at = ["at", *tensors, "extras", *constants, "formats: tl.constexpr", "even: tl.constexpr"]
    apply = ["at", "stored", "grad", "s", "keys", *tensors, "extras", *constants, "exact: tl.constexpr", *_STORAGE]
    kernel = ["dy", "x", *tensors, "extras", "table", "tokens", "n_rows", "n_columns", "weight_row", "state_row"]
    names = ["exact", "formats", "draws", "even", "vectors", "alike", "gradient_bits"]
    names += ["STAGES", "ROWS", "EVERY", "LAST", "TOGETHER", "AHEAD", "EAGER", "PAIRS", "LOADER", "GROUP"]
    kernel += [*constants, *(f"{name}: tl.constexpr" for name in names)]
    functions = [f"{stem}_hopper_fetch", f"{stem}_hopper_apply", f"{stem}_hopper_prefetch"]
    functions += [f"{stem}_table", f"{stem}_keys"]
    run = ["dy", "x", "table", "tokens", "(n_rows, n_columns)", "(weight_row, state_row)", _tuple(tensors), "extras"]
    run += [_tuple(switches), _tuple(functions), *names]
    return {
        "hopper_fetch": block(bracketed(f"def {stem}_hopper_fetch", at, ":")),
        "hopper_apply": block(bracketed(f"def {stem}_hopper_apply", [*apply, "even: tl.constexpr"], ":")),
        "hopper_prefetch": block(bracketed(f"def {stem}_hopper_prefetch", ["at", *tensors, *constants], ":")),
        "hopper_kernel": block(bracketed(f"def {stem}_hopper_kernel", kernel, ":")),
        "hopper_run": block(bracketed("device_hopper.run", run, "", 4)),
    }


def _tuple(items: list[str]) -> str:
    """A tuple as one argument of a call that has a line for each, 8 columns in."""
    single = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return single if len(single) + 9 <= WIDTH else block(bracketed("", items, "", 8)).lstrip()


def _elementwise_signature(stem: str, pointers: list[str], constants: list[str]) -> str:
    parameters = [
        "grad_ptr",
        "weight_ptr",
        *pointers,
        "extras",
        "table",
        "n_rows",
        "n_columns",
        "base",
        "block_stride",
    ]
    parameters += ["grad_row", "grad_column", *_STRIDES, *constants]
    names = ("exact", "formats", "draws", "wide", "BLOCK_O", "BLOCK_I")
    parameters += [f"{name}: tl.constexpr" for name in names]
    return block(bracketed(f"def {stem}_elementwise_kernel", parameters, ":"))


def _many_signature(stem: str, types: list[str], constants: list[str]) -> str:
    parameters = ["pointers", "sizes", "places", *constants]
    names = ("exact", "formats", "draws", "grad_type", "weight_type", *types, "aligned", "BLOCK")
    parameters += [f"{name}: tl.constexpr" for name in names]
    return block(bracketed(f"def {stem}_many_kernel", parameters, ":"))


def _many_tile(stem: str, pointers: list[str], switches: list[str]) -> str:
    extras = _tuple(["weight_ptr"] * (1 + len(pointers)))
    arguments = ["grad", "tl.arange(0, 1)", "first_column", "weight_ptr", *pointers, extras, "s", "keys", "1", "size"]
    arguments += ["(0, row_length, 1)", "0", "1", "0", "1"]
    return block(bracketed(f"{stem}_tile", [*arguments, *switches, "exact", "formats", "draws", "True"], "", 4))


def _names(compiled: Compiled) -> set[str]:
    """Every name that the scalar program and the table read."""
    nodes = [*compiled.checked.scalar_program, *(slot.expr for slot in compiled.table)]
    return {found.id for node in nodes for found in syntax.walk(node) if isinstance(found, syntax.Name)}


def _scalars_kernel(compiled: Compiled) -> dict[str, Any]:
    spec = compiled.spec
    variables = words.renamed(sorted(scalar_names(compiled.checked)), words.SCALARS)
    printer = DeviceScalars(variables)
    parameters = ["hypers", "counters", "tables", "pending", "bases", "table_stride", "n_counters"]
    parameters += [f"{variables[flag.name]}: tl.constexpr" for flag in spec.flags]
    read = _names(compiled)
    places = _places(compiled)
    lines = [
        f"    {variables[name]} = tl.load({_offset('hypers', places[name])})"
        for name in spec.hyper_names
        if name in read and name not in _tuples(compiled)
    ]
    counters = [*(["step"] if spec.uses_step else []), *(s.name for s in spec.scalars), *spec.first]
    count = variables["step"] if spec.uses_step else "update"
    for index, name in enumerate(counters):
        load = f"tl.load({_offset('counter', index)})"
        if name in spec.first:
            lines.append(f"    {variables[f'first_{name}']} = {load} == 0.0")
        else:
            lines.append(f"    {variables[name]} = {load}{' + 1.0' if name == 'step' else ''}")
    for statement in compiled.checked.scalar_program:
        names = statement.names if isinstance(statement, syntax.Let) else (statement.name,)
        if isinstance(statement.value, syntax.Name) and statement.value.id in _tuples(compiled):
            base = places[statement.value.id]
            lines += [f"    {variables[n]} = tl.load({_offset('hypers', base + i)})" for i, n in enumerate(names)]
        else:
            lines += wrap(f"{variables[names[0]]} = ", printer.value(statement.value).text, "", 4)
    for index, slot in enumerate(compiled.table):
        lines += wrap("", f"tl.store({_offset('table', index)}, {printer.value(slot.expr).text})", "", 4)
    for index, name in enumerate(counters):
        value = "1.0" if name in spec.first else variables[name]
        lines.append(f"    tl.store({_offset('next_counter', index)}, {value})")
    if not spec.uses_step:
        lines.append(f"    update = tl.load({_offset('counter', len(counters))}) + 1.0")
        lines.append(f"    tl.store({_offset('next_counter', len(counters))}, update)")
    signature = bracketed(f"def {compiled.stem}_scalars_kernel", parameters, ":")
    return {"scalars_kernel": block(signature), "device_lines": lines, "count": count}


def _tuples(compiled: Compiled) -> set[str]:
    return {hyper.name for hyper in compiled.spec.hypers if isinstance(hyper.default, tuple)}


def _places(compiled: Compiled) -> dict[str, int]:
    """Where each hyper begins in the flat list of all numbers."""
    places, position = {}, 0
    for hyper in compiled.spec.hypers:
        places[hyper.name] = position
        position += len(hyper.default) if isinstance(hyper.default, tuple) else 1
    return places
