"""Uses of weights in compiled graphs, each known by a ticket that its graph saves for backward.

A compiled graph is one node of the autograd graph, so that no node stands for a layer in it. Its forward hands out a
ticket instead: a small tensor on the CPU, whose numbers find the use again in backward, and whose memory is released
with the graph that saved it, which tells that the use can no longer deliver.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from forge_dsl.runtime.binding import Binding, bindings_at
from forge_dsl.runtime.demand import accumulator, demand_of

_serials = itertools.count(1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledUse:
    """One use of one weight.

    version  the weight's, when it was read
    born     the backward inside which it ran, as the recomputation of a checkpoint; -1 outside of any
    task     the backward in which it delivered, or in which its recomputation took its place
    """

    binding: weakref.ref[Binding]
    version: int
    storage: StorageWeakRef
    born: int = -1
    task: int | None = None

    def waits(self) -> bool:
        """Whether a graph may still deliver it."""
        return self.task is None and not self.is_released()

    def is_lost(self) -> bool:
        """Whether it has not delivered and no graph holds its ticket."""
        return self.task is None and self.is_released()

    def is_released(self) -> bool:
        """Whether every graph that could deliver it is gone."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


# The bindings hold them.
_uses: weakref.WeakValueDictionary[int, CompiledUse] = weakref.WeakValueDictionary()
# Uses of one weight that are kept although nobody will deliver them.
_KEPT = 64


def issue(binding: Binding) -> Tensor:
    """A ticket for one use of the weight, int64 [1] on the CPU."""
    if len(binding.uses) >= _KEPT:
        binding.uses = [use for use in binding.uses if not use.is_released()]
    serial = next(_serials)
    ticket = torch.tensor([serial], device="cpu")
    storage = StorageWeakRef(ticket.untyped_storage())  # type: ignore[no-untyped-call]
    task = torch._C._current_graph_task_id()
    if task != -1:
        # A checkpoint recomputes a use whose graph kept no ticket: that one will not deliver itself.
        original = next((use for use in binding.uses if use.born == -1 and use.is_lost()), None)
        if original is not None:
            original.task = task
    use = _uses[serial] = CompiledUse(weakref.ref(binding), binding.weight._version, storage, task)
    binding.uses.append(use)
    return ticket


def redeem(ticket: Tensor) -> CompiledUse:
    """The use that a ticket was issued for."""
    use = _uses.get(int(ticket))
    if use is None:
        raise RuntimeError(
            "a compiled graph that uses a fused weight outlived the weight's optimizer, which was deleted, or lost its "
            "ticket: keep the optimizer until backward, or train the model without torch.compile"
        )
    return use


def is_wanted(binding: Binding) -> bool:
    """Whether the running backward is one that accumulates the weight's gradient, and so updates the weight.

    Raises RuntimeError if `torch.autograd.grad` asks for that gradient: a compiled graph does not compute it.
    """
    if not binding.weight.requires_grad:  # it was frozen after the forward
        return False
    found = demand_of(accumulator(binding.weight))
    if found == "result":
        raise RuntimeError(
            f"{binding.describe()}: torch.autograd.grad cannot return the gradient of a fused weight through "
            "torch.compile; call the model that is not compiled"
        )
    return found == "update"


def waiting_uses() -> list[CompiledUse]:
    """Every use that some graph may still deliver."""
    return [use for use in list(_uses.values()) if use.waits()]


def waits_for_more(binding: Binding, task: int) -> bool:
    """Whether more uses of the weight will deliver to this backward, or may.

    Where checkpoints recompute, so may every use whose ticket is gone: it can have been in a checkpoint, or in a graph
    that was thrown away.
    """
    recomputed = any(use.born == task for use in binding.uses)
    return any(use.waits() or (recomputed and use.born == -1 and use.is_lost()) for use in binding.uses)


def settle(binding: Binding) -> None:
    """After the weight's update: uses of before it that are gone will deliver to nothing."""
    for use in binding.uses:
        if use.is_lost():
            use.task = -1
    binding.uses = [use for use in binding.uses if not use.is_released()]


def find(weight: Tensor) -> Binding | None:
    """The newest binding of the parameter whose memory a compiled graph passes on, maybe through an alias.

    Raises RuntimeError where two parameters are the same memory, so that nothing tells which one is meant.
    """
    found = [binding for binding in bindings_at(weight.data_ptr()) if binding.shape == weight.shape]
    if len(found) > 1:
        names = " and ".join(binding.describe() for binding in found)
        raise RuntimeError(
            f"{names} share their memory: under torch.compile use torch.nn.functional.linear for these weights"
        )
    return found[0] if found else None
