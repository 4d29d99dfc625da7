"""torch's wrapper around `step`, which labels it for a profiler and calls hooks: only where there are any.

It costs as much host time as several fused layers, and nobody may be listening.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.autograd import _profiler_enabled, profiler  # type: ignore[attr-defined]
from torch.optim import optimizer as torch_optimizer

# Torch's own names, in every release since 2.0; where one of them is gone, every step takes torch's wrapper.
_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OF_ONE = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_profiled() -> bool:
    """Whether a profiler records what this thread does, or every thread."""
    return bool(_profiler_enabled()) or getattr(profiler, "_is_profiler_enabled", True)


def only_where_heard(hooked: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` that torch has wrapped, without the wrapper where neither a hook nor a profiler would notice it."""
    plain: Callable[..., Any] | None = getattr(hooked, "__wrapped__", None)
    if plain is None or not all(hasattr(torch_optimizer, name) for name in _OF_ALL):
        return hooked

    @wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard = is_profiled() or any(getattr(torch_optimizer, name) for name in _OF_ALL)
        if heard or any(getattr(self, name, True) for name in _OF_ONE):
            return hooked(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]
    return step
