"""Which optimizer updates which weight: a registry beside the tensors, that keeps neither weights nor optimizers alive.

Nothing is written on the tensors themselves, so a deep copy of a model copies no optimizer: its weights are unbound.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C import _increment_version
from torch.utils.weak import WeakIdRef

from forge_dsl.runtime.placeholder import GradientPlaceholder

if TYPE_CHECKING:
    from forge_dsl.runtime.counters import StepTable
    from forge_dsl.runtime.gate import Gate
    from forge_dsl.runtime.optimizer import FusedOptimizer
    from forge_dsl.runtime.segments import Segments
    from forge_dsl.runtime.tickets import CompiledUse
    from forge_dsl.runtime.update import Kept, Route


class Binding:
    """One parameter of one optimizer.

    table, row   where its counters and per-step scalars live
    owns         whether its optimizer is the newest that took the weight
    updated      whether a fused update has been applied since the optimizer's last step()
    inspected    whether a graph has been searched for other routes of the weight's gradient
    gate         weak reference to the gate while uses of the weight wait for their backward
    kept         how its tensors are kept, with what tells whether that is still so
    route        how it was last updated, with what that was worked out from
    fingerprint  which weight the bits beside it belong to, as a checkpoint says, until they are used
    version      the weight's version after its last update; another one means that something else wrote it
    uses         the weight's uses in compiled graphs that have not been settled
    segments     the reentrant checkpoint segments that used the weight and have not run backward yet
    together     the name of another parameter whose changes torch counts together with this one's
    """

    __slots__ = (
        "__weakref__",
        "_device_index",
        "_optimizer",
        "_placeholder",
        "_weight",
        "device",
        "device_type",
        "dtype",
        "fingerprint",
        "gate",
        "inspected",
        "kept",
        "name",
        "owns",
        "route",
        "row",
        "segments",
        "shape",
        "table",
        "together",
        "updated",
        "uses",
        "version",
    )

    def __init__(self, weight: Tensor, name: str, optimizer: FusedOptimizer, table: StepTable, row: int) -> None:
        self._weight: Any = WeakIdRef(weight)
        self._optimizer = weakref.ref(optimizer)
        self._placeholder: GradientPlaceholder | None = None
        self.name = name
        self.table = table
        self.row = row
        self.owns = False
        self.updated = False
        self.inspected = False
        self.gate: weakref.ref[Gate] | None = None
        self.segments: Segments | None = None
        self.together: str | None = None
        self.kept: Kept | None = None
        self.route: Route | None = None
        self.version: int | None = None
        self.fingerprint: int | None = None
        self.uses: list[CompiledUse] = []
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.device_type, self._device_index = weight.device.type, weight.get_device()

    @property
    def weight(self) -> Tensor:
        """The parameter; it is alive wherever this is asked, since a graph or a param group holds it."""
        weight: Tensor | None = self._weight()
        if weight is None:
            raise RuntimeError(f"{self.name}: the parameter no longer exists")
        return weight

    @property
    def held(self) -> Tensor:
        """The parameter, where a param group holds it: then there is no reference to repair, and it takes less time."""
        weight: Tensor | None = _referent(self._weight)
        return self.weight if weight is None else weight

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The optimizer, or None once it has been deleted."""
        return self._optimizer()

    @property
    def saves_fp8(self) -> bool:
        """Whether the inputs of its layers are saved in 8 bits for backward."""
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.saved_activations == "fp8"

    def describe(self) -> str:
        """The name and shape for messages: `layers.0.weight [16, 8]`."""
        return f"{self.name} {list(self.shape)}"

    def placeholder(self, weight: Tensor) -> GradientPlaceholder:
        """What the `.grad` of `weight`, the parameter, becomes after a fused update."""
        if self._placeholder is None:
            self._placeholder = GradientPlaceholder(weight, self.describe())
        return self._placeholder

    def retake(self) -> None:
        """Take the weight as it is now, in another type than before."""
        self.dtype, self.kept, self.version, self._placeholder = self.weight.dtype, None, None, None

    def check_unmoved(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight`, the parameter, changed its shape, dtype or device since it was taken."""
        # The index is cheaper to ask for than the device; of two without one only a meta tensor could be meant.
        moved = weight.get_device() != self._device_index or (self._device_index < 0 and weight.device != self.device)
        if weight.dtype is not self.dtype or moved or weight.shape != self.shape:
            raise RuntimeError(
                f"{self.describe()} was {self.dtype} on {self.device} when its optimizer was built and is now "
                f"{list(weight.shape)}, {weight.dtype} on {weight.device}: build the optimizer after moving or casting"
            )

    def check_owner(self) -> FusedOptimizer:
        """The optimizer; RuntimeError if it was deleted or a newer one has taken the weight."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                f"the optimizer of {self.describe()} was deleted while a graph still needs it: keep it until backward"
            )
        if not self.owns:
            raise RuntimeError(
                f"{self.describe()} was given to a newer optimizer, which updates it now: use that one, or build this "
                f"{type(optimizer).__name__} again"
            )
        return optimizer


def note_counted_together(bindings: Iterable[Binding]) -> None:
    """Find parameters that are slices of one tensor. Torch has one count of changes for all of them, so that the update
    of one, inside backward, would make it refuse what another one's graph has saved."""
    by_storage: dict[int, list[Binding]] = {}
    for binding in bindings:
        by_storage.setdefault(binding.weight.untyped_storage()._cdata, []).append(binding)
    for members in by_storage.values():
        while len(members) > 1:
            first, *others = members
            versions = [other.weight._version for other in others]
            _increment_version((first.weight,))
            members = []
            for other, version in zip(others, versions, strict=True):
                if other.weight._version == version:
                    members.append(other)
                else:
                    first.together, other.together = other.name, first.name


_referent = weakref.ref.__call__

# Keyed by id: a lookup on every forward must not build a key object. The weak reference's callback removes the entry
# before the id can be used again, and a lookup compares identities all the same.
_newest: dict[int, tuple[Any, weakref.ref[Binding]]] = {}


def bind(binding: Binding) -> None:
    """Make `binding` the one that its weight's fused uses report to."""
    weight = binding.weight
    key = id(weight)
    earlier = lookup(weight)
    if earlier is not None:
        earlier.owns = False
    binding.owns = True

    def forget(reference: Any) -> None:
        entry = _newest.get(key)
        if entry is not None and entry[0] is reference:
            del _newest[key]

    _newest[key] = (WeakIdRef(weight, forget), weakref.ref(binding))


def lookup(weight: Tensor) -> Binding | None:
    """The newest binding of `weight` whose optimizer is alive, or None."""
    entry = _newest.get(id(weight))
    # The plain call of a weak reference, which repairs nothing: the caller holds the weight.
    if entry is None or _referent(entry[0]) is not weight:
        return None
    return entry[1]()


_addresses: dict[int, list[weakref.ref[Binding]]] = {}


def bindings_at(address: int) -> list[Binding]:
    """The newest bindings of the parameters whose data begins at this address."""
    for retry in (False, True):
        if retry:
            _index_addresses()
        found = [binding for reference in _addresses.get(address, ()) if (binding := reference()) is not None]
        # A parameter may have moved, or been freed and its memory used again, since it was indexed.
        if found and all(_lies_at(binding, address) for binding in found):
            return found
    return []


def _lies_at(binding: Binding, address: int) -> bool:
    weight = binding._weight()
    return weight is not None and weight.data_ptr() == address and lookup(weight) is binding


def _index_addresses() -> None:
    _addresses.clear()
    for reference, newest in list(_newest.values()):
        weight = reference()
        if weight is not None and weight.numel():
            _addresses.setdefault(weight.data_ptr(), []).append(newest)
