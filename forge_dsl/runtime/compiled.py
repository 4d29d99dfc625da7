"""Fused layers under `torch.compile`: forward and backward of a layer are two registered operators.

AOTAutograd traces backward too, and a gate cannot be traced. So a compiled graph holds `forge_dsl::linear` and
`forge_dsl::linear_backward`. The second declares that it changes the weight, and updates it when the last use of the
weight has delivered; the compiler therefore keeps every other read of the old weight before it. States, counters and
rates are reached through the weight's binding while the graph runs: nothing of them is part of the graph, and no
change of them compiles anything.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _increment_version
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakIdKeyDictionary

from forge_dsl.integrations.loops import check_running_loop
from forge_dsl.runtime import tickets
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.devices import is_capturing
from forge_dsl.runtime.gate import gather
from forge_dsl.runtime.operands import (
    as_rows,
    bound,
    check_operands,
    refuse_data_parallel,
    refuse_recomputation,
    without_autocast,
)
from forge_dsl.runtime.readiness import check_task
from forge_dsl.runtime.update import update_inside_backward

# The oldest release whose backward graphs may change a parameter that requires a gradient: 2.11 raises while tracing.
OLDEST = TorchVersion("2.12")
SUPPORTED = TorchVersion(torch.__version__) >= OLDEST

_lock = threading.Lock()
# How often a graph that is being traced uses a weight, less the uses whose backward has been traced.
_uses: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
# (backward, weight): what was delivered by uses that are not the last one.
_kept: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}


def traced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, optimizer_class: str) -> Tensor:
    """`fused_linear` as a compiler traces it; which optimizer has the weight is asked when the graph runs."""
    if weight.dtype == CODES:
        return _coded(x, weight, bias)  # type: ignore[no-any-return]
    check_operands(x, weight, bias)
    if not weight.requires_grad or not torch.is_grad_enabled() or weight.numel() == 0:
        return F.linear(x, weight, bias)
    if not SUPPORTED:
        return _break_the_graph(x, weight, bias)  # type: ignore[no-any-return]
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = torch.ops.forge_dsl.linear(x, weight, bias, optimizer_class)[0]
    return y


def _eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from forge_dsl.runtime.linear import fused_linear
    from forge_dsl.runtime.optimizer import FusedOptimizer

    return fused_linear(x, weight, bias, FusedOptimizer)


def _eager_linear_of_an_old_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    warnings.warn(
        f"torch {torch.__version__} cannot compile layers that are updated inside backward (torch {OLDEST} can): they "
        "run eagerly, each as a break in the graph, with the same results",
        stacklevel=2,
    )
    return _eager_linear(x, weight, bias)


# Eager layers, each as a break in the graph. What decodes a weight in codes is no operator of a graph.
_break_the_graph = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _eager_linear_of_an_old_torch, reason=f"fused layers compile with torch {OLDEST} or newer"
)
_coded = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _eager_linear, reason="layers whose weights are kept in fp8 run eagerly"
)

# A CUDA graph of a part of a step would run none of the Python below when it is replayed: Inductor may not put these
# operators into one.
torch.library.define(
    "forge_dsl::linear",
    "(Tensor x, Tensor weight, Tensor? bias, str optimizer_class) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
torch.library.define(
    "forge_dsl::linear_backward",
    "(Tensor dy, Tensor x, Tensor(a!) weight, Tensor ticket, bool needs_x, bool needs_bias) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@torch.library.impl("forge_dsl::linear", "CompositeExplicitAutograd")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, optimizer_class: str) -> tuple[Tensor, Tensor]:
    if is_capturing(x.device):
        raise RuntimeError(
            "a fused layer of a compiled graph is being captured in a CUDA graph, whose replays would not count steps: "
            "leave out mode='reduce-overhead', or capture a whole step of the model that is not compiled"
        )
    binding = bound(weight, tickets.find(weight), optimizer_class)
    refuse_data_parallel(binding)
    refuse_recomputation(binding)
    if binding.saves_fp8:
        raise RuntimeError(
            f'{binding.describe()}: saved_activations="fp8" is not possible under torch.compile, whose graphs decide '
            "themselves what they save: leave the option out, or train the model without torch.compile"
        )
    if not binding.inspected:
        check_running_loop()
        binding.inspected = True
    with without_autocast(x.device.type):
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y, tickets.issue(binding)


def _linear_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, optimizer_class: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), torch.empty(1, dtype=torch.int64, device="cpu")


torch.library.register_fake("forge_dsl::linear", _linear_shapes)


@torch.library.impl("forge_dsl::linear_backward", "CompositeExplicitAutograd")
def _linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ticket: Tensor, needs_x: bool, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the bias, empty where they are not needed, and the weight's update.

    `weight` is the parameter's memory, or a copy: one that the graph writes back, or one that hooks on saved tensors
    have made. The parameter is updated in any case, and a copy gets the new value too.
    """
    use = tickets.redeem(ticket)
    binding = use.binding()
    if binding is None:
        raise RuntimeError("the optimizer of a compiled layer was deleted before its backward: keep it until then")
    task = torch._C._current_graph_task_id()
    if task == -1:
        raise RuntimeError("forge_dsl::linear_backward is a part of backward and cannot be called by itself")
    wanted = tickets.is_wanted(binding)
    if wanted:
        check_task(task, None)
    rows = as_rows(dy)
    dx = torch.mm(rows, weight.to(rows.dtype)).view(x.shape) if needs_x else x.new_empty(0)
    db = rows.sum(0) if needs_bias else rows.new_empty(0)
    if wanted:
        use.task = task
        _deliver(binding, task, as_rows(x), rows, weight)
    return dx, db


