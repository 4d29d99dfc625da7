"""Gluon, Triton's lower level, where it is installed as this project knows it; an inert stand-in where it is not.

Gluon is experimental and renames things between releases: the barrier of a group of warps is `thread_barrier` in Triton
3.6 and `barrier` from 3.7 on, a TMA load is `async_copy_global_to_shared` until 3.7 and `async_load` from 3.8 on, and
another view of shared memory is `_reinterpret` until 3.8 and `reinterpret` from 3.9 on. Everything else of the project
uses the names defined here. Where one cannot be found, `AVAILABLE` is False, `REASON` says why, and the portable kernel
takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        from triton import knobs
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


def no_hooks() -> bool:
    """Whether no profiler of Triton's wants to hear of launches."""
    runtime = knobs.runtime
    return not (getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True))


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], operands: Sequence[Any], constants: Sequence[Any]
) -> Callable[..., None] | None:
    """A function that launches `compiled` again: `(stream, address of each operand, addresses of the tensors)`;
    a tuple of tensors is a tuple of addresses.

    operands: shape, strides and dtype of the leading TMA operands; constants: the arguments after the tensors. None
    where the release of Triton is not one whose compiled kernels are known here; its own launch path then stays in use.
    """
    import triton

    if not triton.__version__.startswith("3.6."):
        return None
    try:
        return _direct_launch_36(compiled, grid, operands, constants)
    except (AttributeError, KeyError, ImportError):
        return None


def _direct_launch_36(
    compiled: Any, grid: tuple[int, int, int], operands: Sequence[Any], constants: Sequence[Any]
) -> Callable[..., None] | None:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    run = compiled.run
    # A function around the launcher in C, which makes the TMA descriptors anew each time; here they are kept.
    inner = run.launch
    held = dict(zip(inner.__code__.co_freevars, (cell.cell_contents for cell in inner.__closure__ or ()), strict=True))
    launcher, layouts = held["launcher"], held["tensordesc_meta"]
    if run.global_scratch_size or run.profile_scratch_size or len(layouts) != len(operands) or None in layouts:
        return None
    function, metadata = compiled.function, compiled.packed_metadata
    flags = run.launch_cooperative_grid, run.launch_pdl
    count = len(operands)
    kept: dict[tuple[int, ...], list[Any]] = {}

    def launch(stream: int, *addresses: Any) -> None:
        where = addresses[:count]
        maps = kept.get(where)
        if maps is None:
            if len(kept) >= 256:
                kept.clear()
            maps = kept[where] = [
                argument
                for address, operand, layout in zip(where, operands, layouts, strict=True)
                for argument in make_tensordesc_arg(_At(address, operand), layout)
            ]
        launcher(
            *grid,
            stream,
            function,
            *flags,
            None,
            None,
            metadata,
            None,
            None,
            None,
            *maps,
            *addresses[count:],
            *constants,
        )

    return launch


class _At:
    """An operand at an address, as Triton reads it to make a TMA descriptor; holds no tensor alive."""

    padding = "zero"

    def __init__(self, address: int, operand: Any) -> None:
        self.shape, self.strides = operand.shape, operand.strides
        self.base = SimpleNamespace(data_ptr=lambda: address)


__all__ = [
    "AVAILABLE",
    "PUBLIC_REINTERPRET",
    "REASON",
    "TensorDescriptor",
    "barrier",
    "direct_launch",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "no_hooks",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
