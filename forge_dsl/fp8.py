"""Weights in fp8 for layers of your own; for a whole model there is `forge_dsl.fuse(model, ..., weight_dtype="fp8")`.

    self.weight = forge_dsl.fp8.parameter(torch.randn(128, 256, dtype=torch.bfloat16))
    ...
    y = adamw_linear(x, self.weight)        # decodes, and updates codes and scales inside backward

A weight is float8 e4m3 codes; its scales, a power of two for every 64 columns of a row, lie beside it and are found by
the parameter. Nothing guards these codes against a cast of the whole module, which would take them for numbers, and
whoever saves them has to save their scales too: `fuse` does both for `nn.Linear`. Numbers are written by `assign`; a
write in place of any other kind is noticed at the next use, and a write through `weight.data` is not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_dsl.runtime import coded
from forge_dsl.runtime.storage import DTYPES

__all__ = ["assign", "attach", "decode", "parameter", "scales"]


def parameter(weight: Tensor) -> nn.Parameter:
    """A parameter of codes, float8_e4m3fn [out, in], for numbers in fp32, bf16 or fp16, which its layers compute in.

    Rounded once, to nearest. Raises TypeError or ValueError for another type or shape.
    """
    _check_tensor("weight", weight)
    if weight.dtype not in DTYPES.values():
        raise TypeError(f"weight of shape {list(weight.shape)}: expected fp32, bf16 or fp16, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out, in], got shape {list(weight.shape)}")
    codes, found = coded.encode(weight.detach())
    made = nn.Parameter(codes)
    coded.register(made, found, weight.dtype)
    return made


def assign(weight: Tensor, values: Tensor) -> None:
    """Write numbers into a weight in fp8, of a fused layer or of your own: its codes and scales, in place.

    values: [out, in] in any floating type; rounded once, to nearest. An operation in place (`weight.copy_(values)`,
    `torch.nn.init`) would store numbers as codes, which the next forward or update refuses.

    Raises TypeError or ValueError, before anything is written, for another shape or type, or a weight not in fp8.
    """
    _check_tensor("weight", weight)
    _check_tensor("values", values)
    if weight.dtype != coded.CODES:
        raise TypeError(
            f"weight of shape {list(weight.shape)} is {weight.dtype}, and not kept in fp8: write it as any other "
            "tensor, by weight.copy_(values) under torch.no_grad()"
        )
    coded.known(weight)
    if values.shape != weight.shape:
        raise ValueError(f"values: expected shape {list(weight.shape)}, got {list(values.shape)}")
    if values.dtype == coded.CODES:
        values = decode(values, torch.float32)
    if values.dtype not in (*DTYPES.values(), torch.float64):
        raise TypeError(f"values: expected floating-point numbers, got {values.dtype}")
    coded.assign(weight, values)


def scales(weight: Tensor) -> Tensor:
    """The scales of a parameter of codes, float8_e8m0fnu [ceil(in / 64), out]: the memory that updates write."""
    _check_tensor("weight", weight)
    return coded.known(weight).scales


def attach(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Say which scales belong to a parameter of codes that was loaded or copied, and what its layers compute in.

    From then on what is in both counts as codes and scales, whoever wrote it. A parameter that is put into a layer of
    a fused model with scales of its own needs `fuse` after that, which makes them the layer's.
    """
    _check_tensor("weight", weight)
    _check_tensor("scales", scales)
    _check_dtype(dtype)
    coded.register(weight, scales, dtype)
    coded.note_written(weight)


def decode(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers [out, in] of a parameter of codes, in the type that its layers compute in by default."""
    _check_tensor("weight", weight)
    kept = coded.of(weight)
    if dtype is not None:
        _check_dtype(dtype)
    return coded.decode(weight, kept.scales, dtype or kept.dtype)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def _check_dtype(dtype: object) -> None:
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16, got {dtype}")
