"""The input of a linear layer as its backward finds it: whole, or as float8 e4m3 with one scale a token.

A row (a token) has the least power of two under which its largest magnitude is at most 448, so that scaling rounds
nothing; each element is rounded to nearest even, once. An element is then within 1/16 of its size, or, where it is
below 1/64 of the scale, within 2^-10 scales, which is less than 2^-17 of the largest magnitude of its row. What is not
finite becomes NaN, and leaves the rest of its row alone.

Scales end where every code is a normal number of bf16 and fp32, or a number of fp16, and what would be read back as
more than the type's largest number has the code below: what is read back has been rounded by its code and by nothing
else, in whichever type it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from forge_dsl.formats import scale
from forge_dsl.formats.operand import Operand, Scaled, powers
from forge_dsl.runtime.devices import is_capturing

CHOICES = (None, "fp8")
_LARGEST = 0x43E00000  # 448, the largest number of e4m3
# 2^-15 times the least code, 2^-9, is the least number of fp16; 2^-117 times it is the least normal number of fp32.
_LEAST_SCALE = {torch.float16: 127 - 15, torch.bfloat16: 127 - 117, torch.float32: 127 - 117}
# The scale of the largest numbers: code 256 would be 2^16 or 2^128, and the next one is 240.
_TOP_SCALE = {torch.float16: 127 + 8, torch.bfloat16: 127 + 120, torch.float32: 127 + 120}

# Layers that read one tensor (queries, keys and values) save one encoding of it. Neither is kept alive by this.
_known: Any = WeakIdKeyDictionary()


def check_choice(value: Any) -> None:
    """Raise ValueError unless the option has a meaning."""
    if value not in CHOICES:
        raise ValueError(f'Invalid saved_activations: {value!r} (expected None or "fp8")')


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [..., in] of fp32, bf16 or fp16 as codes, float8_e4m3fn [..., in], and scales, uint8 [..., 1]."""
    largest = x.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    scales = scale.scale_of(largest.float().view(torch.int32), _LARGEST, _LEAST_SCALE[x.dtype])
    unit = (254 - scales << 23).view(torch.float32)
    # Releases of torch differ in what e4m3, which has no infinity, makes of one.
    scaled = (x * unit.to(x.dtype)).nan_to_num_(torch.nan, torch.nan, torch.nan)
    limit = torch.where(scales == _TOP_SCALE[x.dtype], 240.0, 448.0).to(x.dtype)
    scaled.clamp_(-limit, limit)
    return scaled.to(torch.float8_e4m3fn), scales.to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `encode` kept, in the dtype that `x` had; finite where `x` was, NaN where it was not."""
    return codes.to(dtype).mul_(powers(scales).to(dtype))


def operand(codes: Tensor, scales: Tensor, dtype: torch.dtype, upstream: torch.dtype) -> Operand:
    """What `encode` kept of an `x` of `dtype`, as [tokens, in] and [tokens, 1], for an update with an `upstream` dy.

    In 8 bits, unless the two types differ: the gradient is then that of the numbers in both.
    """
    if dtype == upstream:
        return Scaled(codes, scales)
    return decode(codes, scales, dtype)


def encoded_once(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """`encode(x)`, the same tensors again while they are alive and `source` has not changed.

    source: the tensor that the caller of the layer gave, of which `x` may be a cast copy.
    """
    # What was encoded before a CUDA graph is captured would be missing from its replays.
    capturing = is_capturing(x.device)
    key = (source._version, x.dtype, capturing)
    held = _known.get(source)
    if held is not None and held[0] == key:
        codes, scales = held[1](), held[2]()
        if codes is not None and scales is not None:
            return codes, scales
    codes, scales = encode(x)
    _known[source] = (key, TensorWeakRef(codes), TensorWeakRef(scales))
    return codes, scales
