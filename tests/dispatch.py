"""One fused step on plain tensors, without an optimizer, by the kernel that an optimizer would take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forge_dsl.runtime import hopper, launch, trust
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import Storage, plain


def linear_step(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool,
    kept: Storage | None = None,
    gradient_bits: int = 24,
) -> None:
    """The kernel for Hopper where it suits and is right, the portable one elsewhere. Arguments as of those two."""
    kept = kept or plain(len(states))
    found = hopper.find(rule, x, dy, weight, states, switches, kept, exact, gradient_bits)
    if found is not None and trust.holds(found, rule, x, weight, states, switches, kept):
        found(x, dy, weight, states, table, kept)
    else:
        launch.linear_step_portable(rule, x, dy, weight, states, table, switches, exact, kept)
