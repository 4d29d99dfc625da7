"""How the tensors of one parameter are kept: the format of its weight and of each state, and how they are rounded.

The weight is tensor 0, the states follow in the order of `spec.states`; what a variant does not have is "plain".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.block_wise import BlockWise
from forge_dsl.runtime import coded
from forge_dsl.runtime.rule import Rule
from forge_dsl.spec import StateSpec

# A format for every state, or for some by name.
StateDtype: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str] | None
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK_WISE = ("int8", "fp8")
EXTRA_BITS = (0, 8, 16)
# Below this many elements the states of a parameter weigh nothing, and it is the small ones that want precision.
SMALLEST = 4096


@dataclass(frozen=True)
class Storage:
    """formats, draws: of the weight and of each state; extras: scales, bits beside a bf16 weight, or None."""

    formats: tuple[str, ...]
    draws: tuple[bool, ...]
    extras: tuple[Tensor | None, ...]

    @property
    def block_wise(self) -> bool:
        """Whether a tensor is kept in blocks of 64 columns."""
        return any(form in BLOCK_WISE for form in self.formats)

    @property
    def by_rows(self) -> bool:
        """Whether an update depends on where a coordinate lies in its row."""
        return self.block_wise or any(self.draws)

    @property
    def has_extras(self) -> bool:
        """Whether something lies beside a tensor."""
        return any(extra is not None for extra in self.extras)

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is of a plain type and rounded to nearest."""
        return not any(self.draws) and set(self.formats) == {"plain"}

    @property
    def block_stride(self) -> int:
        """Scales between two blocks of a row, in memory."""
        scales = (e for form, e in zip(self.formats, self.extras, strict=True) if form in BLOCK_WISE and e is not None)
        return next((extra.stride(0) for extra in scales), 1)

    def by_matrix(self, rows: int, columns: int) -> Storage:
        """The same for tensors seen as a matrix: bits beside a weight lie as it does, scales have rows already."""
        low, *scales = self.extras
        return Storage(self.formats, self.draws, (None if low is None else low.reshape(rows, columns), *scales))

    def rows(self, part: slice) -> Storage:
        """The same for a range of rows of the matrix."""
        found: list[Tensor | None] = []
        for form, extra in zip(self.formats, self.extras, strict=True):
            found.append(extra if extra is None else extra[:, part] if form in BLOCK_WISE else extra[part])
        return Storage(self.formats, self.draws, tuple(found))


@lru_cache(maxsize=64)
def plain(states: int) -> Storage:
    """Plain types throughout, rounded to nearest."""
    count = 1 + states
    return Storage(("plain",) * count, (False,) * count, (None,) * count)


