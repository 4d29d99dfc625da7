"""What an optimizer accepts: hyper-parameters in their declared ranges, and parameters that a fused step can update."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime import coded, torch_layout
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.triton_support import interpreted
from forge_dsl.spec import HyperSpec, Range

SCHEDULES = ("auto", "fused", "banded")
ARITHMETICS = ("fast", "exact")
_ANY = Range()
_ROUNDING = 1e-9  # of a hyper's default
_GROUP_KEYS = ("params", "param_names")
_SHOWN = 60


def flatten(value: Any) -> tuple[Any, ...]:
    """A hyper as a tuple of its elements."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def host_value(value: Any) -> Any:
    """A hyper as a float or a tuple of floats. Reads a tensor, which waits for the device."""
    if isinstance(value, list | tuple):
        return tuple(float(element) for element in value)
    return float(value)


def _complaint(hyper: HyperSpec, index: int, value: object) -> str:
    """torch's words for a bad argument."""
    allowed = hyper.ranges[index] if index < len(hyper.ranges) else None
    expected = f"expected a number in {allowed}" if allowed is not None else "expected a finite number"
    if len(hyper.ranges) > 1:
        what = f"beta parameter at index {index}" if hyper.name == "betas" else f"{hyper.name} value at index {index}"
    else:
        what = {"lr": "learning rate", "eps": "epsilon value"}.get(hyper.name, f"{hyper.name} value")
    shown = f"{value}"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"Invalid {what}: {shown} ({expected})"


def _check_element(hyper: HyperSpec, index: int, value: object, running: bool) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {hyper.name} must be 1-element, got shape {list(value.shape)}")
        if value.is_complex():
            raise TypeError(_complaint(hyper, index, value))
        if running and value.device.type != "cpu":
            return  # its value is known to the device alone
    try:
        if isinstance(value, str | bytes):  # `float` would read it
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{_complaint(hyper, index, repr(value))}, got {type(value).__name__}") from None
    allowed = hyper.ranges[index] or _ANY
    if number in allowed and (hyper.ranges[index] is not None or math.isfinite(number)):
        return
    if not (running and _is_rounded_end(number, hyper, index)):
        raise ValueError(_complaint(hyper, index, value))


def _is_rounded_end(number: float, hyper: HyperSpec, index: int) -> bool:
    """Whether a schedule's rounding may have carried a number just past an end that is in its range: a LinearLR down to
    0 ends at -1e-20.
    """
    default = hyper.default[index] if isinstance(hyper.default, tuple) else hyper.default
    allowed = hyper.ranges[index] or _ANY
    ends = [end for end in (allowed.low, allowed.high) if end in allowed]
    return any(abs(number - end) <= _ROUNDING * abs(default) for end in ends)


def _check_hyper(rule: Rule, hyper: HyperSpec, value: Any, running: bool) -> None:
    elements = flatten(value)
    if isinstance(value, list | tuple) != isinstance(hyper.default, tuple) or len(elements) != len(hyper.ranges):
        count = len(hyper.ranges)
        expected = f"a tuple of {count} numbers" if isinstance(hyper.default, tuple) else "a number"
        raise ValueError(f"Invalid {hyper.name} value: {value!r} (expected {expected})")
    for index, element in enumerate(elements):
        _check_element(hyper, index, element, running)
    if any(isinstance(element, Tensor) for element in elements) and hyper.name in rule.spec.switching_hypers:
        raise TypeError(
            f"Tensor {hyper.name} is not possible: {rule.spec.name} chooses its kernel by it, so it must be a number"
        )


def check_hypers(rule: Rule, group: dict[str, Any], running: bool = False) -> None:
    """Raise ValueError or TypeError if the group's hypers or flags are not what the spec declares.

    running: values of a run under way, which a schedule may have rounded.
    """
    spec = rule.spec
    check_flags(group, spec.flag_names)
    for hyper in spec.hypers:
        _check_hyper(rule, hyper, group[hyper.name], running)
    hypers = {name: host_value(group[name]) for name in spec.hyper_names}
    rule.check_arguments(**hypers, **{name: group[name] for name in spec.flag_names})


