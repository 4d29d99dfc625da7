"""Hazard: torch negates some tensors lazily (`is_neg()`), and a kernel that reads their memory finds the other sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge_dsl.testing
from forge_dsl import optim


def conjugate(x: Tensor) -> Tensor:
    """-x, as the imaginary part of a conjugate."""
    return torch.complex(torch.ones_like(x), x).conj().imag


def through_a_conjugate(y: Tensor) -> Tensor:
    """A loss whose gradient arrives with the sign still to be changed."""
    return (torch.complex(torch.ones_like(y), y).conj() * torch.full(y.shape, 1 + 2j)).real.sum()


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "x": lambda layer, x: layer(conjugate(x)).square().sum(),
    "dy": lambda layer, x: through_a_conjugate(layer(x)),
    "both": lambda layer, x: through_a_conjugate(layer(conjugate(x))),
}


def trained(loss: Callable[[nn.Module, Tensor], Tensor], make: Callable[[nn.Module], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    optimizer = make(layer)
    for _ in range(2):
        loss(layer, torch.randn(3, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize("schedule", ["fused", "banded"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_operands_of_a_fused_layer(loss: Callable[[nn.Module, Tensor], Tensor], schedule: str) -> None:
    if schedule == "fused" and not forge_dsl.testing.can_launch(optim.SGD.rule):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    ours = trained(loss, lambda layer: forge_dsl.fuse(layer, optim.SGD, lr=0.1, schedule=schedule))
    theirs = trained(loss, lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("schedule", ["fused", "banded"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (4, 4)], ids=str)
def test_ordinary_gradients(shape: tuple[int, ...], schedule: str) -> None:
    if schedule == "fused" and not forge_dsl.testing.can_launch(optim.SGD.rule):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    parameter = nn.Parameter(torch.full(shape, 0.5))
    optimizer = optim.SGD([parameter], lr=0.1, schedule=schedule)
    parameter.grad = torch._neg_view(torch.ones(shape))
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full(shape, 0.6))


def test_a_parameter_that_is_negated_itself_is_refused() -> None:
    parameter = nn.Parameter(conjugate(torch.ones(4, 4)))
    assert parameter.is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        optim.SGD([parameter], lr=0.1)