@dataclass(frozen=True)
class Choice:
    """What an optimizer was asked for.

    states      format of each state by name, "" for those not named: "fp32", "bf16", "fp16", "int8", "fp8", or None
                for the weight's own type
    stochastic  True, False, or None: where it matters, which is bf16
    extra_bits  0, 8 or 16 beside each bf16 weight
    """

    states: Mapping[str, str | None]
    stochastic: bool | None = None
    extra_bits: int = 0

    def of_state(self, name: str) -> str | None:
        """The format asked for, None for the weight's own type."""
        return self.states.get(name, self.states.get("", None))

    def draws(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of this type is rounded stochastically."""
        if self.stochastic is None:
            return dtype == torch.bfloat16
        return self.stochastic and dtype in (torch.bfloat16, torch.float16)


def choice(rule: Rule, state_dtype: Any, stochastic: bool | None, extra_bits: int) -> Choice:
    """The choice that an optimizer's arguments make. Raises TypeError or ValueError for what does not exist."""
    if stochastic is not None and not isinstance(stochastic, bool):
        raise TypeError(f"Invalid stochastic_rounding: {stochastic!r} (expected True, False or None)")
    if type(extra_bits) is not int or extra_bits not in EXTRA_BITS:
        raise ValueError(f"Invalid extra_bits: {extra_bits!r} (expected 0, 8 or 16)")
    if isinstance(state_dtype, Mapping):
        unknown = [name for name in state_dtype if name not in rule.spec.state_names]
        if unknown:
            known = ", ".join(rule.spec.state_names) or "none"
            raise ValueError(f"Invalid state_dtype: {rule.spec.name} has no state {unknown[0]!r} (it has: {known})")
        named = {name: format_name(value, f"[{name!r}]") for name, value in state_dtype.items()}
    else:
        named = {"": format_name(state_dtype)}
    return Choice(named, stochastic, extra_bits)


def format_name(value: Any, of: str = "") -> str | None:
    """A format by its name, whether given as one, as a torch dtype or its name, or as None. `of` tells whose it is."""
    if value is None:
        return None
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    name = names.get(str(value), names.get(f"torch.{value}", value))
    if name not in (*DTYPES, *BLOCK_WISE):
        raise ValueError(
            f'Invalid state_dtype{of}: {value!r} (expected "fp32", "bf16", "fp16" or a torch.dtype of these, or "int8" '
            'or "fp8")'
        )
    return str(name)


def takes_blocks(weight: Tensor) -> bool:
    """Whether the states of this parameter can be block-wise: by its whole shape, so no shard decides otherwise."""
    return weight.dim() >= 2 and weight.numel() >= SMALLEST and weight.is_contiguous()


def format_of(chosen: Choice, state: StateSpec, weight: Tensor) -> str:
    """The format of a state of this parameter: what was asked for, or the weight's own type where blocks do not fit.

    A weight in codes has no type that would do for a state; its states are then bf16.

    Nor do they suit a state that the rule subtracts from another one: `StateSpec.precise`.
    """
    wanted = chosen.of_state(state.name)
    if wanted is None or (wanted in BLOCK_WISE and (state.precise or not takes_blocks(weight))):
        if weight.dtype == coded.CODES:
            return "bf16"
        return next(key for key, dtype in DTYPES.items() if dtype == weight.dtype)
    return wanted


def in_use(
    rule: Rule, chosen: Choice, weight: Tensor, states: Sequence[Tensor | None], state: Mapping[str, Any]
) -> Storage:
    """The storage of a parameter whose tensors exist: `states` in order, `state` as `optimizer.state[p]`."""
    low = state.get(registry.LOW_KEY)
    form = "plain" if low is None else f"bf16+{8 * low.element_size()}"
    found: list[tuple[str, bool, Tensor | None]] = [
        ("fp8", chosen.stochastic is not False, coded.known(weight).scales.view(torch.uint8))
        if weight.dtype == coded.CODES
        else (form, chosen.stochastic is not False and low.element_size() == 1, low)
        if low is not None
        else ("plain", chosen.draws(weight.dtype), None)
    ]
    for name, tensor in zip(rule.spec.state_names, states, strict=True):
        scale = None if tensor is None else state.get(registry.scale_key(name))
        if tensor is None:
            found.append(("plain", False, None))
        elif scale is None:
            found.append(("plain", chosen.draws(tensor.dtype), None))
        else:
            found.append((code_name(scale), chosen.stochastic is not False, scale.view(torch.uint8)))
    formats, draws, extras = zip(*found, strict=True)
    return Storage(formats, draws, extras)


def code_name(scales: Tensor) -> str:
    """Which codes these scales belong to: torch's type for the byte of a power of two marks those of fp8."""
    return "fp8" if scales.dtype == torch.float8_e8m0fnu else "int8"


def block_wise(form: str, nonnegative: bool, weight: bool = False) -> BlockWise:
    """The codec of a block-wise format, of a state or of a weight."""
    found = registry.of_weight(form) if weight else registry.of_state(form, nonnegative)
    assert isinstance(found, BlockWise)
    return found
