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
# Columns of a wide and of a narrow tile.
_WIDE, _NARROW = 256, 128
# Tokens a stage and stages of operands beside the gradient of one wide or of two narrow tiles: what fits into 227 KiB.
WIDE_STAGES = {16: (64, 3), 20: (64, 3), 24: (32, 5), 32: (32, 4)}
NARROW_STAGES = {16: (64, 5), 20: (64, 4), 24: (64, 4), 32: (64, 3)}
# A weight and two states.
_TWO_STATES = 3


@dataclass(frozen=True)
class Plan:
    """A configuration.

    narrow: tiles have 128 columns instead of 256, four warps that multiply and eight that update instead of the other
    way round. block_t tokens a stage, `stages` of them; `rows` of a slice of the epilogue; `every`, `last`: how many
    eighths of an ordinary tile, and of a program's last one, the epilogue keeps for itself, the warps of the main loop
    updating the rest, `together` eighths at a time; `ahead`: how many slices ahead L2 is asked for lines; `eager`: the
    next slice is loaded before the present one is updated; `pairs`: the loop over slices has two in its body; `loader`:
    a warp of its own loads the operands.
    """

    narrow: bool
    block_t: int
    stages: int
    rows: int
    every: int
    last: int
    together: int
    ahead: int
    eager: bool
    pairs: bool
    loader: bool

    def __post_init__(self) -> None:
        """No slice beyond the tile's eighth is loaded, and none of the epilogue's is cut."""
        assert (8 - self.every) % self.together == (8 - self.last) % self.together == 0
        eighth = 32 if self.narrow else 64
        step = 2 * self.rows if self.pairs else self.rows
        assert self.every * eighth % step == self.last * eighth % step == 0
        # Eight warps update whole slices, none of them twice.
        assert self.rows >= 64 or not self.narrow
        # Each tile's epilogue loads the first slice of the next one's.
        assert self.every > 0 or not self.eager

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return _NARROW if self.narrow else _WIDE


def plan(tokens: int, stored: Sequence[Tensor], kept: Storage, masked: bool, exact: bool, gradient_bits: int) -> Plan:
    """The configuration for a weight and those of its states that there are, `stored`, and how all are `kept`.

    In fast arithmetic nothing spills.
    """
    few, many = tokens <= MEMORY_BOUND, tokens > MATRIX_BOUND
    if masked or exact:
        return _with_masks(few, stored, kept, masked, exact, gradient_bits)
    size, wide_numbers = sum(tensor.element_size() for tensor in stored), _has_fp32(stored)
    # Codes, and bits beside a weight, leave no registers for two slices in the loop's body.
    roomy = not (_in_codes(kept.formats) or kept.formats[0] not in ("plain", *BLOCK_WISE))
    # Beyond 16 bytes a parameter there are none for the next slice; three states have fewer.
    eager = size <= 16 and (len(stored) <= _TWO_STATES or (roomy and not wide_numbers))
    pairs = roomy and eager
    loader = gradient_bits == 24 and not few
    if few and roomy and size <= 6 and not (wide_numbers or any(kept.draws)):
        # Memory is the limit, and wide tiles take the least from it. A slice of 64 rows keeps more loads in flight.
        found = _wide(gradient_bits, rows=64, last=4, together=2, ahead=2, eager=True)
    elif few or not (roomy or many):
        # The epilogue is the limit.
        last = 4
        if not roomy and few:
            last = 6
        elif not roomy and len(stored) < _TWO_STATES:
            # Beside a warp that loads, helping with a single state in codes takes a register too many in Triton 3.8
            # and 3.9.
            last = 8
        found = _narrow(gradient_bits, last=last, eager=eager, pairs=pairs, loader=loader)
    else:
        # The warp that loads takes registers from the epilogue, too many of fp32 where that is long beside the main
        # loop.
        loader = loader and (many or not wide_numbers)
        found = _wide(gradient_bits, last=4, eager=eager, pairs=pairs, loader=loader)
    return found


def _wide(
    gradient_bits: int,
    rows: int = 32,
    every: int = 8,
    last: int = 8,
    together: int = 1,
    ahead: int = 0,
    eager: bool = False,
    pairs: bool = False,
    loader: bool = False,
) -> Plan:
    return Plan(False, *WIDE_STAGES[gradient_bits], rows, every, last, together, ahead, eager, pairs, loader)


def _narrow(gradient_bits: int, last: int, eager: bool, pairs: bool, loader: bool) -> Plan:
    return Plan(True, *NARROW_STAGES[gradient_bits], 64, 8, last, 1, 0, eager, pairs, loader)


def _with_masks(
    few: bool, stored: Sequence[Tensor], kept: Storage, masked: bool, exact: bool, gradient_bits: int
) -> Plan:
    """The configuration at borders and in exact arithmetic, which take registers for masks and intermediate results."""
    size, heavy = sum(tensor.element_size() for tensor in stored), _is_heavy(stored, kept)
    slow = _in_codes(kept.formats) or _has_fp32(stored)
    eager = size <= 16 and (len(stored) <= _TWO_STATES or not (heavy or slow))
    every, last, together = _shares(few, stored, kept, masked, exact)
    return _wide(gradient_bits, 32, every, last, together, 3 if few else 0, eager)


def sample_tokens(tokens: int) -> int:
    """As many tokens as are enough, and no more than there are, for every plan to be the same."""
    return min(tokens, (MATRIX_BOUND if tokens > MATRIX_BOUND else MEMORY_BOUND) + 72)


def _shares(few: bool, stored: Sequence[Tensor], kept: Storage, masked: bool, exact: bool) -> tuple[int, int, int]:
    """`every`, `last` and `together` of a plan with masks or in exact arithmetic, as measured on an H200.

    The epilogue keeps less of a program's last tile where the main loop is what takes the time, and less of every tile
    where arithmetic is. A share of ordinary tiles that is not that of the last ones is a number at run time, and takes
    registers; so do two slices at a time, for which there are enough up to two states in codes.
    """
    size, heavy = sum(tensor.element_size() for tensor in stored), _is_heavy(stored, kept)
    codes = _in_codes(kept.formats[1:])
    if heavy and masked and size <= 5:
        # With masks the helping warps have no registers for codes.
        return 8, 8, 1
    if few and heavy and size <= 6:
        every, last, together = (5, 5, 1) if size == 6 else (6, 6, 1)
    elif few or not heavy:
        every, last, together = 8, 4, 1 if exact or len(stored) > _TWO_STATES else 2
    else:
        every, last, together = 8, 3, 1
    if kept.formats[0] in BLOCK_WISE:
        # A weight in codes leaves the helping warps registers for one slice at a time, and with masks, or beside
        # states of plain types, for those of a program's last tile only.
        every, together = every if codes and not masked else 8, 1
    return every, last, together


def _in_codes(formats: Sequence[str]) -> list[str]:
    """Those that are codes."""
    return [form for form in formats if form in BLOCK_WISE]


def _has_fp32(stored: Sequence[Tensor]) -> bool:
    return any(tensor.dtype == torch.float32 for tensor in stored)


def _is_heavy(stored: Sequence[Tensor], kept: Storage) -> bool:
    """Whether storing takes more registers than rounding a weight beside states of 16 bits."""
    wide = any(kept.draws) and _has_fp32(stored)
    return wide or any(kept.draws[1:]) or set(kept.formats) != {"plain"}
