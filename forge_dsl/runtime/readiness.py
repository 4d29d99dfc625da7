"""Before a backward changes anything: whether every update that it will make is right.

The first use that delivers in a backward asks; nothing has been updated yet, so an exception leaves all as it was.
What is looked for: a second backward before step(), a framework that accumulates, another graph that still reads a
weight, a gradient that comes by another route, reentrant checkpoint segments that would update a weight one by one.
"""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C import _will_engine_execute_node

from forge_dsl.integrations.loops import check_accumulation
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES, check_written
from forge_dsl.runtime.gate import WEIGHT, Delivery, Gate, live_gates
from forge_dsl.runtime.placeholder import GradientPlaceholder
from forge_dsl.runtime.segments import is_released
from forge_dsl.runtime.tickets import CompiledUse, is_wanted, waiting_uses

if TYPE_CHECKING:
    from forge_dsl.runtime.counters import StepTable
    from forge_dsl.runtime.optimizer import FusedOptimizer

_lock = threading.Lock()
_checked: set[int] = set()


class UnfinishedUse(RuntimeError):
    """A weight would be updated while another graph still needs its old value."""


def begin_delivery(gate: Gate, task: int, running: Any) -> Delivery | None:
    """What backward number `task` brings to a gate, once it is known to be right; None where it is not to bring any.

    running: the use that asks.
    """
    demand = gate.demand()
    if demand == "nothing":
        return None
    check_task(task, running)
    return gate.deliveries.get(task) or gate.expect(task, gate.count(running), demand)


def check_task(task: int, running: Any) -> None:
    """Raise unless every update that backward number `task` will make is right; nothing has changed yet.

    running: the eager use that asks, None where a compiled graph does. The engine does not count the node that a
    backward starts from among those it will run.
    """
    with _lock:
        if task in _checked:
            return
        gates = _ready_gates(running)
        if gates is None:
            # A graph that is only part of a reference cycle is not in anybody's hands.
            gc.collect()
            gates = _check_gates(running)
        for gate, uses in gates:
            gate.expect(task, uses, "update")
        if len(_checked) > 4096:
            _checked.clear()
        _checked.add(task)


def _ready_gates(running: Any) -> list[tuple[Gate, int]] | None:
    """None where an unfinished use is in the way. The exception must be gone before its frames let go of the node."""
    try:
        return _check_gates(running)
    except UnfinishedUse:
        return None


def _check_gates(running: Any) -> list[tuple[Gate, int]]:
    """The gates whose weights this backward will update, and how many uses of each are part of it."""
    gates: list[tuple[Gate, int]] = []
    tables: dict[StepTable, FusedOptimizer] = {}
    for gate in live_gates():
        if gate.demand() == "update" and (uses := _check_uses(gate, running)):
            gates.append((gate, uses))
            binding = gate.binding
            tables[binding.table] = check_weight(binding, gate.weight)
    compiled = [(use, found) for use in waiting_uses() if (found := use.binding()) is not None and is_wanted(found)]
    if compiled:
        _check_compiled(compiled, {id(gate.binding) for gate, _ in gates})
        tables |= {found.table: found.check_owner() for _, found in compiled}
    optimizers = set(tables.values())
    for optimizer in optimizers:
        optimizer.check_groups()
    if tables:
        check_accumulation(gates[0][0].binding.describe() if gates else compiled[0][1].describe())
    for table, optimizer in tables.items():
        table.begin(optimizer.state)
    if running is not None:
        _check_routes([gate for gate, _ in gates if not gate.binding.inspected], running)
    for optimizer in optimizers:
        for binding in optimizer.bindings():
            if binding.segments is not None:
                _check_segments(binding)
    return gates


def _check_uses(gate: Gate, running: Any) -> int:
    """How many uses of the weight are part of this backward; raises if one of them, or another one, is in the way."""
    version, count, waits = gate.weight._version, 0, False
    for reference in gate.uses:
        use = reference()
        if use is None:
            continue
        if use is running or _will_engine_execute_node(use):
            count += 1
            if use.version != version and not gate.consumed:
                raise RuntimeError(_modified(gate.binding))
        # Uses born inside a backward are a checkpoint's recomputation and die with it.
        elif use.born == -1 and not is_released(use):
            waits = True
    if count and gate.consumed:
        raise RuntimeError(
            f"{gate.binding.describe()}: this graph was already run backward and the weight has been updated, so its "
            "old value is gone. Run the forward again, or sum the losses and call backward once"
        )
    if count and waits:
        raise UnfinishedUse(
            f"{gate.binding.describe()} is also used by a graph that is still alive and is not part of this backward; "
            "updating it now would change what that graph computes. Sum the losses and call backward once, or drop "
            "(or detach) the other output before backward; run evaluations under torch.no_grad(). In an interactive "
            "session the traceback of the last error holds the graph of its backward: `import sys; sys.last_exc = "
            "sys.last_value = sys.last_traceback = None` lets go of it"
        )
    return count