def _linear_backward_shapes(
    dy: Tensor, x: Tensor, weight: Tensor, ticket: Tensor, needs_x: bool, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape) if needs_x else x.new_empty(0)
    return dx, dy.new_empty(weight.shape[0] if needs_bias else 0)


torch.library.register_fake("forge_dsl::linear_backward", _linear_backward_shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _ = inputs
    _uses[weight] = _uses.get(weight, 0) + 1
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, None, Tensor | None, None]:
    if dy is None:
        return None, None, None, None
    x, weight, ticket = ctx.saved_tensors
    needs_x, _, needs_bias, _ = ctx.needs_input_grad
    dx, db = torch.ops.forge_dsl.linear_backward(dy, x, weight, ticket, needs_x, needs_bias)
    _uses[weight] = _uses.get(weight, 0) - 1
    if _uses[weight] == 0:
        # The update, as a trace sees it: what has saved the weight and reads it from here on is refused, as in eager
        # mode. A trace may call a weight by another name in backward; then it is not noticed.
        _increment_version((weight,))
    return dx if needs_x else None, None, db.to(ctx.bias_dtype) if needs_bias else None, None


torch.library.register_autograd("forge_dsl::linear", _backward, setup_context=_save)


def _deliver(binding: Binding, task: int, x: Tensor, dy: Tensor, passed: Tensor) -> None:
    """Update the weight if no other use of it waits, else keep the operands for the use that comes last."""
    key = (task, id(binding))
    if tickets.waits_for_more(binding, task):
        with _lock:
            first = key not in _kept
            # The graph may use their memory again as soon as its operator has returned.
            _kept.setdefault(key, []).append((x.clone(), dy.clone()))
        if first:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _check_delivered(key, binding))
        return
    with _lock:
        operands = [*_kept.pop(key, ()), (x, dy)]
    all_x, all_dy = gather(operands)
    optimizer = binding.check_owner()
    if binding.updated:
        raise RuntimeError(
            f"{binding.describe()} was updated before all its uses in this backward had delivered, since hooks have "
            "moved what a compiled graph saved. Reload it, and compile the model without such hooks"
        )
    weight = binding.weight
    update_inside_backward(optimizer, binding, weight, all_x, all_dy)
    tickets.settle(binding)
    if passed.data_ptr() != weight.data_ptr():
        passed.copy_(weight.detach())
        # The graph may write its copy back, which is no change.
        binding.version = None


def _check_delivered(key: tuple[int, int], binding: Binding) -> None:
    """At the end of a backward: raise if a weight still waits for a use that was not part of it."""
    with _lock:
        left = _kept.pop(key, None)
    if left is not None:
        raise RuntimeError(
            f"{binding.describe()} was not updated by this backward, and no weight that shares its fate was: a "
            "compiled graph that uses it too is still alive (or, with checkpoints inside, was thrown away) and was not "
            "part of this backward. Drop or detach such outputs before backward, and run evaluations under "
            "torch.no_grad(). To go on without these weights' update call step(), which still applies ordinary "
            "gradients, and zero_grad()"
        )
