"""Tensors that a rule reads only as a factor of scalars, as `beta1 * exp_avg`: those scalars can take a common factor.

A state in 8 bits is a small number times the scale of its block. Where the rule allows it, the scale goes into the
scalar, once for a block, and not into each of its numbers.
"""

from __future__ import annotations

from forge_dsl.ir.program import Program, uses


def multipliers(program: Program) -> dict[str, tuple[str, ...]]:
    """By tensor, the slots that it is multiplied by, where it is read as their factor only, and they are only its."""
    users: dict[int, set[int]] = {}
    for user, used in uses(program):
        users.setdefault(used, set()).add(user)
    outputs = {output.value for output in program.outputs}
    found: dict[str, tuple[str, ...]] = {}
    for tensor, op in enumerate(program.ops):
        products = sorted(users.get(tensor, ()))
        if op.code != "input" or tensor in outputs or not products:
            continue
        factors = [_other_factor(program, product, tensor) for product in products]
        if all(f is not None and users[f] <= set(products) and f not in outputs for f in factors):
            names = [str(program.ops[factor].attr) for factor in factors if factor is not None]
            found[str(op.attr)] = tuple(dict.fromkeys(names))
    return found


def _other_factor(program: Program, product: int, tensor: int) -> int | None:
    """The slot that `product` multiplies `tensor` by; None where it is anything else."""
    op = program.ops[product]
    if op.code != "mul" or op.args.count(tensor) != 1:
        return None
    other = op.args[0] if op.args[1] == tensor else op.args[1]
    return other if program.ops[other].code == "slot" and not program.ops[other].boolean else None
