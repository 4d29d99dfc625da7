"""`F.linear` for a weight that an optimizer updates inside backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from forge_dsl.runtime import activations, coded, coded_linear, gate
from forge_dsl.runtime.binding import Binding, lookup
from forge_dsl.runtime.compiled import traced_linear
from forge_dsl.runtime.operands import bound, check_operands, refuse_recomputation, without_autocast
from forge_dsl.runtime.readiness import check_task
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
        return coded_linear.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        _note_forward_without_grad(weight)
        return coded_linear.linear(x, weight, bias)
    if x.dtype not in _FLOATS:
        raise TypeError(f"x of shape {list(x.shape)}: expected float32, bfloat16 or float16, got {x.dtype}")
    binding = bound(weight, lookup(weight), optimizer_class.__name__)
    refuse_recomputation(binding)
    token = gate.token_of(binding, weight)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    y: Tensor = FusedLinear.apply(x, weight.detach(), bias, token, binding, dtype)  # type: ignore[no-untyped-call]
    return y


class FusedLinear(Function):
    """`F.linear` on an alias of the weight; backward hands `(x, dy)` to the gate and computes no weight gradient.

    `x` is saved as it is, or in 8 bits (`activations`); the output is computed from all of it either way.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, binding: Binding, dtype: Any
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        ctx.token = token
        ctx.version = weight._version
        ctx.born = torch._C._current_graph_task_id()
        ctx.root = binding.segments.root_of_running_backward() if binding.segments and ctx.born != -1 else None
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        gate.register_use(token.grad_fn, ctx)
        source = x
        if dtype is not None:
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        scales = coded.of(binding.weight).scales if weight.dtype == coded.CODES else None
        if binding.saves_fp8 and x.numel():
            ctx.save_for_backward(*activations.encoded_once(x, source), weight, scales)
        else:
            ctx.save_for_backward(x, weight, scales)
        with without_autocast(x.device.type):
            return F.linear(x, coded.widened(weight, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        binding: Binding = ctx.binding
        node = ctx.token.grad_fn
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{binding.describe()}: create_graph=True is not possible through a linear layer that is updated "
                "inside backward; use torch.nn.functional.linear for the layers that need a second derivative"
            )
        task = torch._C._current_graph_task_id()
        delivers = torch._C._will_engine_execute_node(node)
        if delivers:
            check_task(task, ctx)
        elif node.consumed:
            raise RuntimeError(
                f"{binding.describe()} was already updated by a backward through this graph, and its old value is "
                "gone: run the forward again, or ask for these gradients first"
            )
        if dy is None:
            return (None,) * 6
        *kept, weight, scales = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        with without_autocast(dy.device.type):
            dx = db = None
            if needs_x:
                dx = torch.mm(rows, coded.widened(weight, scales, rows.dtype)).view(ctx.shape).to(ctx.x_dtype)
            if needs_bias:
                db = rows.sum(0).to(ctx.bias_dtype)
        if delivers:
            x = kept[0].reshape(rows.shape[0], kept[0].shape[-1])
            if len(kept) == 2:
                x = activations.operand(x, kept[1].reshape(-1, 1), ctx.dtype, rows.dtype)
            node.contributions.setdefault(task, []).append((x, rows))
        return dx, None, db, None, None, None


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
