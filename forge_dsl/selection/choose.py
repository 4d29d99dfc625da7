"""The schedule of a fused linear update: by measurement where there is one, else by a rule. Costs a look-up.

The rule, where no measurement speaks (none does in exact arithmetic, nor where a tensor is kept in any format but a
plain one: 8-bit codes, or bits beside a weight): the kernel for Hopper where it can take the update and the weight has
tiles enough for it; the portable kernel where no operand and no stored tensor is fp32; bands where one is, for the
library's fp32 product and the element-wise kernel are worth their trips there, and where rows do not begin at multiples
of 16 bytes, which a tile kernel then loads element by element (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from forge_dsl.selection import table
from forge_dsl.selection.table import Schedule, Update, bucket


def choose(
    setting: str,
    x: Tensor,
    weight: Tensor,
    stored: Iterable[Tensor],
    on_hopper: bool = False,
    measured: bool = True,
    gradient_bits: int = 24,
) -> Schedule:
    """The schedule of an update of `weight` [out, in] from `x` [tokens, in].

    setting: the optimizer's `schedule`, "auto", "fused" (one kernel) or "banded"; stored: the weight and its states;
    on_hopper: the kernel for Hopper can take this update; measured: tables speak for it, which they do in fast
    arithmetic and where weight and states are kept in plain formats; gradient_bits: with how many the kernel for Hopper
    hands the gradient over. On a CPU "auto" is "banded".
    """
    if setting == "banded":
        return "banded"
    fused = setting == "fused"
    if weight.device.type != "cuda":
        return "portable" if fused else "banded"
    stored = list(stored)
    wide = any(tensor.dtype == torch.float32 for tensor in stored)
    rows, columns = weight.shape
    aligned = rows % 8 == columns % 8 == 0
    if measured and aligned:
        size = sum(tensor.element_size() for tensor in stored)
        sizes = bucket(rows), bucket(columns), bucket(x.shape[0])
        for name in measured_order(weight.device.index, str(x.dtype)[6:], size, wide, *sizes, gradient_bits):
            if (on_hopper or name != "hopper") and not (fused and name == "banded"):
                return name
    if on_hopper:
        return "hopper"
    return "portable" if fused or (aligned and x.dtype != torch.float32 and not wide) else "banded"


@lru_cache(maxsize=4096)
def measured_order(
    device: int, operand: str, stored: int, wide: bool, rows: int, columns: int, tokens: int, gradient_bits: int = 24
) -> tuple[Schedule, ...]:
    """Schedules from the fastest, as measured for this class of updates (see `table.Update`); empty if it was not.

    A class that was not measured with so many bits has the order of 24: the kernel for Hopper is a little faster with
    fewer of them and a little slower with more, and stays where it is until a measurement of its own says otherwise.
    """
    known = _measured(device)
    of_24 = Update(operand, stored, wide, rows, columns, tokens)
    return known.get(replace(of_24, gradient_bits=gradient_bits)) or known.get(of_24, ())


@lru_cache(maxsize=64)
def _measured(device: int) -> dict[Update, tuple[Schedule, ...]]:
    """Everything known about a device of this machine: the package's table, and over it the user's."""
    here = table.this_device(device)
    known: dict[Update, tuple[Schedule, ...]] = {}
    for one in table.packaged():
        if one.device.capability == here.capability:
            known |= one.orders()
    own = table.read(here)
    return known | own.orders() if own is not None else known


_age = 0


def forget() -> None:
    """Read the tables anew at the next choice; they are otherwise read once in a process."""
    global _age
    _age += 1
    measured_order.cache_clear()
    _measured.cache_clear()


def age() -> int:
    """Another number after each `forget`: what was chosen before may no longer be what is best."""
    return _age