def _check_compiled(uses: list[tuple[CompiledUse, Binding]], gated: set[int]) -> None:
    """Raise if the update of a weight that compiled graphs use would be wrong."""
    for binding in {id(binding): binding for _, binding in uses}.values():
        check_weight(binding, binding.weight)
        if id(binding) in gated:
            raise RuntimeError(
                f"{binding.describe()} is used by a compiled graph and by an eager layer in one backward, and neither "
                "sees the other: compile every use of this weight, or none"
            )
    for use, binding in uses:
        if use.version != binding.weight._version:
            raise RuntimeError(_modified(binding))


def check_weight(binding: Binding, weight: Tensor) -> FusedOptimizer:
    """Raise if no update of the weight would be right now; returns its optimizer."""
    optimizer = binding.check_owner()
    if binding.updated:
        raise RuntimeError(
            f"{binding.describe()} was already updated by an earlier backward since the last step(). Gradients cannot "
            "be accumulated when the update happens inside backward: sum the losses and call backward once (or use "
            "one larger batch), or call optimizer.step() after each backward"
        )
    grad = weight.grad
    if grad is not None:
        _refuse_gradient(binding, grad)
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"{binding.describe()} has a hook on its gradient, which is never stored. Remove the hook, or use "
            "torch.nn.functional.linear for this weight"
        )
    binding.check_unmoved(weight)
    if binding.dtype is CODES:
        check_written(weight)
    return optimizer


def _refuse_gradient(binding: Binding, grad: Tensor) -> None:
    """Raise for what stands where the update will show."""
    if not isinstance(grad, GradientPlaceholder):
        raise RuntimeError(
            f"{binding.describe()} already has an ordinary gradient (from torch.nn.functional.linear, or an assignment "
            "to .grad) and this backward would also update it inside backward. Use one route in a step: call "
            "optimizer.step() or zero_grad() first, or use the fused linear function for every use"
        )
    raise RuntimeError(
        f"{binding.describe()} still shows the update of an earlier step: zero_grad() was not called since. "
        "Gradients of other parameters would be added to those of that step, and this weight's would not. Call "
        "optimizer.zero_grad() after step(), before the next backward"
    )


def _modified(binding: Binding) -> str:
    return (
        f"{binding.describe()} was modified in place between its forward and its backward, so the gradient would be "
        "that of another weight. Modify weights before the forward, or after step()"
    )


def _check_routes(gates: list[Gate], running: Any) -> None:
    """Raise if a weight's gradient reaches it past its gate too, as that of an embedding tied to the head does.

    The gradient is the placeholder's to refuse, but only after the update. So the graph is walked once in the life of
    each weight, which finds what is wrong with a model before its first step; walking costs too much for every step.
    """
    if not gates:
        return
    accumulators = {gate.accumulate: gate for gate in gates}
    waiting, seen = [running], {running}
    while waiting:
        node = waiting.pop()
        for place, (following, _) in enumerate(node.next_functions):
            gate = accumulators.get(following)
            if gate is not None and not (place == WEIGHT and getattr(node, "gate", None) is gate):
                raise RuntimeError(
                    f"{gate.binding.describe()} reaches the loss through {node.name()} as well as through its fused "
                    "linear function, so a part of its gradient would be missing from the update inside backward. Use "
                    "torch.nn.functional.linear for this weight (a head tied to its embedding): step() then applies "
                    "the sum"
                )
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    for gate in gates:
        gate.binding.inspected = True


def _check_segments(binding: Binding) -> None:
    """Raise if a weight is used in several reentrant segments, or in one and outside: each would update it."""
    assert binding.segments is not None
    groups: set[int] = binding.segments.outstanding()
    if not groups:
        return
    gate = binding.gate() if binding.gate is not None else None
    for reference in gate.uses if gate is not None else ():
        use = reference()
        if use is not None and not is_released(use):
            if use.born == -1:
                groups.add(0)
            elif use.root is not None:
                groups.add(id(use.root))
    if len(groups) > 1:
        raise UnfinishedUse(
            f"{binding.describe()} is used in several reentrant checkpoint segments, or in one and outside of it: each "
            "segment runs a backward of its own, so the weight would change before the others have read it. "
            "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
