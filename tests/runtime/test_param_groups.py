"""A weight reads its hyper-parameters from the group it was added with: other groups are refused, not ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import optim


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    first, second = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": 1.0}, {"params": second, "lr": 0.0}]
    return model, forge_dsl.fuse(model, optim.SGD, params=groups)


def replaced(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}


def all_replaced(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def moved(optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


def divided(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop(0)], "lr": 0.0})


def taken_out(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop(0)


def cleared(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.clear()


def exchanged(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.reverse()


CHANGES = [replaced, all_replaced, moved, divided, taken_out, cleared, exchanged]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("begun", [False, True])
def test_groups_that_are_not_those_of_the_weights_are_refused_before_anything_changes(
    change: Callable[[torch.optim.Optimizer], None], begun: bool
) -> None:
    model, optimizer = build()
    x = torch.randn(4, 16)
    if begun:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    change(optimizer)
    loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="by hand"):
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(RuntimeError, match="by hand"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="by hand"):
        optimizer.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_values_set_in_place_are_honoured_and_foreign_parameters_are_named() -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match=r"param_groups\[1\].*use add_param_group"):
        optimizer.step()
