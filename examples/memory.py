"""The most memory that tensors held at any moment, on a CPU as on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage from the operation that made it until the last reference to it is gone.

    This is what a caching allocator counts on a GPU, without the allocator's noise: the same run gives the same number.
    A kernel's private scratch memory is not seen. Every operation passes through Python, so watch a step, not a run.
    """

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.bytes = self.peak = 0
        for tensor in present:
            self._see(tensor)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def peak_bytes(step: Callable[[], object], present: Iterable[Tensor], device: torch.device) -> int:
    """The most bytes that tensors held on `device` while `step()` ran, `present` among them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    gc.collect()
    with LiveBytes(present) as live:
        step()
    return live.peak
