"""Hazard: SGD skips dampening on the first update of each buffer, whenever that is; an imported one is not first."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.runtime.handwritten import SGD, Adagrad, linear_for


def pair(**arguments):
    torch.manual_seed(0)
    ours = linear_for(SGD)(3, 2)
    theirs = torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    return (
        ours,
        theirs,
        SGD(ours.parameters(), **arguments),
        torch.optim.SGD(theirs.parameters(), foreach=False, **arguments),
    )


def step(layers, optimizers, seed: int) -> None:
    for layer, optimizer in zip(layers, optimizers, strict=True):
        torch.manual_seed(seed)
        layer(torch.randn(4, 3)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(ours, theirs) -> None:
    # A handful of steps, each a few roundings of 2^-24 of values below 4.
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=2e-6)


def test_dampening_is_skipped_once_per_buffer() -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05, momentum=0.9, dampening=0.5)
    for seed in range(4):
        step((ours, theirs), (optimizer, reference), seed)
    assert_alike(ours, theirs)


def test_momentum_that_begins_later_makes_a_first_buffer_then() -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05, momentum=0.0, dampening=0.5)
    for seed in range(6):
        if seed == 2:
            for o in (optimizer, reference):
                o.param_groups[0]["momentum"] = 0.9
        step((ours, theirs), (optimizer, reference), seed)
        assert ("momentum_buffer" in optimizer.state[ours.weight]) == (seed >= 2)
    assert_alike(ours, theirs)


def test_momentum_that_pauses_keeps_its_buffer() -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05, momentum=0.9, dampening=0.5)
    for seed in range(6):
        for o in (optimizer, reference):
            o.param_groups[0]["momentum"] = 0.0 if seed in (2, 3) else 0.9
        step((ours, theirs), (optimizer, reference), seed)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("source", ["ours", "theirs"])
def test_an_imported_buffer_is_not_first(source: str) -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05, momentum=0.9, dampening=0.5)
    step((ours, theirs), (optimizer, reference), 0)
    fresh = SGD(ours.parameters(), lr=0.05)
    fresh.load_state_dict(copy.deepcopy((optimizer if source == "ours" else reference).state_dict()))
    step((ours, theirs), (fresh, reference), 1)
    assert_alike(ours, theirs)


def test_a_buffer_put_there_by_hand_is_not_first() -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05, momentum=0.9, dampening=0.5)
    for layer, o in ((ours, optimizer), (theirs, reference)):
        for parameter in layer.parameters():
            o.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    step((ours, theirs), (optimizer, reference), 0)
    assert_alike(ours, theirs)


def test_sgd_has_no_step_and_without_momentum_no_state() -> None:
    ours, theirs, optimizer, reference = pair(lr=0.05)
    step((ours, theirs), (optimizer, reference), 0)
    assert not optimizer.state[ours.weight] and optimizer.state_dict()["state"] in ({}, {0: {}, 1: {}})
    assert_alike(ours, theirs)


def test_adagrad_has_its_state_from_construction() -> None:
    layer = linear_for(Adagrad)(3, 2).bfloat16()
    optimizer = Adagrad(layer.parameters(), initial_accumulator_value=0.3, state_dtype=torch.float32)
    state = optimizer.state[layer.weight]
    assert state["step"] == 0 and torch.equal(state["sum"], torch.full((2, 3), 0.3))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))], "initial_accumulator_value": 2.0})
    assert torch.equal(optimizer.state[optimizer.param_groups[1]["params"][0]]["sum"], torch.full((4,), 2.0))
