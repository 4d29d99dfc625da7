"""`F.linear` for a weight that an optimizer updates inside backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from forge_dsl.runtime import activations
from forge_dsl.runtime.binding import lookup
from forge_dsl.runtime.compiled import traced_linear
from forge_dsl.runtime.gate import Gate, gate_of
from forge_dsl.runtime.operands import (
    as_rows,
    bound,
    check_operands,
    device_type,
    refuse_recomputation,
    without_autocast,
)
from forge_dsl.runtime.readiness import begin_delivery
from forge_dsl.runtime.segments import Segments, inside_function_forward

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, optimizer_class: type) -> Tensor:
    """`x @ weight.T + bias`, whose backward updates `weight` with its optimizer, an `optimizer_class`.

    x       [..., in], floating point; any number of leading dimensions, also none
    weight  [out, in]; a parameter of an `optimizer_class`
    bias    [out] or None; gets an ordinary gradient

    Without grad, or for a weight that does not require it, this is `torch.nn.functional.linear`. Raises RuntimeError,
    TypeError or ValueError, naming the tensor, where shapes, dtypes or devices do not fit or no optimizer has it.
    """
    if torch.compiler.is_compiling():
        return traced_linear(x, weight, bias, optimizer_class.__name__)
    check_operands(x, weight, bias)
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        _note_forward_without_grad(weight)
        return F.linear(x, weight, bias)
    if x.dtype not in _FLOATS:
        raise TypeError(f"x of shape {list(x.shape)}: expected float32, bfloat16 or float16, got {x.dtype}")
    binding = bound(weight, lookup(weight), optimizer_class.__name__)
    refuse_recomputation(binding)
    device = device_type(x)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if torch._C._are_functorch_transforms_active():
        FusedLinear.apply(x, weight, bias, gate_of(binding), dtype)  # type: ignore[no-untyped-call]  # says what to do
    y: Tensor = _apply(x, weight, bias, gate_of(binding), dtype)
    return y


class FusedLinear(Function):
    """`F.linear`, whose backward hands `(x, dy)` to the weight's gate and computes no weight gradient.

    `x` is saved as it is, or in 8 bits (`activations`); the output is computed from all of it either way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate, dtype: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        binding = gate.binding
        ctx.gate = gate
        ctx.version = weight._version
        ctx.born = torch._C._current_graph_task_id()
        ctx.root = binding.segments.root_of_running_backward() if binding.segments and ctx.born != -1 else None
        gate.register(ctx)
        if dtype is None and not binding.saves_fp8:
            ctx.dtypes = None
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)
        source = x
        ctx.dtypes = x.dtype, dtype or x.dtype, None if bias is None else bias.dtype
        if dtype is not None:
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if binding.saves_fp8 and x.numel():
            ctx.save_for_backward(*activations.encoded_once(x, source), weight)
        else:
            ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            return F.linear(x, weight if dtype is None else weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        gate: Gate = ctx.gate
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{gate.binding.describe()}: create_graph=True is not possible through a linear layer that is updated "
                "inside backward; use torch.nn.functional.linear for the layers that need a second derivative"
            )
        task = torch._C._current_graph_task_id()
        delivery = gate.deliveries.get(task) or begin_delivery(gate, task, ctx)
        if delivery is None and gate.consumed:
            raise RuntimeError(
                f"{gate.binding.describe()} was already updated by a backward through this graph, and its old value is "
                "gone: run the forward again, or ask for these gradients first"
            )
        dx = dw = db = None
        if dy is not None:
            *kept, weight = ctx.saved_tensors
            if torch.is_autocast_enabled(device_type(dy)):
                with without_autocast(device_type(dy)):
                    dx, db = _gradients(ctx, dy, weight, kept[0].shape)
            else:
                dx, db = _gradients(ctx, dy, weight, kept[0].shape)
            if delivery is not None:
                x = kept[0] if len(kept) == 1 else activations.decode(kept[0], kept[1], ctx.dtypes[1])
                delivery.operands.append((as_rows(x), as_rows(dy)))
        if delivery is not None:
            dw = gate.finish_use(task)
        return dx, dw, db, None, None


# Without the part of `Function.apply` that is there for the transforms of functorch.
_apply = super(Function, FusedLinear).apply


def _gradients(
    ctx: Any, dy: Tensor, weight: Tensor, shape: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Of `x`, which has this shape, and of the bias; None where no gradient is needed. Autocast is off."""
    needs_x, _, needs_bias, *_ = ctx.needs_input_grad
    rows = as_rows(dy)
    dx = db = None
    if needs_x:
        dx = torch.mm(rows, weight if weight.dtype is rows.dtype else weight.to(rows.dtype))
        if len(shape) != 2:
            dx = dx.view(shape)
    if needs_bias:
        db = rows.sum(0)
    if ctx.dtypes is not None:
        x_dtype, _, bias_dtype = ctx.dtypes
        dx = None if dx is None else dx.to(x_dtype)
        db = None if db is None else db.to(bias_dtype)
    return dx, db


def _note_forward_without_grad(weight: Tensor) -> None:
    """Reentrant checkpoints run their forward without grad: remember that this weight has such a segment pending."""
    if torch.is_inference_mode_enabled():
        return
    binding = lookup(weight)
    if binding is None:
        return
    refuse_recomputation(binding)
    if inside_function_forward():
        if binding.segments is None:
            binding.segments = Segments()
        binding.segments.add_running_forward()
