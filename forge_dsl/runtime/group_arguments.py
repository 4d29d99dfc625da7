"""What a param group says now: read once a step, checked when it changes, uploaded where kernels read it.

torch checks a group when the optimizer is built, and trains on with whatever is written into it later. Here a change is
found by comparing, without reading a device: values that nobody can change in place by their identity, all others by
their numbers, and tensors by their versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from forge_dsl.runtime import arguments
from forge_dsl.runtime.devices import is_capturing, upload
from forge_dsl.runtime.rule import Rule


@dataclass(frozen=True)
class Variant:
    """What one step of one group runs with. `hypers` holds floats, tuples of floats, or tensors on a GPU."""

    hypers: dict[str, Any]
    flags: dict[str, bool]
    switches: tuple[bool, ...]
    present: tuple[bool, ...]


class GroupArguments:
    """The hyper-parameters and flags of one param group, for its parameters on one device.

    variant  what the group said when it was last read, None before
    """

    def __init__(self, rule: Rule, group: dict[str, Any], device: torch.device) -> None:
        self.rule = rule
        self.group = group
        self.device = device
        self.names = (*rule.spec.hyper_names, *rule.spec.flag_names)
        self.variant: Variant | None = None
        self._read_all = reader(self.names)
        self._signature: list[Any] = []
        self._constants: tuple[Any, ...] | None = None
        self._checked: list[Any] | None = None
        self._numbers: Tensor | None = None
        self._uploaded: list[float] = []
        self._on_device: Variant | None = None

    def are_constants_of_before(self) -> bool:
        """Whether they are the very objects that were last read, and nobody can change those in place."""
        known = self._constants
        return known is not None and all(map(is_, self._values(), known))

    def are_unchanged(self) -> bool:
        """Whether nothing differs from what was last read. The number in a tensor may have been, by way of `.data`."""
        return self.are_constants_of_before() or (self.variant is not None and self._now() == self._signature)

    def read(self) -> Variant:
        """The variant from now on. Raises ValueError or TypeError, before anything changes, for what cannot be."""
        values = self._values()
        signature = [*map(_signature, values)]
        self._check(signature)
        self.variant, self._signature = self.select(), signature
        self._constants = values if all(map(_is_constant, values)) else None
        return self.variant

    def check(self) -> None:
        """Raise ValueError or TypeError if an argument that changed since the last check is not what the spec declares.

        Reads no device.
        """
        if not self.are_constants_of_before():  # those were checked when they were read
            self._check(self._now())

    def changed(self) -> RuntimeError:
        """What to raise where something differs from what was last read, and updates have been made with that."""
        pairs = zip(self.names, self._now(), self._signature, strict=True)
        names = ", ".join(name for name, now, before in pairs if now != before)
        return RuntimeError(
            f"{names} of a param group changed between backward() and step(). Weights that were updated inside "
            "backward took the old value, and the other parameters of the group would take the new one: change it "
            "before backward, or after step(). To go on from here, set it back and call step()"
        )

    def select(self) -> Variant:
        """What the arguments select now, unchecked."""
        spec, values = self.rule.spec, dict(zip(self.names, self._values(), strict=True))
        flags = {name: bool(values[name]) for name in spec.flag_names}
        hypers = {name: self._number(values[name]) for name in spec.hyper_names}
        known = {name: math.nan if isinstance(value, Tensor) else value for name, value in hypers.items()}
        switches = tuple(bool(switch) for switch in self.rule.switches(**known, **flags))
        return Variant(hypers, flags, switches, tuple(self.rule.present(*switches)))

    def on_device(self, variant: Variant) -> Tensor:
        """The hypers of `variant`, flattened, as float64 on the device; uploaded only when a number changed."""
        if variant is self._on_device and self._numbers is not None:
            return self._numbers
        flat = [element for value in variant.hypers.values() for element in arguments.flatten(value)]
        numbers = [math.nan if isinstance(element, Tensor) else element for element in flat]
        # Compared by `repr`, since NaN marks a tensor's place and differs from itself.
        if self._numbers is None or repr(numbers) != repr(self._uploaded):
            if is_capturing(self.device):
                raise RuntimeError(
                    "a CUDA graph is being captured and hyper-parameters of a param group changed since the last step: "
                    "the graph would keep their present values. Take a step before the capture, and call "
                    "optimizer.prepare_replay() before it, after anything that changes a param group"
                )
            fresh = upload(numbers, torch.float64, self.device)
            # In place from then on: a captured graph reads this memory.
            self._numbers = fresh if self._numbers is None else self._numbers.copy_(fresh)
            self._uploaded = numbers
        for place, element in enumerate(flat):
            if isinstance(element, Tensor):
                self._numbers[place : place + 1].copy_(element.detach().reshape(1))
        # Tensors may hold other numbers the next time.
        self._on_device = None if any(isinstance(element, Tensor) for element in flat) else variant
        return self._numbers

    def _values(self) -> tuple[Any, ...]:
        try:
            return self._read_all(self.group)
        except KeyError as error:
            name = error.args[0]
            raise RuntimeError(
                f"a parameter group has no {name!r} any more: set group[{name!r}] to its value again"
            ) from None

    def _now(self) -> list[Any]:
        return [*map(_signature, self._values())]

    def _check(self, signature: list[Any]) -> None:
        if signature == self._checked:
            return
        names = set(self.names)
        if self._checked is not None:
            pairs = zip(self.names, signature, self._checked, strict=True)
            names = {name for name, now, then in pairs if now != then}
        try:
            arguments.check_changed(self.rule, self.group, names)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{error}: a param group has been changed to this, and none of its parameters was updated with it. Set "
                "it right, then call step() again; or, if backward raised this, zero_grad() before the next forward"
            ) from None
        self._checked = signature

    def _number(self, value: Any) -> Any:
        """A hyper as floats; a tensor stays one where a kernel can read it, for the host would wait for it."""
        if isinstance(value, list | tuple):
            return tuple(map(self._number, value))
        if self.device.type != "cpu" and isinstance(value, Tensor) and value.device.type != "cpu":
            return value
        return float(value)


def reader(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What reads these entries of a dict, in the order of the names; KeyError where one is missing."""
    # `itemgetter` gives a tuple from two names on only.
    if len(names) < 2:
        return lambda entries: tuple([entries[name] for name in names])
    return itemgetter(*names)


def _signature(value: Any) -> Any:
    """What changes when a hyper changes, without reading a device."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else value


def _is_constant(value: Any) -> bool:
    """Whether a hyper or flag is a number, or a tuple of numbers, which nobody can change in place."""
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_constant, value)))
