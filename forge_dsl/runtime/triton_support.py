"""Triton where it is installed, an inert stand-in where it is not, so that generated modules import on every machine.

Without Triton (macOS, Windows) everything runs through the PyTorch reference in bands; only launching a kernel raises.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl

    try:
        from triton.language.extra import libdevice
    except ImportError:  # the interpreter needs none of it, and some builds ship without
        libdevice = None
    AVAILABLE = True
except ImportError:
    AVAILABLE = False
    libdevice = None

    class _NoKernel:
        """Stands for a kernel; says why it cannot run."""

        def __init__(self, function: Any) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: object) -> Any:
            raise RuntimeError(
                f"{self.__name__} is a Triton kernel and Triton is not installed; "
                "install triton (Linux), or keep the tensors on the CPU, where the banded schedule needs none"
            )

    def _jit(function: Any = None, **_: object) -> Any:
        return _NoKernel if function is None else _NoKernel(function)

    triton = SimpleNamespace(jit=_jit)
    tl = SimpleNamespace(constexpr=object)

# Whether kernels defined from now on run in Triton's interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in {"", "0", "false", "False", "off"}

__all__ = ["AVAILABLE", "INTERPRETED", "interpreted", "libdevice", "tl", "triton"]


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter (TRITON_INTERPRET=1 when it was defined) and not on a GPU."""
    return type(kernel).__name__ == "InterpretedFunction"
