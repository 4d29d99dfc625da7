"""How the Hopper kernel is configured for an update: stages of operands, slices of the epilogue, and who takes them.

As measured on an H200 (`benchmarks/hopper_sweep.py --plans`), within what does not spill a register
(`benchmarks/hopper_registers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_dsl.runtime.storage import BLOCK_WISE, Storage

# Up to about this many tokens memory is the limit, and lines are asked for in L2 ahead of their loads.
MEMORY_BOUND = 1024
# From about this many on the matrix units are, however much arithmetic the rule and its formats take.
MATRIX_BOUND = 3072
# Tokens a stage and stages of operands beside a tile's gradient: what fits into 227 KiB.
_OPERAND_STAGES = {16: (64, 3), 20: (64, 3), 24: (32, 5), 32: (32, 4)}
# A weight and two states.
_TWO_STATES = 3


@dataclass(frozen=True)
class Plan:
    """A configuration.

    block_t tokens a stage, `stages` of them; `rows` of a slice of the epilogue; `every`, `last`: how many eighths of an
    ordinary tile, and of a program's last one, the epilogue keeps for itself, the warps of the main loop updating the
    rest, `together` slices at a time; `ahead`: how many slices ahead L2 is asked for lines; `eager`: the next slice is
    loaded before the present one is updated; `loader`: a warp of its own loads the operands.
    """

    block_t: int
    stages: int
    rows: int
    every: int
    last: int
    together: int
    ahead: int
    eager: bool
    loader: bool

    def __post_init__(self) -> None:
        """No slice beyond the tile's eighth is loaded."""
        assert (8 - self.every) % self.together == (8 - self.last) % self.together == 0


def plan(tokens: int, stored: Sequence[Tensor], kept: Storage, masked: bool, exact: bool, gradient_bits: int) -> Plan:
    """The configuration for a weight and those of its states that there are, `stored`, and how all are `kept`.

    A slice of 64 rows keeps more loads in flight; it has the registers for that up to a weight and two states of 16
    bits without masks, the weight rounded stochastically or not. In fast arithmetic nothing spills.
    """
    block_t, stages = _OPERAND_STAGES[gradient_bits]
    few, many = tokens <= MEMORY_BOUND, tokens > MATRIX_BOUND
    size, heavy = sum(tensor.element_size() for tensor in stored), _is_heavy(stored, kept)
    codes, usual = _in_codes(kept.formats), not (masked or exact)
    every, last, together = _shares(few, stored, kept, masked, exact)
    # A warp that loads takes registers from the epilogue and work from the main loop: good where that is the limit, and
    # where what is left is enough.
    slow = codes or any(tensor.dtype == torch.float32 for tensor in stored)
    loader = usual and gradient_bits == 24 and not few and (not slow or (many and len(stored) <= _TWO_STATES))
    # Beside it, or with another hand-over than the one of 24 bits, rounding beside two states is four registers short.
    short = kept.draws[0] and size == 6 and (loader or gradient_bits != 24)
    if size <= 6 and usual and not (heavy or short):
        return Plan(block_t, stages, 64, every, last, together, 2 if few else 0, True, loader)
    # Where states are rounded, or a weight has bits beside it, loads are what takes the time for longer; codes take
    # longer to compute than to load.
    beside = kept.formats[0] not in ("plain", *BLOCK_WISE)
    loads = few or (usual and not many and not codes and (any(kept.draws[1:]) or beside))
    # Three states leave no registers for a second slice.
    eager = size <= 16 and (len(stored) <= _TWO_STATES or not (heavy or slow))
    return Plan(block_t, stages, 32, every, last, together, 3 if loads else 0, eager, loader)


def sample_tokens(tokens: int) -> int:
    """As many tokens as are enough, and no more than there are, for every plan to be the same."""
    return min(tokens, (MATRIX_BOUND if tokens > MATRIX_BOUND else MEMORY_BOUND) + 72)


def _shares(few: bool, stored: Sequence[Tensor], kept: Storage, masked: bool, exact: bool) -> tuple[int, int, int]:
    """`every`, `last` and `together` of a plan, as measured on an H200.

    The epilogue keeps less of a program's last tile where the main loop is what takes the time, and less of every tile
    where arithmetic is. A share of ordinary tiles that is not that of the last ones is a number at run time, and takes
    registers; so do two slices at a time, for which there are enough up to two states in codes.
    """
    size, heavy = sum(tensor.element_size() for tensor in stored), _is_heavy(stored, kept)
    codes = _in_codes(kept.formats[1:])
    two = 0 < len(codes) == len(stored) - 1 < _TWO_STATES and kept.formats[0] == "plain" and not (masked or exact)
    if heavy and masked and size <= 5:
        # With masks the helping warps have no registers for codes.
        return 8, 8, 1
    if few and heavy and size <= 6:
        every, last, together = (5, 5, 1) if size == 6 else (6, 4, 2) if two else (6, 6, 1)
    elif few:
        every, last, together = 8, 4, 1 if exact or len(stored) > _TWO_STATES else 2
    else:
        every, last, together = (8, 2, 2) if two and set(codes) == {"fp8"} else (8, 3, 1)
    if kept.formats[0] in BLOCK_WISE:
        # A weight in codes leaves the helping warps registers for one slice at a time, and with masks, or beside
        # states of plain types, for those of a program's last tile only.
        every, together = every if codes and not masked else 8, 1
    return every, last, together


def _in_codes(formats: Sequence[str]) -> list[str]:
    """Those that are codes."""
    return [form for form in formats if form in BLOCK_WISE]


def _is_heavy(stored: Sequence[Tensor], kept: Storage) -> bool:
    """Whether storing takes more registers than rounding a weight beside states of 16 bits."""
    wide = any(kept.draws) and any(tensor.dtype == torch.float32 for tensor in stored)
    return wide or any(kept.draws[1:]) or set(kept.formats) != {"plain"}
