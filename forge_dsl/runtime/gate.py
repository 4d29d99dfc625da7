"""The gate of a weight: what its linear uses share, and where the weight steps, once per backward, if it should.

Every use of a weight is one node of the graph, with an edge to the weight itself:

    weight's AccumulateGrad <-- FusedLinear, FusedLinear, ...

The autograd engine does the bookkeeping. It tells whether this backward wants the weight's gradient (not under
`torch.autograd.grad(loss, x)` or `backward(inputs=[x])`), and which uses are part of this backward. Each of them hands
its `(x, dy)` to the gate; the last one has the gate make one update of their sum. The edge carries no gradient.

Nothing may change before everything is known to be right: see `readiness`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _will_engine_execute_node

from forge_dsl.formats.operand import Operand, concatenated
from forge_dsl.integrations.loops import check_running_loop
from forge_dsl.runtime.banded import weight_gradient
from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.demand import Demand, demand_of
from forge_dsl.runtime.scaled import decoded
from forge_dsl.runtime.update import update_inside_backward

# Every gate that some graph still holds. Adding, discarding and copying are atomic, so that a gate may die in between.
_gates: set[weakref.ref[Gate]] = set()
# The weight's place among the inputs of a use.
WEIGHT = 1


class Delivery:
    """What one backward brings to a gate: operands of the uses that have run, and how many uses are still to run."""

    __slots__ = ("demand", "missing", "operands")

    def __init__(self, missing: int, demand: Demand) -> None:
        self.missing = missing
        self.demand = demand
        self.operands: list[tuple[Operand, Tensor]] = []


class Gate:
    """The uses of a weight between two of its updates. Only they hold it, so it disappears with their graphs.

    weight      the parameter
    uses        weak references to the nodes that read the weight
    accumulate  the weight's own node, to which their edges lead
    deliveries  by backward
    consumed    whether the weight has been updated through this gate
    saves_fp8   whether the inputs of its layers are saved in 8 bits
    """

    __slots__ = (
        "__weakref__",
        "_prune_at",
        "accumulate",
        "binding",
        "consumed",
        "deliveries",
        "saves_fp8",
        "uses",
        "weight",
    )

    def __init__(self, binding: Binding, weight: Tensor) -> None:
        self.binding = binding
        self.weight = weight
        self.uses: list[weakref.ref[Any]] = []
        self.accumulate: Any = None
        self.deliveries: dict[int, Delivery] = {}
        self.consumed = False
        self.saves_fp8 = binding.saves_fp8
        self._prune_at = 64

    def register(self, use: Any) -> None:
        """Record a node that reads the weight, without keeping it alive."""
        uses, accumulate = self.uses, use.next_functions[WEIGHT][0]
        if self.accumulate is None:
            self.accumulate = accumulate
        elif self.accumulate is not accumulate:
            # torch gives a weight another node when it is cast or moved: no backward would see all of its uses.
            raise RuntimeError(
                f"{self.binding.describe()} was cast or moved while a graph that uses it is alive: run backward "
                "through that graph, or drop it, before"
            )
        if len(uses) >= self._prune_at:
            uses = self.uses = [reference for reference in uses if reference() is not None]
            self._prune_at = 2 * len(uses) + 64
        uses.append(weakref.ref(use))

    def demand(self) -> Demand:
        """What the running backward wants of the weight's gradient."""
        if self.accumulate is None:  # the forward of its first use has raised
            return "nothing"
        found = demand_of(self.accumulate)
        # Where it was frozen after the forward, torch accumulates nothing either.
        return found if found != "update" or self.weight.requires_grad else "nothing"

    def count(self, running: Any) -> int:
        """How many uses are part of the running backward; `running` as in `runs`."""
        nodes = [reference() for reference in self.uses]
        return sum(runs(node, running) for node in nodes if node is not None)

    def expect(self, task: int, uses: int, demand: Demand) -> Delivery:
        """Begin the delivery of backward number `task`, in which so many uses run."""
        delivery = self.deliveries[task] = Delivery(uses, demand)
        return delivery

    def finish_use(self, task: int, delivery: Delivery) -> Tensor | None:
        """After a use has run in backward number `task`: update the weight if no other use will run.

        Returns the gradient if that is what the backward asks for.
        """
        delivery.missing -= 1
        if delivery.missing:
            return None
        del self.deliveries[task]
        operands = delivery.operands
        if not operands:
            return None
        x, dy = gather(operands)
        binding, weight = self.binding, self.weight
        if delivery.demand == "result":
            refuse_captured(binding)
            return weight_gradient(x, dy).to(binding.dtype)
        optimizer = binding.check_owner()
        self.consumed = True
        if binding.segments is not None:
            binding.segments.clear()
        update_inside_backward(optimizer, binding, weight, x, dy)
        return None


def refuse_captured(binding: Binding) -> None:
    """Raise RuntimeError where torch would make codes without scales of a gradient that was asked for."""
    if binding.dtype == CODES:
        raise RuntimeError(
            f"{binding.describe()} is kept in codes, and torch gives a gradient the type of its tensor, in which it "
            "has no meaning: torch.autograd.grad cannot return it. forge_dsl.unfuse(model) makes ordinary weights"
        )


def runs(use: Any, running: Any) -> bool:
    """Whether a use is part of the running backward, in which `running` is a node that runs now.

    The engine does not count the node that a backward starts from among those it will run; that is the one that asks.
    """
    return use is running or bool(_will_engine_execute_node(use))


def gather(operands: Sequence[tuple[Operand, Tensor]]) -> tuple[Operand, Tensor]:
    """All uses as one: their tokens, one after the other. Inputs stay in 8 bits where all of them are."""
    if len(operands) == 1:
        return operands[0]
    x = concatenated([x for x, _ in operands])
    if x is None:
        x = torch.cat([decoded(x, dy.dtype) for x, dy in operands])
    return x, torch.cat([dy for _, dy in operands])


def new_gate(binding: Binding, weight: Tensor) -> Gate:
    """The weight's gate from its first use since the last update on; see `Binding.gate`."""
    if not binding.inspected:
        check_running_loop()
        if binding.together is not None:
            raise RuntimeError(
                f"{binding.describe()} and {binding.together} are slices of one tensor, whose changes torch counts "
                "together: it would refuse the backward of one once the other is updated inside it. Make each a "
                "tensor of its own (`Parameter(part.clone())`), or use torch.nn.functional.linear for them"
            )
    gate = Gate(binding, weight)
    binding.gate = reference = weakref.ref(gate, _gates.discard)
    _gates.add(reference)
    return gate


def live_gates() -> list[Gate]:
    """Every gate that some graph still holds."""
    return [gate for reference in _gates.copy() if (gate := reference()) is not None]
