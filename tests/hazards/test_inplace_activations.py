"""Hazard: a custom function returned a view, which activations in place may not change (nn.ReLU(inplace=True))."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge_dsl
from forge_dsl.optim import SGD

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": F.relu_,
    "add_": lambda y: y.add_(1.0),
    "an index": lambda y: y.__setitem__((..., 0), 0.5) or y,
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 0.25),
    "a view": lambda y: y.view(-1).mul_(2.0).view(y.shape),
    "squeeze_": lambda y: y.unsqueeze_(0).squeeze_(0),
    "twice": lambda y: F.relu_(y.mul_(0.5)),
}


class Changed(nn.Module):
    """Two layers, and a change in place of what the first one gives."""

    def __init__(self, change: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(6, 8, bias=bias), nn.Linear(8, 4, bias=bias), change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.change(self.first(x)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6), (2, 1, 5, 6)], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_outputs_may_be_changed_in_place(
    change: Callable[[Tensor], Tensor], shape: tuple[int, ...], bias: bool, autocast: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model, x = Changed(change, bias), torch.randn(shape)
    plain = copy.deepcopy(model)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), 0.1), x, autocast)
    got = trained(model, forge_dsl.fuse(model, SGD, lr=0.1), x, autocast)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-6)


def test_saved_and_recomputed_layers_too() -> None:
    torch.manual_seed(0)
    model, x = Changed(F.relu_, True), torch.randn(2, 5, 6, requires_grad=True)
    plain = copy.deepcopy(model)
    forge_dsl.fuse(model, SGD, lr=0.1)
    with torch.autograd.graph.save_on_cpu():
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(ours, theirs)
