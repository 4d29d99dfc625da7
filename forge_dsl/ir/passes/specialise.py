"""One variant of a program: every switch known, every state that the variant lacks gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forge_dsl.ir.passes.rebuild import rebuild
from forge_dsl.ir.program import Builder, Op, Program


def specialise(program: Program, variant: Mapping[str, bool], absent: frozenset[str]) -> Program:
    """Take the known side of every `choose`; drop the outputs of states in `absent`."""

    def rewrite(build: Builder, op: Op) -> int:
        if op.code == "choose":
            return op.args[0] if variant[str(op.attr)] else op.args[1]
        return build.add(op)

    kept = tuple(output for output in program.outputs if output.name not in absent)
    return rebuild(replace(program, outputs=kept), rewrite)
