"""`optimizer.update_linear`: the update of a weight whose layer is the caller's own autograd function.

What a fused layer's gate does for its weight, from `x` and `dy` that somebody else brings: the same checks, before the
weight changes, and the same update. The gate also knows when a weight's last use has delivered; here the caller does,
and hands over all of a step's tokens at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.formats.operand import DTYPES, Operand, Scaled
from forge_dsl.integrations.loops import check_accumulation, check_running_loop
from forge_dsl.runtime import readiness, tickets
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.demand import accumulator, demand_of
from forge_dsl.runtime.operands import as_rows, without_autocast
from forge_dsl.runtime.segments import is_released
from forge_dsl.runtime.update import update_inside_backward

if TYPE_CHECKING:
    from forge_dsl.runtime.optimizer import FusedOptimizer


def update_linear(optimizer: FusedOptimizer, weight: Tensor, x: Operand, dy: Operand) -> bool:
    """See `FusedOptimizer.update_linear`."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "update_linear() cannot be traced by torch.compile: call the layer from a function under "
            "torch.compiler.disable, or use the optimizer's fused linear function, which compiles"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "update_linear() changes a weight in place, and grad is enabled: call it in the backward of an autograd "
            "function, without create_graph=True, or under torch.no_grad()"
        )
    binding = _binding(optimizer, weight)
    x, dy = _matrix("x", x, binding, 1), _matrix("dy", dy, binding, 0)
    if x.shape[0] != dy.shape[0]:
        raise ValueError(
            f"{binding.describe()}: x has {x.shape[0]} tokens and dy {dy.shape[0]}, of shapes {list(x.shape)} and "
            f"{list(dy.shape)}"
        )
    if not binding.weight.requires_grad:
        return False
    task = torch._C._current_graph_task_id()
    if task != -1:
        running = torch._C._current_autograd_node()
        if not _is_wanted(binding, running):
            return False
        readiness.check_task(task, running)
    if not binding.table.has_begun:
        optimizer.check_groups()
    _check(binding)
    with without_autocast(binding.device_type):
        update_inside_backward(optimizer, binding, binding.weight, x, dy)
    return True


def _binding(optimizer: FusedOptimizer, weight: Tensor) -> Binding:
    """The parameter's binding, also where `weight` is an alias of it, as a checkpoint's recomputation saves."""
    found = None
    if isinstance(weight, Tensor):
        found = optimizer.binding_of(weight) if optimizer.has(weight) else tickets.find(weight)
    if found is None or found.optimizer is not optimizer or found.weight.stride() != weight.stride():
        shown = f"{list(weight.shape)}, {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"update_linear() was given a weight ({shown}) that this {type(optimizer).__name__} does not have: pass "
            "the parameter itself, and not a copy of it (cast, moved, or made by hooks on saved tensors)"
        )
    if len(found.shape) != 2:
        raise ValueError(f"{found.describe()}: update_linear() takes weights [out, in]")
    found.check_owner()
    return found


def _matrix(name: str, operand: Operand, binding: Binding, dim: int) -> Operand:
    """The operand as [tokens, features], once it fits dimension `dim` of the weight."""
    if not isinstance(operand, Tensor | Scaled):
        raise TypeError(f"{name}: expected a tensor or a forge_dsl.Scaled, got {type(operand).__name__}")
    if isinstance(operand, Tensor) and operand.dtype not in DTYPES:
        raise TypeError(
            f"{name} of shape {list(operand.shape)}: expected float32, bfloat16 or float16, got {operand.dtype}; codes "
            "in 8 bits come with their scales, as forge_dsl.Scaled(codes, scales)"
        )
    features = binding.shape[dim]
    if len(operand.shape) == 0 or operand.shape[-1] != features:
        raise ValueError(
            f"{name} of shape {list(operand.shape)} does not fit {binding.describe()}: expected [..., {features}]"
        )
    if operand.device != binding.device:
        raise ValueError(
            f"{name} is on {operand.device}, {binding.describe()} on {binding.device}: expected one device"
        )
    if isinstance(operand, Tensor):
        return as_rows(operand.detach())
    return operand


def _is_wanted(binding: Binding, running: Any) -> bool:
    """Whether the backward that node `running` is a part of accumulates the weight's gradient.

    Raises RuntimeError if it asks for it as a result, if the weight is not in its graph, or if the gradient has another
    part that comes later.
    """
    accumulate = accumulator(binding.weight)
    found = demand_of(accumulate)
    if found == "result":
        raise RuntimeError(
            f"{binding.describe()}: torch.autograd.grad asks for the gradient of a weight that is updated inside "
            "backward, and it is never stored. Call loss.backward(), or use torch.nn.functional.linear"
        )
    direct = any(node is accumulate for node, _ in running.next_functions)
    if found == "update":
        if direct and not binding.inspected:
            check_running_loop()
            _check_routes(binding, running, accumulate)
            binding.inspected = True
        return True
    if direct:
        # backward(inputs=...) or torch.autograd.grad of something else: they leave this weight alone.
        return False
    raise RuntimeError(
        f"{binding.describe()} is not in the graph of this backward, or not in the part of it that was asked for, and "
        "update_linear() cannot tell which: give the parameter itself to your autograd function as an input, and "
        "return None for its gradient"
    )


def _check_routes(binding: Binding, running: Any, accumulate: Any) -> None:
    """Raise if a node that runs after `running` also has a part of the weight's gradient."""
    waiting, seen = [running], {running}
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            waiting.append(following)
            if any(node is accumulate for node, _ in following.next_functions):
                raise RuntimeError(
                    f"{binding.describe()} reaches the loss through {following.name()} as well as through the function "
                    "that calls update_linear(), so a part of its gradient would be missing from the update. Use it "
                    "once in a step, or concatenate the tokens of its uses"
                )


def _check(binding: Binding) -> None:
    """Raise if the update would be wrong, whoever delivers it; nothing has changed yet."""
    check_accumulation(binding.describe())
    optimizer = readiness.check_weight(binding, binding.weight)
    binding.table.begin(optimizer.state)
    gate = binding.gate() if binding.gate is not None else None
    uses = [reference() for reference in gate.uses] if gate is not None else []
    delivered = gate is not None and any(delivery.operands for delivery in gate.deliveries.values())
    segments = binding.segments is not None and bool(binding.segments.outstanding())
    if (
        segments
        or delivered
        or any(use is not None and not is_released(use) for use in uses)
        or any(use.waits() for use in binding.uses)
    ):
        raise readiness.UnfinishedUse(
            f"{binding.describe()} is also used by a fused layer that has not updated it yet: update_linear() would "
            "change the weight that its graph computes with. Use one kind of layer for a weight, and evaluate under "
            "torch.no_grad()"
        )
