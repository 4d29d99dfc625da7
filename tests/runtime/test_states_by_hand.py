"""What users do by hand to `optimizer.state` and `param_groups` raises what is wrong, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl.optim import AdamW


def trained() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    optimizer = forge_dsl.fuse(model, AdamW, lr=1e-3)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 64)).square().sum().backward()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: torch.zeros(3), r"'exp_avg' is \[3\] on cpu; expected a strided tensor of shape \[128, 64\]"),
    "kind": (lambda: 5, "'exp_avg' is int; expected"),
    "sparse": (lambda: torch.zeros(128, 64).to_sparse(), "expected a strided tensor"),
    "no data": (lambda: torch.zeros(128, 64, device="meta"), "on meta; expected"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_cannot_be_one_is_named(what: str) -> None:
    model, optimizer = trained()
    make, message = WRONG[what]
    optimizer.state[model.weight]["exp_avg"] = make()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        backward(model)
    assert torch.equal(model.weight, before)


def test_something_else_in_place_of_the_states_is_named() -> None:
    model, optimizer = trained()
    optimizer.state[model.weight] = 5
    with pytest.raises(RuntimeError, match="is int; expected a dict of its states"):
        backward(model)


@pytest.mark.parametrize("what", ["shape", "kind", "sparse", "no data"])
def test_a_checkpoint_with_such_a_state_is_refused(what: str) -> None:
    _model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = WRONG[what][0]()
    before = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}
    with pytest.raises(ValueError, match=r"'exp_avg' of .* is .*; expected fp32, bf16 or fp16"):
        optimizer.load_state_dict(saved)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before[key])


def test_a_hyper_parameter_that_was_taken_out_is_named() -> None:
    model, optimizer = trained()
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(RuntimeError, match="no 'lr' any more"):
        backward(model)


def test_the_model_comes_first() -> None:
    with pytest.raises(TypeError, match=r"fuse\(model, AdamW"):
        forge_dsl.fuse(AdamW, nn.Linear(2, 2))  # type: ignore[type-var]


def test_a_checkpoint_of_half_a_step_warns() -> None:
    model, optimizer = trained()
    optimizer.state_dict()
    backward(model)
    with pytest.warns(UserWarning, match="between backward and step"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


def test_bits_beside_a_weight_that_cannot_be_used_are_missed_aloud() -> None:
    """A checkpoint of a bf16 model with bits beside its weights, loaded for an fp32 model."""
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = AdamW([weight], extra_bits=8)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    wide = AdamW([nn.Parameter(torch.ones(8, 8))])
    with pytest.warns(UserWarning, match=r"weight_low.*left out.*torch.float32"):
        wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
