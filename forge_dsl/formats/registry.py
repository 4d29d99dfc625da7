"""Storage formats by name, the matrix that a tensor of any shape is to them, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import torch

from forge_dsl.formats import scale
from forge_dsl.formats.block_wise import BlockWise, FourthPowers, SignedFloat, SignedSquares
from forge_dsl.formats.extended import Extended
from forge_dsl.formats.plain import Plain

Format: TypeAlias = Plain | BlockWise
F = TypeVar("F")

PLAIN = {
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "fp16": Plain("fp16", torch.float16),
}
SIGNED: dict[str, Format] = {**PLAIN, "int8": SignedSquares(), "fp8": SignedFloat()}
# The best float of 8 bits, of 5 exponent and 3 fraction bits, has 1.2 to 2.6 times the error of fourth powers in the
# root of a second moment (`benchmarks/state_formats.py`), and makes learning rates 1.5 % too large.
NONNEGATIVE: dict[str, Format] = {**PLAIN, "int8": FourthPowers(), "fp8": FourthPowers()}
WEIGHT: dict[str, Format | Extended] = {
    **PLAIN,
    "fp8": SignedFloat(flush=False),
    "bf16+8": Extended(8),
    "bf16+16": Extended(16),
}


def of_state(name: str, nonnegative: bool) -> Format:
    """The format of a state with that name; a domain `in [0, inf)` picks the code. ValueError for an unknown name."""
    return _look_up(NONNEGATIVE if nonnegative else SIGNED, name, "state")


def of_weight(name: str) -> Format | Extended:
    """The format of a weight with that name. ValueError for an unknown name."""
    return _look_up(WEIGHT, name, "weight")


def _look_up(known: dict[str, F], name: str, what: str) -> F:
    if name not in known:
        raise ValueError(f"a {what} has no format {name!r}; there are {', '.join(known)}")
    return known[name]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor: `[1, n]` for a vector, trailing dimensions as one for a convolution's weight.

    Blocks and pairs of columns lie along the last of these, in the order of the indices, whatever the strides.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """`[blocks, rows]` of the scales of a block-wise format for a tensor of this shape."""
    rows, columns = matrix_shape(shape)
    return scale.count(columns), rows


def bytes_of(form: Format | Extended, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this shape takes, scales or extra bits included; exact, tail blocks too."""
    numel = math.prod(shape)
    if isinstance(form, Extended):
        return numel * (form.code_dtype.itemsize + form.low_dtype.itemsize)
    scales = math.prod(scale_shape(shape)) if isinstance(form, BlockWise) else 0
    return numel * form.code_dtype.itemsize + scales


def scale_key(state: str) -> str:
    """The name in `state_dict` of a state's scales, beside its codes under the state's own name."""
    return f"{state}_scale"


LOW_KEY = "weight_low"  # the name in `state_dict` of the bits beside a bf16 weight
