"""`F.linear` for a weight that an optimizer updates inside backward."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from forge_dsl.runtime import gate
from forge_dsl.runtime.binding import Binding, lookup
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
    _check_operands(x, weight, bias)
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        _note_forward_without_grad(weight)
        return F.linear(x, weight, bias)
    if x.dtype not in _FLOATS:
        raise TypeError(f"x of shape {list(x.shape)}: expected float32, bfloat16 or float16, got {x.dtype}")
    binding = _binding_of(weight, optimizer_class)
    _refuse_recomputation(binding)
    token = gate.token_of(binding, weight)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    y: Tensor = FusedLinear.apply(x, weight.detach(), bias, token, binding, dtype)  # type: ignore[no-untyped-call]
    return y


class FusedLinear(Function):
    """`F.linear` on an alias of the weight; backward hands `(x, dy)` to the gate and computes no weight gradient."""

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
        if dtype is not None:
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        with _without_autocast(x.device.type):
            return F.linear(x, weight if dtype is None else weight.to(dtype), bias)

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
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        with _without_autocast(dy.device.type):
            dx = db = None
            if needs_x:
                dx = torch.mm(rows, weight.to(rows.dtype)).view(x.shape).to(ctx.x_dtype)
            if needs_bias:
                db = rows.sum(0).to(ctx.bias_dtype)
        if delivers:
            node.contributions.setdefault(task, []).append((x.reshape(rows.shape[0], x.shape[-1]), rows))
        return dx, None, db, None, None, None


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Casts are made here, once; autocast must not add its own."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _binding_of(weight: Tensor, optimizer_class: type) -> Binding:
    """The weight's binding, or the exception that says why there is none."""
    binding = lookup(weight)
    optimizer = None if binding is None else binding.optimizer
    if binding is None or optimizer is None:
        raise RuntimeError(
            f"no optimizer has the weight of shape {list(weight.shape)}, {weight.dtype} on {weight.device}. Give it to "
            f"{optimizer_class.__name__}(model.parameters(), ...) and keep that optimizer; or use "
            "torch.nn.functional.linear, run under torch.no_grad(), or freeze it with requires_grad_(False). A model "
            "that was copied, parametrised or sharded (FSDP) after its optimizer was built computes with other tensors"
        )
    if not isinstance(optimizer, optimizer_class):
        raise TypeError(
            f"{binding.describe()} belongs to {type(optimizer).__name__}, not to {optimizer_class.__name__}: call the "
            "linear function of its own optimizer"
        )
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            f"{binding.describe()}: DistributedDataParallel averages stored gradients, and this weight is updated "
            "inside backward, before any average. Use torch.nn.functional.linear under DistributedDataParallel"
        )
    return binding


def _refuse_recomputation(binding: Binding) -> None:
    """A forward inside a backward that has updated the weight would recompute activations with the new weight."""
    if binding.updated and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{binding.describe()} is used by a checkpoint's recomputation after this backward has updated it, so the "
            "recomputed activations would be wrong. The weight has changed: reload it, and keep every use of it "
            "inside one checkpointed segment, without detaching, or do not checkpoint it"
        )


def _note_forward_without_grad(weight: Tensor) -> None:
    """Reentrant checkpoints run their forward without grad: remember that this weight has such a segment pending."""
    if torch.is_inference_mode_enabled():
        return
    binding = lookup(weight)
    if binding is None:
        return
    _refuse_recomputation(binding)
    if inside_function_forward():
        if binding.segments is None:
            binding.segments = Segments()
        binding.segments.add_running_forward()


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise as `F.linear` would, and say which tensor, what it is, and what was expected."""
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out, in], got shape {list(weight.shape)}")
    out_features, in_features = weight.shape
    if not x.is_floating_point():
        raise TypeError(f"x of shape {list(x.shape)}: expected floating point, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise RuntimeError(
            f"x of shape {list(x.shape)} does not fit weight of shape {list(weight.shape)}: expected [..., "
            f"{in_features}]"
        )
    if bias is not None and bias.shape != (out_features,):
        raise RuntimeError(
            f"bias of shape {list(bias.shape)} does not fit weight of shape {list(weight.shape)}: expected "
            f"[{out_features}]"
        )
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != weight.device:
            raise RuntimeError(
                f"{name} of shape {list(tensor.shape)} is on {tensor.device}, weight of shape {list(weight.shape)} is "
                f"on {weight.device}: expected one device"
            )
        if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
            raise RuntimeError(
                f"{name} of shape {list(tensor.shape)} is {tensor.dtype}, weight of shape {list(weight.shape)} is "
                f"{weight.dtype}: expected one dtype, or torch.autocast"
            )
