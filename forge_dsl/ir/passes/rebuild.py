"""The one walk that passes share: rebuild a program operation by operation, sharing equal ones on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forge_dsl.ir.program import Builder, Op, Program

# Receives the builder and an operation whose arguments are already rebuilt; returns the value to use in its place.
Rewrite = Callable[[Builder, Op], int]


def rebuild(program: Program, rewrite: Rewrite) -> Program:
    """Apply `rewrite` to every operation in order. Equal results become one value."""
    build = Builder()
    value: list[int] = []
    for op in program.ops:
        value.append(rewrite(build, replace(op, args=tuple(value[arg] for arg in op.args))))
    outputs = tuple(replace(output, value=value[output.value]) for output in program.outputs)
    return replace(program, ops=tuple(build.ops), outputs=outputs)
