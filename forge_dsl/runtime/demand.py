"""What a running backward wants of a weight's gradient, as the autograd engine tells it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _will_engine_execute_node

# To add it to `.grad`, in whose place the weight is updated, or to return it, as `torch.autograd.grad(loss, weight)`.
Demand = Literal["nothing", "update", "result"]


def accumulator(weight: Tensor) -> Any:
    """The weight's own node, which adds what it is given to `.grad`."""
    with torch.enable_grad():  # the node is found by way of a view
        return torch.autograd.graph.get_gradient_edge(weight).node


def demand_of(accumulate: Any) -> Demand:
    """What the running backward wants of the gradient that the node `accumulate` would get."""
    try:
        return "update" if _will_engine_execute_node(accumulate) else "nothing"
    except RuntimeError:  # raised for a leaf whose gradient is captured
        return "result"
