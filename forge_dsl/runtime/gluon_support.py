"""Gluon, Triton's lower level, where it is installed as this project knows it; an inert stand-in where it is not.

Gluon is experimental and renames things between releases: the barrier of a group of warps is `thread_barrier` in Triton
3.6 and `barrier` from 3.7 on, a TMA load is `async_copy_global_to_shared` until 3.7 and `async_load` from 3.8 on, and
another view of shared memory is `_reinterpret` until 3.8 and `reinterpret` from 3.9 on. Everything else of the project
uses the names defined here. Where one cannot be found, `AVAILABLE` is False, `REASON` says why, and the portable kernel
takes over.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forge_dsl.runtime.triton_support import AVAILABLE as HAS_TRITON
from forge_dsl.runtime.triton_support import INTERPRETED

AVAILABLE = False
REASON = ""

if not HAS_TRITON:
    REASON = "Triton is not installed"
elif INTERPRETED:
    REASON = "kernels run in Triton's interpreter (TRITON_INTERPRET), which has no Hopper"
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.hopper import (
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        def _first(owner: Any, *names: str) -> Any:
            """The attribute under the first name that the installed release has."""
            for name in names:
                if hasattr(owner, name):
                    return getattr(owner, name)
            raise ImportError(f"{owner.__name__} has none of {', '.join(names)}")

        barrier = _first(gl, "thread_barrier", "barrier")
        load_tile = _first(tma, "async_load", "async_copy_global_to_shared")
        _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
        for _layout in ("Blocked", "DistributedLinear", "NVMMADistributed", "NVMMAShared", "Slice"):
            _first(gl, f"{_layout}Layout")
        for _name in ("allocate_shared_memory", "convert_layout", "inline_asm_elementwise", "warp_specialize"):
            _first(gl, _name)
        for _name in ("MBarrierLayout", "init", "expect", "wait", "arrive"):
            _first(mbarrier, _name)
        AVAILABLE = True
    except (ImportError, AttributeError) as error:
        REASON = f"this release of Triton has another Gluon than the ones known here ({error})"

if AVAILABLE:
    PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
else:

    def _jit(function: Any = None, **_: object) -> Any:
        """Stands for the decorator: a kernel of Gluon is then None, and so is `Rule.hopper_kernel`."""
        return None if function is not None else _jit_nothing

    def _jit_nothing(function: Any) -> None:
        return None

    gluon = SimpleNamespace(jit=_jit, constexpr_function=_jit)
    gl = SimpleNamespace(constexpr=object)
    mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = barrier = load_tile = TensorDescriptor = None
    PUBLIC_REINTERPRET = None


__all__ = [
    "AVAILABLE",
    "PUBLIC_REINTERPRET",
    "REASON",
    "TensorDescriptor",
    "barrier",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