def check_flags(group: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise TypeError for a flag that is not a bool."""
    for name in names:
        if not isinstance(group[name], bool):
            raise TypeError(f"Invalid {name} value: {group[name]!r} (expected True or False)")


def check_changed(rule: Rule, group: Mapping[str, Any], names: Collection[str]) -> None:
    """The same for those of a group's arguments that have changed, without waiting for a device.

    What `require` states is checked where no hyper is a tensor on a device.
    """
    spec = rule.spec
    check_flags(group, [name for name in spec.flag_names if name in names])
    for hyper in spec.hypers:
        if hyper.name in names:
            _check_hyper(rule, hyper, group[hyper.name], running=True)
    values = {name: group[name] for name in spec.hyper_names}
    elements = [element for value in values.values() for element in flatten(value)]
    if not any(isinstance(element, Tensor) and element.device.type != "cpu" for element in elements):
        hypers = {name: host_value(value) for name, value in values.items()}
        rule.check_arguments(**hypers, **{name: group[name] for name in spec.flag_names})


def check_params(params: object) -> None:
    """Raise TypeError for what is no list of parameters or param groups, where torch's own words would not say so."""
    if params is None or isinstance(params, torch.nn.Module | Mapping | str):
        way = {"Module": "model.parameters()", "Mapping": "a list of such param groups"}
        kind = "Module" if isinstance(params, torch.nn.Module) else "Mapping" if isinstance(params, Mapping) else ""
        raise TypeError(
            f"params is {type(params).__name__}: expected {way.get(kind, 'model.parameters()')}, an iterable of "
            "parameters or of param groups"
        )


def check_group(rule: Rule, group: object, index: int) -> None:
    """Raise TypeError or ValueError for what is no param group; warn of a key that is nearly an argument's name."""
    if not isinstance(group, dict):
        raise TypeError(f"param_groups[{index}] is {type(group).__name__}: expected a dict with 'params'")
    if "params" not in group:
        raise ValueError(
            f"param_groups[{index}] has no 'params': expected a dict of them and of this group's arguments"
        )
    names = [*rule.spec.hyper_names, *rule.spec.flag_names]
    for key in group:
        # Schedules and loops keep keys of their own there (`initial_lr`, `lr_scale`), so only a likely slip is told.
        own = key in names or key in _GROUP_KEYS or not isinstance(key, str)
        near = [] if own else difflib.get_close_matches(key.lower(), names, 1, 0.85)
        if near and key not in torch_layout.neutral_values(rule.spec):
            warnings.warn(
                f"param_groups[{index}] has {key!r}, which {rule.spec.name} does not read: did you mean {near[0]!r}?",
                stacklevel=4,
            )


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise TypeError or ValueError if the runtime cannot update this parameter in place, exactly."""
    what = f"parameter {name} of shape {list(parameter.shape)}, {parameter.dtype} on {parameter.device}"
    distributed = sys.modules.get("torch.distributed.tensor")
    sharded = distributed is not None and isinstance(parameter, distributed.DTensor)
    if sharded or hasattr(parameter, "_is_flat_param"):
        raise TypeError(
            f"{what}: sharded parameters (DTensor, FSDP) are not supported; build the optimizer without FSDP"
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"{what}: expected a dense tensor, got layout {parameter.layout}")
    if parameter.is_neg():
        raise ValueError(
            f"{what}: a view that negates what its memory holds (is_neg()); make it of a .resolve_neg() copy"
        )
    if parameter.dtype == torch.float64:
        raise TypeError(
            f"{what}: updates are computed in float32, so float64 would lose what it is for; use torch.optim"
        )
    if parameter.dtype == coded.CODES:
        if coded.find(parameter) is None:
            raise TypeError(
                f'{what}: its scales are not known; use forge_dsl.fuse(model, ..., weight_dtype="fp8"), or '
                "forge_dsl.fp8.attach for a weight that was copied or loaded"
            )
    elif parameter.dtype not in DTYPES:
        raise TypeError(f"{what}: expected float32, bfloat16 or float16")
    if parameter.device.type == "meta":
        raise ValueError(f"{what}: it has no data yet; materialise the model before building its optimizer")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what}: expected a parameter on a CPU or a CUDA device")
    if _may_overlap(parameter):
        raise ValueError(
            f"{what}, strides {list(parameter.stride())}: several elements share memory (an expanded tensor?), so an "
            "update in place would apply more than once; expected distinct memory for each element"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements share an address, or might: dimensions by stride must each clear the span of those below."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if tensor.numel() and size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def check_schedule(rule: Rule, schedule: str, parameter: Tensor) -> None:
    """Raise RuntimeError if the fused kernel is asked for where it cannot run."""
    if schedule == "fused" and parameter.device.type == "cpu" and not interpreted(rule.linear_kernel):
        raise RuntimeError(
            'schedule="fused" needs a GPU: on a CPU the Triton kernel only runs in the interpreter, with '
            'TRITON_INTERPRET=1 set before the optimizer is imported; use schedule="auto" or "banded"'
        )
