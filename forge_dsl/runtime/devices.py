"""What the runtime asks of a device, or of the CPU, which has neither streams nor captures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which it is the current device, to which Triton launches wherever the arguments may lie."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def allows_tf32() -> bool:
    """Whether torch may multiply fp32 matrices in TF32.

    There are two switches, and from torch 2.9 on reading the older one raises once the newer one has been set.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def upload(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers on the device, without waiting for it."""
    tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
