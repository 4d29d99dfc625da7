"""What torch.optim's optimizer of the same name keeps in its groups, and a rule here does not need.

torch's groups hold switches that choose among its implementations (`foreach`, `fused`) or that another rule would read
(`momentum` in the group of a plain SGD). At their neutral values they change nothing, so they are accepted, and they
are written into a state dict, where torch looks for them. At any other value they would be ignored here, so they raise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from forge_dsl.spec import Spec


class Switches(TypedDict, total=False):
    """What every optimizer of torch.optim takes beside its rule, for type checkers."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


class SGDSwitches(Switches, total=False):
    """The same of a plain SGD, which is SGD with momentum in torch."""

    momentum: float
    dampening: float
    nesterov: bool


_SWITCHES: dict[str, Any] = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
_REASONS = {
    "foreach": "it chooses among torch.optim's implementations, and there is one here, which fuses more",
    "fused": "it chooses among torch.optim's implementations, and there is one here, which fuses more",
    "capturable": "steps and hyper-parameters are on the device already",
    "differentiable": "an update in place has no derivative; use torch.optim for that",
}
# torch calls both rules SGD: without momentum there is no state, so here they are two.
_NAMES = {"SGDMomentum": "SGD"}
_HINTS = {("SGD", key): "; SGDMomentum has the rule with momentum" for key in ("momentum", "dampening", "nesterov")}


@dataclass(frozen=True)
class Counterpart:
    """torch.optim's optimizer of the same rule.

    name     of the class in torch.optim
    neutral  keys of its groups that the spec does not have, with the values at which they change nothing
    positions  what its constructor takes by position after the parameters
    """

    name: str
    neutral: Mapping[str, Any]
    positions: tuple[str, ...] = ()


@functools.lru_cache(maxsize=256)
def _torch_defaults(name: str) -> Mapping[str, Any] | None:
    found: Any = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return None
    make: Callable[..., torch.optim.Optimizer] = found
    try:
        made = make([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))])
    except (TypeError, ValueError):
        return None
    return dict(made.defaults)


def counterpart(spec: Spec) -> Counterpart | None:
    """torch's optimizer of the same name that has all of the spec's hypers and flags, or None."""
    name = _NAMES.get(spec.name, spec.name)
    defaults = _torch_defaults(name)
    ours = {*spec.hyper_names, *spec.flag_names}
    if defaults is None or not ours <= set(defaults):
        return None
    neutral = {key: value for key, value in defaults.items() if key not in ours}
    parameters = list(inspect.signature(getattr(torch.optim, name)).parameters.values())[1:]
    return Counterpart(name, neutral, tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD))


def neutral_values(spec: Spec) -> dict[str, Any]:
    """Every key of torch's that is accepted in a group of this rule, with its neutral value."""
    found = counterpart(spec)
    known = {**_SWITCHES, **(found.neutral if found is not None else {})}
    return {key: value for key, value in known.items() if key not in (*spec.hyper_names, *spec.flag_names)}


def without_switches(spec: Spec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments less torch's switches; raises ValueError for a switch that is not neutral, with the reason."""
    neutral = neutral_values(spec)
    for key in neutral.keys() & arguments.keys():
        value, wanted = arguments[key], neutral[key]
        if value is not None and value != wanted and not (wanted is None and value is False):
            reason = _REASONS.get(key, f"the rule {spec.name} has no such choice{_HINTS.get((spec.name, key), '')}")
            raise ValueError(f"{key}={value!r} is not possible with {spec.name}: {reason}. Leave it at {wanted!r}")
    return {key: value for key, value in arguments.items() if key not in neutral}


def refusing_misplaced(constructor: Callable[..., None]) -> Callable[..., None]:
    """A constructor that raises TypeError for an argument by position where torch's has another one."""
    ours = list(inspect.signature(constructor).parameters)[2:]

    @functools.wraps(constructor)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        # The first is `params`, and the second everybody's learning rate.
        if len(args) > 2 and (found := counterpart(self.rule.spec)) is not None:
            for place, (mine, theirs) in enumerate(zip(ours, found.positions, strict=False)):
                if mine != theirs and place < len(args) - 1:
                    raise TypeError(
                        f"argument {place + 2} of torch.optim.{found.name} is {theirs}, and here it is {mine}: give it "
                        "by keyword"
                    )
        constructor(self, *args, **kwargs)

    return wrapped
