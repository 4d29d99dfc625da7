"""One parameter's entry of a checkpoint: what it may hold, checked to the last number before anything is installed.

torch.optim keeps entries that it does not know and casts every one but `step` to the parameter's type. What comes back
from there as floating point (`rounding`, the bits beside a weight) cannot be used, and is left out; anything else that
does not fit was never written by `state_dict`, and is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime import states, storage
from forge_dsl.spec import StateSpec

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


# Names of entries beside torch's: seed, weight and updates of stochastic rounding (int64 [3]), and which weight the
# bits of `weight_low` belong to.
ROUNDING, FINGERPRINT = "rounding", "weight_fingerprint"
_POSITION = "an int64 tensor of three numbers (seed, weight, updates), as state_dict() writes it"
_ANEW = f"Remove {ROUNDING!r} from the entries of 'state' to let the weights draw anew from this optimizer's seed"


def fit(optimizer: FusedOptimizer, parameter: Tensor, entry: Any, present: dict[str, bool]) -> dict[str, Any]:
    """One parameter's entry: numbers as floats, tensors as they are. Empty for a parameter that has not begun.

    Raises ValueError that names the entry and the parameter.
    """
    spec = optimizer.rule.spec
    name = optimizer.describe(parameter)
    if entry is None:
        entry = {}
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"loaded state dict: the entry of {name} is {type(entry).__name__}; expected a dict of its states by name"
        )
    table = optimizer.binding_of(parameter).table
    held = {key: value for key, value in entry.items() if value is not None}
    if not held and not any(s.begins == "construction" and present[s.name] for s in spec.states):
        return {}
    fitted: dict[str, Any] = {}
    for key in table.visible:
        if key == "step" and key not in held and not spec.reads_step:
            # Other implementations of such a rule, like lion-pytorch, keep no count, and the rule needs none.
            held[key] = 0.0
        if key not in held:
            raise ValueError(f"loaded state dict lacks {key!r} of {name}")
        fitted[key] = _number(name, key, held[key])
    for state in spec.states:
        value = held.get(state.name)
        if value is None:
            if present[state.name] and state.name not in spec.first:
                raise ValueError(f"loaded state dict lacks {state.name!r} of {name}")
            continue
        scales = held.get(registry.scale_key(state.name))
        if scales is not None:
            fitted |= _fit_blocks(parameter, name, state, value, scales)
            continue
        right = isinstance(value, Tensor) and states.is_like(value, parameter) and value.dtype in DTYPES
        if not right:
            raise ValueError(
                f"loaded state dict: {state.name!r} of {name} is {_described(value)}; expected fp32, bf16 or fp16 "
                f"of shape {list(parameter.shape)}"
            )
        fitted[state.name] = value
    fitted |= _fit_position(name, held)
    fitted |= _fit_low(parameter, name, held)
    passed = {
        "step",
        *(registry.scale_key(state) for state in spec.state_names),
        ROUNDING,
        FINGERPRINT,
        registry.LOW_KEY,
    }
    unknown = [key for key in held if key not in fitted and key not in passed]
    if unknown:
        raise ValueError(f"loaded state dict: {spec.name} has no state {unknown[0]!r}, which {name} has there")
    return fitted


def _number(name: str, key: str, value: Any) -> float:
    """A count of steps, or a recurrent scalar, as a float."""
    expected = "a whole number from 0 on" if key == "step" else "a number"
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"loaded state dict: {key!r} of {name} has shape {list(value.shape)}, expected one number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loaded state dict: {key!r} of {name} is {kind}; expected {expected}") from None
    if key == "step" and not (number >= 0 and number.is_integer()):
        raise ValueError(f"loaded state dict: {key!r} of {name} is {number:g}; expected {expected}")
    return number


def _fit_blocks(parameter: Tensor, name: str, state: StateSpec, codes: Any, scales: Any) -> dict[str, Tensor]:
    """A block-wise state of a checkpoint; in fp32 where this parameter cannot have one."""
    shape = registry.scale_shape(parameter.shape)
    right = isinstance(codes, Tensor) and states.is_like(codes, parameter) and codes.dtype == torch.uint8
    right = right and isinstance(scales, Tensor) and scales.shape == shape and not scales.is_meta
    if not right or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(
            f"loaded state dict: {state.name!r} of {name} has scales, so expected uint8 codes of shape "
            f"{list(parameter.shape)} and scales of shape {list(shape)}, uint8 or float8_e8m0fnu"
        )
    if not parameter.is_contiguous():
        return {state.name: decode(codes, scales, state)}
    return {state.name: codes, registry.scale_key(state.name): scales}


def decode(codes: Tensor, scales: Tensor, state: StateSpec) -> Tensor:
    """A block-wise state in fp32."""
    codec = storage.block_wise(storage.code_name(scales), state.nonnegative)
    matrix = codes.reshape(registry.matrix_shape(codes.shape))
    return codec.decode(matrix, scales.view(torch.uint8)).view(codes.shape)


def _fit_position(name: str, held: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where the draws are; nothing if torch has cast it."""
    position = held.get(ROUNDING)
    if position is None or _was_cast(position, (3,)):
        return {}
    if not isinstance(position, Tensor) or position.dtype != torch.int64 or position.shape != (3,):
        raise ValueError(
            f"loaded state dict: {ROUNDING!r} of {name} is {_described(position)}; expected {_POSITION}. {_ANEW}"
        )
    seed, weight, updates = numbers = position.tolist()
    if seed < 0 or weight < 0 or updates < 1:
        raise ValueError(
            f"loaded state dict: {ROUNDING!r} of {name} is {numbers}; expected {_POSITION}, none of them negative and "
            f"at least one update. {_ANEW}"
        )
    if "step" in held and updates != (count := _number(name, "step", held["step"])):
        raise ValueError(
            f"loaded state dict: {ROUNDING!r} of {name} is {numbers}, after {updates} updates, and its 'step' is "
            f"{count:g}; expected the same number in both. {_ANEW}"
        )
    return {ROUNDING: position}


