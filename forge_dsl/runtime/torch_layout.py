"""What torch.optim's optimizer of the same name keeps in its groups, and a rule here does not need.

torch's groups hold switches that choose among its implementations (`foreach`, `fused`) or that another rule would read
(`momentum` in the group of a plain SGD). At their neutral values they change nothing, so they are accepted, and they
are written into a state dict, where torch looks for them. At any other value they would be ignored here, so they raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge_dsl.spec import Spec

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
    """

    name: str
    neutral: Mapping[str, Any]


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
    return Counterpart(name, neutral)


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


def accepting_switches(constructor: Callable[..., None]) -> Callable[..., None]:
    """A constructor that also takes torch's switches by keyword, at their neutral values."""

    @functools.wraps(constructor)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **without_switches(self.rule.spec, kwargs))

    return wrapped
