"""`F.linear` for a weight that an optimizer updates inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _current_graph_task_id, _len_torch_dispatch_stack
from torch.autograd import Function
from torch.compiler import is_compiling

from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime import activations, coded, coded_linear
from forge_dsl.runtime.binding import Binding, lookup
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.compiled import traced_linear
from forge_dsl.runtime.gate import Gate, new_gate
from forge_dsl.runtime.operands import (
    as_rows,
    bound,
    check_operands,
    refuse_data_parallel,
    refuse_recomputation,
    without_autocast,
)
from forge_dsl.runtime.readiness import begin_delivery
from forge_dsl.runtime.scaled import decoded
from forge_dsl.runtime.segments import Segments, inside_function_forward

_DENSE = torch.strided
_ORDINARY = {Tensor, torch.nn.Parameter, type(None)}


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, optimizer_class: type, transposed: bool = False
) -> Tensor:
    """`x @ weight.T + bias`, whose backward updates `weight` with its optimizer, an `optimizer_class`.

    x       [..., in], floating point; any number of leading dimensions, also none
    weight  [out, in], if it is `transposed` [in, out]; a parameter of an `optimizer_class`
    bias    [out] or None; gets an ordinary gradient

    What is transposed is not for a compiler: its layer has to be a break in the graph.

    Without grad, or for a weight that does not require it, this is `torch.nn.functional.linear`. Raises RuntimeError,
    TypeError or ValueError, naming the tensor, where shapes, dtypes or devices do not fit or no optimizer has it.
    """
    if is_compiling():
        return traced_linear(x, weight, bias, optimizer_class.__name__)
    if not weight.requires_grad or not is_grad_enabled():
        check_operands(x, weight.t() if transposed else weight, bias)
        if weight.requires_grad:
            _note_forward_without_grad(weight)
        return F.linear(x, weight.t(), bias) if transposed else coded_linear.linear(x, weight, bias)
    binding = lookup(weight)
    if binding is None or binding.dtype is CODES:
        _check_operands(x, weight, bias, transposed)
    return bound_linear(x, weight, bias, bound(weight, binding, optimizer_class.__name__), transposed)


def bound_linear(x: Tensor, weight: Tensor, bias: Tensor | None, binding: Binding, transposed: bool = False) -> Tensor:
    """`fused_linear` in eager mode, with grad, of a weight that requires it and whose binding is known."""
    refuse_data_parallel(binding)
    if binding.updated:
        refuse_recomputation(binding)
    device = binding.device_type
    dtype = torch.get_autocast_dtype(device) if is_autocast_enabled(device) else None
    gate = binding.gate() if binding.gate is not None else None
    try:
        shape = None if bias is None else bias.shape
        broadcast = shape is not None and shape != (weight.shape[1:] if transposed else weight.shape[:1])
        if dtype is not None or x.is_meta or x.layout is not _DENSE or broadcast:
            # What a cast, a tensor without data, a sparse one or a broadcast would hide; all else the product itself
            # notices.
            _check_operands(x, weight, bias, transposed)
        transformed = _are_functorch_transforms_active()
        if _current_graph_task_id() != -1 and not transformed and _is_unobserved(x, weight, bias):
            return _recomputed(x, weight, bias, gate or new_gate(binding, weight), dtype, transposed)
        apply: Callable[..., Tensor] = FusedLinear.apply if transformed else _apply
        return apply(x, weight, bias, gate or new_gate(binding, weight), dtype, transposed)
    except (AttributeError, RuntimeError, TypeError):
        _check_operands(x, weight, bias, transposed)
        raise


class FusedLinear(Function):
    """`F.linear`, whose backward hands `(x, dy)` to the weight's gate and computes no weight gradient.

    `x` is saved as it is, or in 8 bits (`activations`); the output is computed from all of it either way. Under
    autocast the gradients have its type, and the engine casts them to those of `x` and of the bias.

    The gradient of a `transposed` weight is `x^T dy`, what a weight [out, in] gets with its operands exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate, dtype: Any, transposed: bool
    ) -> Tensor:
        scales, cast = _scales(gate, weight), x if dtype is None else x.to(dtype)
        y = _product(cast, weight, scales, bias, dtype, transposed)
        _keep(ctx, cast, x, weight, scales, gate, transposed)
        # With a bias, and other than two dimensions, torch's result is a view, which no activation may change in place
        # where a custom function returns it.
        return y.detach() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        gate: Gate = ctx.gate
        if is_grad_enabled():
            raise RuntimeError(
                f"{gate.binding.describe()}: create_graph=True is not possible through a linear layer that is updated "
                "inside backward; use torch.nn.functional.linear for the layers that need a second derivative"
            )
        task = _current_graph_task_id()
        delivery = gate.deliveries.get(task) or begin_delivery(gate, task, ctx)
        if delivery is None and gate.consumed:
            raise RuntimeError(
                f"{gate.binding.describe()} was already updated by a backward through this graph, and its old value is "
                "gone: run the forward again, or ask for these gradients first"
            )
        dx = dw = db = None
        if dy is not None:
            *kept, weight, scales = ctx.saved_tensors
            rows, x = as_rows(dy), as_rows(kept[0])
            needed = ctx.needs_input_grad
            transposed = ctx.transposed
            if needed[0]:
                dx = _times_weight(rows, weight, scales, transposed)
                if x is not kept[0]:
                    dx = dx.view(kept[0].shape)
            if needed[2]:
                db = rows.sum(0)
            if delivery is not None:
                if len(kept) == 1:
                    delivery.operands.append((rows, x) if transposed else (x, rows))
                else:
                    saved = activations.operand(x, as_rows(kept[1]), ctx.dtype, rows.dtype)
                    delivery.operands.append((rows, decoded(saved, rows.dtype)) if transposed else (saved, rows))
        if delivery is not None:
            dw = gate.finish_use(task, delivery)
        return dx, dw, db, None, None, None


