"""The eight generated optimizers in the runtime: whole steps, through the reference and through the kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from forge_dsl import optim
from forge_dsl.runtime.linear import fused_linear
from tests.runtime.handwritten import integers, same_bits, snapshot, unchanged

CASES = {
    "adamw": ("AdamW", "AdamW", {"weight_decay": 0.1, "eps": 1e-3}),
    "adamw amsgrad": ("AdamW", "AdamW", {"amsgrad": True, "maximize": True, "eps": 1e-3}),
    "nadam": ("NAdam", "NAdam", {"weight_decay": 0.1, "eps": 1e-3}),
    "nadam decoupled": ("NAdam", "NAdam", {"weight_decay": 0.1, "eps": 1e-3, "decoupled_weight_decay": True}),
    "radam": ("RAdam", "RAdam", {"weight_decay": 0.1, "eps": 1e-3}),
    "rmsprop": ("RMSprop", "RMSprop", {"weight_decay": 0.1, "eps": 1e-3}),
    "rmsprop centered": ("RMSprop", "RMSprop", {"centered": True, "momentum": 0.9, "eps": 1e-3}),
    "adagrad": ("Adagrad", "Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3}),
    "sgd": ("SGD", "SGD", {"weight_decay": 0.1}),
    "sgd momentum": ("SGDMomentum", "SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd nesterov": ("SGDMomentum", "SGD", {"momentum": 0.9, "nesterov": True}),
}


def build(layer_class: type) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer_class(6, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), layer_class(8, 3, bias=False)]
    return torch.nn.Sequential(*layers)


def train(model, optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(5, 6)) - 1).pow(2).mean().backward()
        optimizer.step()


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # At lr=0.01, 20 steps, each a few roundings of 2^-24 apart, through a smooth loss.
        torch.testing.assert_close(a, b, rtol=0, atol=4e-6)


@pytest.mark.parametrize(("name", "reference", "arguments"), CASES.values(), ids=CASES.keys())
def test_twenty_steps_follow_torch_and_checkpoints_pass_both_ways(name: str, reference: str, arguments) -> None:
    cls, layer = getattr(optim, name), getattr(optim, f"{name}Linear")
    ours, theirs = build(layer), build(torch.nn.Linear)
    optimizer = cls(ours.parameters(), lr=0.01, **arguments)
    other = getattr(torch.optim, reference)(theirs.parameters(), lr=0.01, foreach=False, **arguments)
    train(ours, optimizer, range(10))
    train(theirs, other, range(10))
    resumed = build(layer)
    resumed.load_state_dict(theirs.state_dict())
    again = cls(resumed.parameters())
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    for model, o in ((ours, optimizer), (theirs, other), (resumed, again)):
        train(model, o, range(10, 20))
    assert_close(ours, theirs)
    assert_close(resumed, theirs)
    before = snapshot(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert unchanged(optimizer, before)


NAMES = {"Lion": {}, **{case[0]: {} for case in CASES.values()}, "SGDMomentum": {"momentum": 0.5, "dampening": 0.5}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run there")
@pytest.mark.parametrize(("name", "arguments"), NAMES.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_reference_step_the_same_bits(name: str, arguments, dtype: torch.dtype) -> None:
    """Integer data and exact arithmetic, so that only the route differs; bias by the element-wise kernel."""
    cls = getattr(optim, name)
    results = []
    for schedule in ("banded", "fused"):
        weight, bias = (torch.nn.Parameter(integers(*shape, dtype=dtype)) for shape in ((5, 7), (5,)))
        optimizer = cls([weight, bias], lr=0.25, **arguments, arithmetic="exact", schedule=schedule)
        for step in range(3):
            x, dy = integers(9, 7, seed=step, dtype=dtype), integers(9, 5, seed=10 + step, dtype=dtype)
            fused_linear(x, weight, bias, cls).backward(dy)
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(optimizer))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
