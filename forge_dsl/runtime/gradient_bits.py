"""How many bits of a gradient the kernel for Hopper hands from its main loop to the update, and what that does to it.

The choice is a lower bound: the portable kernel and bands keep all 32 bits, and so does exact arithmetic everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHOICES = (16, 20, 24, 32)
DEFAULT = 24


def check_choice(value: object) -> None:
    """Raise ValueError if an optimizer cannot be asked for so many bits."""
    if not isinstance(value, int) or value not in CHOICES:
        raise ValueError(f"Invalid gradient_bits: {value!r} (expected 16, 20, 24 or 32)")


def handed_over(grad: Tensor, bits: int) -> Tensor:
    """A gradient in fp32 as it arrives, bit for bit but for NaN; see `device_handover`."""
    if bits == 32:
        return grad
    if bits == 16:
        return grad.bfloat16().float()
    pushed = grad * (1 + 1.5 * 2.0 ** -(bits - 7))
    return (pushed.view(torch.int32) & -(1 << 32 - bits)).view(torch.float32)
