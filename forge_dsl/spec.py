"""Facts about a compiled optimizer that tools and the runtime read: the validated, serialisable face of a spec."""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Range(_Facts):
    """An interval of the reals. `low_open` says that `low` itself is outside."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether `value` is a number inside; NaN never is."""
        if not isinstance(value, int | float) or math.isnan(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


class HyperSpec(_Facts):
    """A run-time scalar, or a tuple of them: one range per element, None where any finite number will do."""

    name: str
    default: float | tuple[float, ...]
    ranges: tuple[Range | None, ...]


class FlagSpec(_Facts):
    """A compile-time choice."""

    name: str
    default: bool


class StateSpec(_Facts):
    """A tensor of the weight's shape.

    `begins` is "update" where the state appears at the first update of its weight, and "construction" where, as in
    torch's Adagrad, the optimizer's constructor makes it. `zero` says that it starts from zeros. `when` is the source
    text of its condition. `precise` says that the rule subtracts it from another state and takes a root of what is
    left, or divides by it, so that 8-bit codes are not for it.
    """

    name: str
    begins: Literal["update", "construction"] = "update"
    zero: bool = True
    domain: Range | None = None
    when: str | None = None
    precise: bool = False

    @property
    def nonnegative(self) -> bool:
        """Whether the domain has no negative number, so that a code needs no sign."""
        return self.domain is not None and self.domain.low >= 0

    def typical(self, noise: Any) -> Any:
        """Numbers of the domain, of moderate size, from a number or tensor of [0, 1): for tests and measurements."""
        low, high = (self.domain.low, self.domain.high) if self.domain is not None else (-math.inf, math.inf)
        if math.isfinite(low) and math.isfinite(high):
            return low + (high - low) * noise
        if math.isfinite(low):
            return low + 1 + noise
        return high - 1 - noise if math.isfinite(high) else noise - 0.5


class ScalarSpec(_Facts):
    """A number of one weight that is carried from step to step."""

    name: str
    initial: float


class SwitchSpec(_Facts):
    """A condition that selects the compiled variant: a flag, or a comparison of hypers (`text` is its source)."""

    name: str
    text: str
    is_flag: bool


class Spec(_Facts):
    """What a `.opt` file says, after checking. Order is the source's order everywhere.

    uses_step: updates are counted per weight; reads_step: and the rule depends on the count.
    """

    name: str
    stem: str
    title: str
    source: str
    sha256: str
    hypers: tuple[HyperSpec, ...]
    flags: tuple[FlagSpec, ...]
    states: tuple[StateSpec, ...]
    scalars: tuple[ScalarSpec, ...]
    switches: tuple[SwitchSpec, ...]
    first: tuple[str, ...]
    uses_step: bool
    reads_step: bool = True
    table: tuple[str, ...]

    @cached_property
    def hyper_names(self) -> tuple[str, ...]:
        """Names of the hypers, in order."""
        return tuple(hyper.name for hyper in self.hypers)

    @cached_property
    def flag_names(self) -> tuple[str, ...]:
        """Names of the flags, in order."""
        return tuple(flag.name for flag in self.flags)

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states, in order."""
        return tuple(state.name for state in self.states)

    @cached_property
    def switching_hypers(self) -> frozenset[str]:
        """Hypers that select the compiled variant, and so must be numbers that the host knows."""
        texts = [switch.text for switch in self.switches if not switch.is_flag]
        read = {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}
        return frozenset(read.intersection(self.hyper_names))