def _fit_low(parameter: Tensor, name: str, held: Mapping[str, Any]) -> dict[str, Tensor]:
    """The bits beside a bf16 weight, and which weight they belong to; nothing for a weight in another type.

    Without the latter, which helpers leave out that save only what `optimizer.state` holds, they are taken to belong to
    the weight as it is.
    """
    low, of = held.get(registry.LOW_KEY), held.get(FINGERPRINT)
    if low is None:
        return {}
    if _was_cast(low, low.shape if isinstance(low, Tensor) else ()):
        _warn_of_lost_bits("they were cast to floating point")
        return {}
    if not isinstance(low, Tensor) or low.dtype not in (torch.int8, torch.int16) or low.shape != parameter.shape:
        raise ValueError(
            f"loaded state dict: {registry.LOW_KEY!r} of {name} is {_described(low)}; expected int8 or int16 of shape "
            f"{list(parameter.shape)}, as state_dict() writes it. Remove it to go on from the weight's own bits"
        )
    if parameter.dtype != torch.bfloat16:
        _warn_of_lost_bits(f"the model's weights are {parameter.dtype}")
        return {}
    if of is None:
        return {registry.LOW_KEY: low}
    if not isinstance(of, Tensor) or of.dtype != torch.int64 or of.numel() != 1 or int(of) < 0:
        raise ValueError(
            f"loaded state dict: {FINGERPRINT!r} of {name} is {_described(of)}; expected an int64 tensor of one "
            f"number, which says to which weight its {registry.LOW_KEY!r} belongs. Remove both to go on from the "
            "weight's own bits"
        )
    return {registry.LOW_KEY: low, FINGERPRINT: of}


def _warn_of_lost_bits(reason: str) -> None:
    """Python shows the same warning once, however many weights there are."""
    warnings.warn(
        f"loaded state dict: the bits beside bf16 weights ({registry.LOW_KEY!r}) are left out, because {reason}: the "
        "weights go on from what the model holds",
        stacklevel=2,
    )


def _was_cast(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether torch may have made this of whole numbers: floating point, and no NaN."""
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
    return fits and not bool(value.float().isnan().any())


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.is_meta:
            more = " without data"
        elif value.layout != torch.strided:
            more = f" in {value.layout}"
        else:
            more = " with NaN" if value.is_floating_point() and bool(value.float().isnan().any()) else ""
        return f"{value.dtype} of shape {list(value.shape)}{more}"
    return "missing" if value is None else type(value).__name__


def check_positions(optimizer: FusedOptimizer, held: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError if the entries' draws cannot be those of one optimizer: two weights that draw the same bits, or
    a weight that must have drawn and does not say where, while others do.
    """
    places: dict[tuple[int, int], str] = {}
    lacking = ""
    for binding in optimizer.bindings():
        entry = held[id(binding.weight)]
        position = entry.get(ROUNDING)
        if position is None:
            lacking = lacking or (binding.describe() if _draws(optimizer, entry) else "")
            continue
        seed, weight, _ = position.tolist()
        other = places.setdefault((seed, weight), binding.describe())
        if other != binding.describe():
            raise ValueError(
                f"loaded state dict: {ROUNDING!r} of {binding.describe()} and that of {other} both draw as weight "
                f"{weight} of seed {seed}; expected different ones, so one comes from another optimizer. {_ANEW}"
            )
    if places and lacking:
        raise ValueError(
            f"loaded state dict lacks {ROUNDING!r} of {lacking}, which others have; expected {_POSITION}, for each "
            f"weight or for none. {_ANEW}"
        )


def _draws(optimizer: FusedOptimizer, entry: Mapping[str, Any]) -> bool:
    """Whether its tensors say that it has been rounded stochastically, if any weight of its optimizer was."""
    if not entry or entry.get("step") == 0:
        return False
    held = [entry.get(name) for name in optimizer.rule.spec.state_names]
    coded = any(registry.scale_key(name) in entry for name in optimizer.rule.spec.state_names)
    return coded or any(isinstance(state, Tensor) and state.dtype == torch.bfloat16 for state in held)
