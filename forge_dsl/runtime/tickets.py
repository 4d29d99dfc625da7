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

_serials = itertools.count(1)


@dataclass(eq=False, slots=True)
class CompiledUse:
    """One use of one weight. `task` is the backward in which it delivered; `version` the weight's, when it was read."""

    binding: weakref.ref[Binding]
    version: int
    storage: StorageWeakRef
    task: int | None = None

    def waits(self) -> bool:
        """Whether a graph may still deliver it."""
        return self.task is None and not self.is_released()

    def is_released(self) -> bool:
        """Whether every graph that could deliver it is gone."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


_uses: dict[int, CompiledUse] = {}
_prune_at = 256


def issue(binding: Binding) -> Tensor:
    """A ticket for one use of the weight, int64 [1] on the CPU."""
    global _prune_at
    if len(_uses) >= _prune_at:
        for serial in [serial for serial, use in list(_uses.items()) if use.is_released()]:
            del _uses[serial]
        _prune_at = 2 * len(_uses) + 256
    serial = next(_serials)
    ticket = torch.tensor([serial])
    storage = StorageWeakRef(ticket.untyped_storage())  # type: ignore[no-untyped-call]
    _uses[serial] = CompiledUse(weakref.ref(binding), binding.weight._version, storage)
    return ticket


def redeem(ticket: Tensor) -> CompiledUse:
    """The use that a ticket was issued for."""
    use = _uses.get(int(ticket))
    if use is None:
        raise RuntimeError(
            "a compiled graph that uses a fused weight did not keep its ticket in place (tensors saved for backward "
            "were moved by a hook?): compile the model without such hooks, or train it without torch.compile"
        )
    return use


def is_wanted(binding: Binding) -> bool:
    """Whether the running backward is one that accumulates the weight's gradient, and so updates the weight.

    Raises RuntimeError if `torch.autograd.grad` asks for that gradient: a compiled graph does not compute it.
    """
    with torch.enable_grad():  # the node is found by way of a view
        node = torch.autograd.graph.get_gradient_edge(binding.weight).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        raise RuntimeError(
            f"{binding.describe()}: torch.autograd.grad cannot return the gradient of a fused weight through "
            "torch.compile; call the model that is not compiled"
        ) from None


def waiting_uses() -> list[CompiledUse]:
    """Every use that some graph may still deliver."""
    return [use for use in list(_uses.values()) if use.waits()]


def waiting_uses_of(binding: Binding) -> list[CompiledUse]:
    """Those of one weight."""
    return [use for use in waiting_uses() if use.binding() is binding]


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
