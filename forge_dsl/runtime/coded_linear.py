"""A linear layer whose weight is in codes and is not updated: frozen, evaluated, or without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from forge_dsl.runtime.coded import CODES, Coded, decode, of
from forge_dsl.runtime.operands import check_operands, without_autocast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, also of a weight in codes, which gets no gradient; `x` and `bias` do."""
    if weight.dtype != CODES:
        return F.linear(x, weight, bias)
    check_operands(x, weight, bias)
    y: Tensor = CodedLinear.apply(x, weight.detach(), of(weight), bias)  # type: ignore[no-untyped-call]
    return y


class CodedLinear(Function):
    """A layer whose weight is in codes and stays as it is: decoded in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: Coded, bias: Tensor | None) -> Tensor:
        device = x.device.type
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, kept.scales)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        with without_autocast(device):
            return F.linear(x, decode(weight, kept.scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, _, needs_bias = ctx.needs_input_grad
        weight, scales = ctx.saved_tensors
        with without_autocast(dy.device.type):
            dx = (dy @ decode(weight, scales, dy.dtype)).to(ctx.x_dtype) if needs_x else None
            db = dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias_dtype) if needs_bias else None
        return dx, None, None, db
