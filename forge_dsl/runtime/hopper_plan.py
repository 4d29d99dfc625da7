"""How the Hopper kernel is configured for an update: stages of operands, slices of the epilogue, and who takes them.

As measured on an H200 (`benchmarks/hopper_sweep.py --plans`), within what does not spill a register
(`benchmarks/hopper_registers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from forge_dsl.runtime.storage import BLOCK_WISE, Storage

# Up to about this many tokens memory is the limit, and lines are asked for in L2 ahead of their loads.
MEMORY_BOUND = 1024
# Tokens a stage and stages of operands beside a tile's gradient: what fits into 227 KiB.
_OPERAND_STAGES = {16: (64, 3), 20: (64, 3), 24: (32, 5), 32: (32, 4)}


@dataclass(frozen=True)
class Plan:
    """A configuration.

    block_t tokens a stage, `stages` of them; `rows` of a slice of the epilogue; `every`, `last`: how many eighths of an
    ordinary tile, and of a program's last one, the epilogue keeps for itself, the warps of the main loop updating the
    rest, `together` slices at a time; `ahead`: how many slices ahead L2 is asked for lines; `eager`: the next slice is
    loaded before the present one is updated.
    """

    block_t: int
    stages: int
    rows: int
    every: int
    last: int
    together: int
    ahead: int
    eager: bool

    def __post_init__(self) -> None:
        """No slice beyond the tile's eighth is loaded."""
        assert (8 - self.every) % self.together == (8 - self.last) % self.together == 0


@lru_cache(maxsize=1024)
def plan(
    tokens: int,
    bytes_per_element: int,
    masked: bool,
    exact: bool,
    gradient_bits: int,
    coded: bool = False,
    rounded: bool = False,
) -> Plan:
    """The configuration for a weight and states of together `bytes_per_element`. In fast arithmetic none spills.

    coded: as the function of that name says; rounded: the weight is rounded stochastically.

    A slice of 64 rows keeps more loads in flight; it has the registers for that up to a weight and two states of 16
    bits without masks, the weight rounded stochastically or not. As measured on an H200: the epilogue keeps less of a
    program's last tile where the main loop is what takes the time; and where arithmetic is, less of every tile. (A
    share of ordinary tiles that is not that of the last ones is a number at run time, and takes registers.)
    """
    block_t, stages = _OPERAND_STAGES[gradient_bits]
    small = tokens <= MEMORY_BOUND
    # Exact division and root need the registers that a second slice of the helping warps would take.
    every, last, together = (8, 4, 1 if exact else 2) if small else (8, 3, 1)
    # With another hand-over than the one of 24 bits rounding beside two states is up to four registers short.
    short = rounded and gradient_bits != 24 and bytes_per_element == 6
    if bytes_per_element <= 6 and not masked and not exact and not coded and not short:
        return Plan(block_t, stages, 64, every, last, together, 2 if small else 0, True)
    if coded and masked and bytes_per_element <= 5:
        # With masks the helping warps have no registers for codes.
        every = last = 8
    elif coded and small and bytes_per_element <= 6:
        every = last = 5 if bytes_per_element == 6 else 6
        together = 1
    return Plan(block_t, stages, 32, every, last, together, 3 if small else 0, bytes_per_element <= 16)


def coded(kept: Storage, stored: Sequence[Tensor]) -> bool:
    """Whether storing takes more registers than rounding a weight beside states of 16 bits; see `plan`."""
    wide = any(kept.draws) and any(tensor.dtype == torch.float32 for tensor in stored)
    return wide or any(kept.draws[1:]) or set(kept.formats) != {"plain"}


def for_formats(chosen: Plan, kept: Storage, masked: bool, exact: bool) -> Plan:
    """The same for weights in codes, which leave the helping warps registers for one slice at a time, and with masks,
    or beside states of plain types, for those of a program's last tile only; and for states in fp8, whose codes take
    fewer registers than others do.
    """
    if kept.formats[0] in BLOCK_WISE:
        helped = not masked and any(form in BLOCK_WISE for form in kept.formats[1:])
        return replace(chosen, together=1, every=chosen.every if helped else 8)
    forms = {form for form in kept.formats[1:] if form in BLOCK_WISE}
    if forms == {"fp8"} and chosen.every == chosen.last == 6 and not masked and not exact:
        return replace(chosen, last=4, together=2)
    return chosen
