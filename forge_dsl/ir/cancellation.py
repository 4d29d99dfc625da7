"""States that a rule subtracts from another one before it takes a root or divides: those must be kept precisely.

Where two states nearly cancel, the relative error of what is left is that of the states many times over, and a root or
a quotient of it goes into the weight (centered RMSprop's `square_avg - grad_avg ** 2`). A few bits of the one that is
subtracted then decide whether the difference is positive at all.

Found is what a rule writes as a difference. Other forms of it are not, and the state that is subtracted from is not
marked: it is the only moment of the same rule's other variants, where 8 bits are enough for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from forge_dsl.ir.program import Op, Program

_SINKS = ("sqrt", "rsqrt", "rcp", "log")


def cancelling(program: Program, states: frozenset[str]) -> frozenset[str]:
    """Names of the states that stand on the subtracted side of such a difference, and also in none of what is left."""
    reads = _states_read(program, states)
    feeds = _feeds_a_root(program)
    found: set[str] = set()
    for index, op in enumerate(program.ops):
        for kept, subtracted in _differences(program, op):
            if feeds[index] and reads[kept] - reads[subtracted]:
                found |= reads[subtracted] - reads[kept]
    return frozenset(found)


def _differences(program: Program, op: Op) -> Iterator[tuple[int, int]]:
    """(minuend, subtrahend) of a difference, also one that is written as a sum with a negative number."""
    if op.code == "sub":
        yield op.args[0], op.args[1]
    if op.code == "add":
        for kept, other in (op.args, op.args[::-1]):
            if program.ops[other].code == "neg":
                yield kept, other


def _states_read(program: Program, states: frozenset[str]) -> list[frozenset[str]]:
    """For each operation, the states that its value depends on."""
    reads: list[frozenset[str]] = []
    for op in program.ops:
        if op.code == "input":
            reads.append(frozenset({str(op.attr)}) & states)
        else:
            reads.append(frozenset().union(*(reads[arg] for arg in op.args)))
    return reads


def _feeds_a_root(program: Program) -> list[bool]:
    """For each operation, whether a root, a logarithm or a divisor depends on its value."""
    feeds = [False] * len(program.ops)
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        for place, arg in enumerate(op.args):
            if feeds[index] or op.code in _SINKS or (op.code == "div" and place == 1):
                feeds[arg] = True
    return feeds