class RecomputedLinear(FusedLinear):
    """`FusedLinear` inside a backward, as a checkpoint recomputes it; its output still has to be computed.

    A checkpoint stops as soon as what its segment has saved is there again. The operands are saved before the product,
    as torch's own layers do it, so that the last product of a segment is not made for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate, dtype: Any, transposed: bool
    ) -> Tensor:
        cast = x if dtype is None else x.to(dtype)
        _keep(ctx, cast, x, weight, _scales(gate, weight), gate, transposed)
        shape = (*x.shape[:-1], weight.shape[1 if transposed else 0])
        return torch.empty_strided(shape, (0,) * len(shape), dtype=cast.dtype, device=x.device)


# Without what `Function.apply` does for the transforms of functorch.
_apply: Callable[..., Tensor] = super(Function, FusedLinear).apply
_apply_recomputed: Callable[..., Tensor] = super(Function, RecomputedLinear).apply


def _recomputed(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate, dtype: Any, transposed: bool) -> Tensor:
    y = _apply_recomputed(x, weight, bias, gate, dtype, transposed)
    with torch.no_grad():
        y.data = _product(x, weight, _scales(gate, weight), bias, dtype, transposed)
    return y


def _is_unobserved(*operands: Tensor | None) -> bool:
    """Whether nobody sees single operations: neither a mode, as of selective checkpoints, which has to see those of the
    first time again, nor a subclass of tensors."""
    return not _len_torch_dispatch_stack() and _ORDINARY.issuperset(map(type, operands))


def _scales(gate: Gate, weight: Tensor) -> Tensor | None:
    """Those of a weight in codes."""
    return coded.of(weight).scales if gate.binding.dtype is CODES else None


def _product(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: Any, transposed: bool
) -> Tensor:
    """`F.linear` in `dtype`, that of autocast; None: in the type of `x`."""
    if dtype is None:
        factor = weight if scales is None else coded.decode(weight, scales, x.dtype)
        return F.linear(x, factor.t() if transposed else factor, bias)
    factor = coded.widened(weight, scales, dtype)
    with without_autocast(x.device.type):
        return F.linear(x.to(dtype), factor.t() if transposed else factor, None if bias is None else bias.to(dtype))


def _keep(
    ctx: Any, x: Tensor, source: Tensor, weight: Tensor, scales: Tensor | None, gate: Gate, transposed: bool
) -> None:
    """Save what backward needs, and register the use at the gate. x: as it is multiplied; source: as it came."""
    ctx.set_materialize_grads(False)
    if gate.saves_fp8 and x.numel():
        ctx.dtype = x.dtype
        ctx.save_for_backward(*activations.encoded_once(x, source), weight, scales)
    else:
        ctx.save_for_backward(x, weight, scales)
    ctx.gate = gate
    ctx.transposed = transposed
    ctx.version = weight._version
    ctx.born = born = _current_graph_task_id()
    if born != -1:
        segments = gate.binding.segments
        ctx.root = None if segments is None else segments.root_of_running_backward()
    gate.register(ctx)


def _times_weight(dy: Tensor, weight: Tensor, scales: Tensor | None, transposed: bool) -> Tensor:
    """`dx` [tokens, in] from `dy` [tokens, out], in its type. scales: of a weight in codes."""
    factor = weight if weight.dtype is dy.dtype else coded.widened(weight, scales, dy.dtype)
    if transposed:
        factor = factor.t()
    dx = torch.mm(dy, factor)
    if dx.dtype is not dy.dtype:  # backward runs under autocast, in another type than forward did
        with without_autocast(dy.device.type):
            dx = torch.mm(dy, factor)
    return dx


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> None:
    if isinstance(x, Tensor) and x.layout is not _DENSE:
        raise TypeError(
            f"x is {x.layout}: a fused layer takes dense tensors. Make it one (x.to_dense(), or padded), or use "
            "torch.nn.functional.linear for this weight"
        )
    check_operands(x, weight.t() if transposed else weight, bias)
    if x.dtype not in DTYPES:
        raise TypeError(f"x of shape {list(x.shape)}: expected float32, bfloat16 or float16, got {x.dtype}")


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
