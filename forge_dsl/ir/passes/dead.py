"""Dead code: operations that no output needs, table entries that no operation reads, writes of an unchanged state."""

from __future__ import annotations

from dataclasses import replace

from forge_dsl.ir.program import Program


def remove_dead(program: Program) -> Program:
    """Keep what reaches an output. An output that is its own input unchanged is not written at all."""
    outputs = tuple(out for out in program.outputs if not _is_own_input(program, out.name, out.value))
    live: set[int] = set()
    stack = [output.value for output in outputs]
    while stack:
        value = stack.pop()
        if value not in live:
            live.add(value)
            stack.extend(program.ops[value].args)
    order = sorted(live)
    new = {old: index for index, old in enumerate(order)}
    ops = tuple(replace(program.ops[old], args=tuple(new[arg] for arg in program.ops[old].args)) for old in order)
    read = {op.attr for op in ops if op.code == "slot"}
    return Program(
        ops,
        tuple(replace(output, value=new[output.value]) for output in outputs),
        tuple(slot for slot in program.slots if slot.name in read),
    )


def _is_own_input(program: Program, name: str, value: int) -> bool:
    op = program.ops[value]
    return op.code == "input" and op.attr == name
