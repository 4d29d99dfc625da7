"""The gate between a weight and its linear uses: where a weight steps, once per backward, and only if it should.

Forward gives every use of a weight the same 0-dim token, the output of one `Gate` node whose input is the weight:

    weight --AccumulateGrad-- Gate --token--> FusedLinear, FusedLinear, ...

The autograd engine then does the bookkeeping. It runs the gate only when this backward wants the weight's gradient (not
under `torch.autograd.grad(loss, x)` or `backward(inputs=[x])`) and only after every use in this backward has run. Each
use hands its `(x, dy)` to the gate; the gate makes one update of their sum, and returns no gradient.

Nothing may change before everything is known to be right: see `readiness`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakIdRef

from forge_dsl.formats.operand import Operand, concatenated
from forge_dsl.integrations.loops import check_running_loop
from forge_dsl.runtime.banded import weight_gradient
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.scaled import decoded
from forge_dsl.runtime.update import apply_linear

_lock = threading.Lock()
_gates: weakref.WeakSet[Any] = weakref.WeakSet()


class Gate(Function):
    """Identity of a weight's uses in one graph: `weight -> token`, a 0-dim tensor whose value means nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, binding: Binding) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        ctx.uses = []
        ctx.prune_at = 64
        ctx.contributions = {}
        ctx.consumed = False
        return weight.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        contributions = ctx.contributions.pop(torch._C._current_graph_task_id(), [])
        if not contributions:
            return None, None
        x, dy = gather(contributions)
        binding: Binding = ctx.binding
        if is_captured(ctx):
            refuse_captured(binding)
            return weight_gradient(x, dy).to(binding.dtype), None
        optimizer = binding.check_owner()
        ctx.consumed = True
        binding.token = None
        binding.updated = True
        if binding.segments is not None:
            binding.segments.clear()
        apply_linear(optimizer, binding, x, dy)
        binding.weight.grad = binding.placeholder()
        return None, None


def refuse_captured(binding: Binding) -> None:
    """Raise RuntimeError where torch would make codes without scales of a gradient that was asked for."""
    if binding.dtype == CODES:
        raise RuntimeError(
            f"{binding.describe()} is kept in codes, and torch gives a gradient the type of its tensor, in which it "
            "has no meaning: torch.autograd.grad cannot return it. forge_dsl.unfuse(model) makes ordinary weights"
        )


def gather(contributions: Sequence[tuple[Operand, Tensor]]) -> tuple[Operand, Tensor]:
    """All uses as one: their tokens, one after the other. Inputs stay in 8 bits where all of them are."""
    if len(contributions) == 1:
        return contributions[0]
    x = concatenated([x for x, _ in contributions])
    if x is None:
        x = torch.cat([decoded(x, dy.dtype) for x, dy in contributions])
    return x, torch.cat([dy for _, dy in contributions])


def token_of(binding: Binding, weight: Tensor) -> Tensor:
    """The token of the weight's current gate, made on the first use since the last update.

    Only the uses hold it (through their contexts), so it disappears with the graphs that need it.
    """
    token: Tensor | None = binding.token() if binding.token is not None else None
    if token is None:
        if not binding.inspected:
            check_running_loop()
        token = Gate.apply(weight, binding)  # type: ignore[no-untyped-call]
        binding.token = WeakIdRef(token)
        with _lock:
            _gates.add(token.grad_fn)
    return token


def live_gates() -> list[Any]:
    """Every gate that some graph still holds."""
    with _lock:
        return list(_gates)


def register_use(gate: Any, use: Any) -> None:
    """Record a node that reads the weight, without keeping it alive."""
    if len(gate.uses) >= gate.prune_at:
        gate.uses = [reference for reference in gate.uses if reference() is not None]
        gate.prune_at = 2 * len(gate.uses) + 64
    gate.uses.append(weakref.ref(use))


def is_captured(gate: Any) -> bool:
    """Whether the running backward is `torch.autograd.grad` and asks for this weight's gradient as a result."""
    accumulate = gate.next_functions[0][0]
    try:
        return not torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # raised for a leaf whose gradient is captured
        return True
