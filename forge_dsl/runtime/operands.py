"""What must hold before a fused layer runs, eager or compiled: its operands, its weight's optimizer."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime.binding import Binding, lookup
from forge_dsl.runtime.coded import CODES, compute_dtype


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Casts are made here, once; autocast must not add its own."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def as_rows(tensor: Tensor) -> Tensor:
    """[..., columns] as a matrix [tokens, columns], whose memory holds its numbers.

    That of the imaginary part of a conjugate, and of gradients that reach one, holds them with the other sign.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def bound(weight: Tensor, binding: Binding | None, optimizer_class: str) -> Binding:
    """The weight's binding if it is one that can be used, or the exception that says why it is not."""
    optimizer = None if binding is None else binding.optimizer
    if binding is None or optimizer is None:
        raise RuntimeError(
            f"no optimizer has the weight of shape {list(weight.shape)}, {weight.dtype} on {weight.device}. Give it to "
            f"{optimizer_class}(model.parameters(), ...) and keep that optimizer; or use "
            "torch.nn.functional.linear, run under torch.no_grad(), or freeze it with requires_grad_(False). A model "
            "that was copied, parametrised or sharded (FSDP) after its optimizer was built computes with other tensors"
        )
    own = type(optimizer)
    if own.__name__ != optimizer_class and optimizer_class not in (base.__name__ for base in own.__mro__):
        raise TypeError(
            f"{binding.describe()} belongs to {type(optimizer).__name__}, not to {optimizer_class}: call the linear "
            "function of its own optimizer"
        )
    return binding


def refuse_data_parallel(binding: Binding) -> None:
    """Raise RuntimeError in a forward of DistributedDataParallel."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            f"{binding.describe()}: DistributedDataParallel averages stored gradients, and this weight is updated "
            "inside backward, before any average. Use torch.nn.functional.linear under DistributedDataParallel"
        )


def refuse_recomputation(binding: Binding) -> None:
    """A forward inside a backward that has updated the weight would recompute activations with the new weight."""
    if binding.updated and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{binding.describe()} is used by a checkpoint's recomputation after this backward has updated it, so the "
            "recomputed activations would be wrong. The weight has changed: reload it, and keep every use of it "
            "inside one checkpointed segment, without detaching, or do not checkpoint it"
        )


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise as `F.linear` would, and say which tensor, what it is, and what was expected."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "bias"):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out, in], got shape {list(weight.shape)}")
    out_features, in_features = weight.shape
    if not x.is_floating_point():
        raise TypeError(f"x of shape {list(x.shape)}: expected floating point, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise RuntimeError(f"x of shape {list(x.shape)} does not fit {_shown(weight)}: expected [..., {in_features}]")
    if bias is not None and bias.shape != (out_features,):
        raise RuntimeError(f"bias of shape {list(bias.shape)} does not fit {_shown(weight)}: expected [{out_features}]")
    expected = compute_dtype(weight)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != weight.device:
            raise RuntimeError(
                f"{name} of shape {list(tensor.shape)} is on {tensor.device}, {_shown(weight)} is on "
                f"{weight.device}: expected one device"
            )
        if weight.dtype == CODES and tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} of shape {list(tensor.shape)} is {tensor.dtype}, and the {_shown(weight)} is kept in "
                f"fp8: such layers compute in fp32, bf16 or fp16, this one in {expected}. Cast {name} to that; "
                "weight.dtype is that of codes, and nothing to cast to"
            )
        if tensor.dtype != expected and not torch.is_autocast_enabled(weight.device.type):
            raise RuntimeError(
                f"{name} of shape {list(tensor.shape)} is {tensor.dtype}, {_shown(weight)} is {expected}: "
                "expected one dtype, or torch.autocast"
            )


def _shown(weight: Tensor) -> str:
    """The weight in a message: its shape, and its name where it is known."""
    binding = None if torch.compiler.is_compiling() else lookup(weight)
    return f"weight of shape {list(weight.shape)}" + ("" if binding is None else f" ({binding.name})")
