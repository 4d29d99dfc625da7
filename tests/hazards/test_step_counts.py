"""Hazard: one count for all parameters, counts that saturate in fp32, recurrent scalars that are shared."""

from __future__ import annotations

import torch

from tests.runtime.handwritten import SGD, AdamW, Linear, NAdam, SlowSGD, linear, linear_for


def step_once(layer, optimizer, x=None) -> None:
    layer(torch.ones(2, layer.in_features) if x is None else x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_counts_do_not_saturate_at_2_to_the_24() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    step_once(layer, optimizer)
    optimizer.state[layer.weight]["step"].fill_(2**24)
    step_once(layer, optimizer)
    assert optimizer.state[layer.weight]["step"].item() == 2**24 + 1
    assert optimizer.state[layer.bias]["step"].item() == 2


def test_a_count_that_was_replaced_by_hand_is_taken_over() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    step_once(layer, optimizer)
    optimizer.state[layer.weight]["step"] = torch.tensor(41.0)
    step_once(layer, optimizer)
    assert optimizer.state[layer.weight]["step"].item() == 42


def test_clearing_the_state_starts_anew() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    step_once(layer, optimizer)
    optimizer.state.clear()
    step_once(layer, optimizer)
    assert optimizer.state[layer.weight]["step"] == 1
    momentum = linear_for(SGD)(3, 2)
    optimizer = SGD(momentum.parameters(), momentum=0.5, dampening=0.5)
    step_once(momentum, optimizer)
    optimizer.state.clear()
    step_once(momentum, optimizer)
    assert torch.equal(optimizer.state[momentum.weight]["momentum_buffer"], torch.full((2, 3), 2.0)), "first again"


def test_recurrent_scalars_belong_to_each_parameter() -> None:
    early, late = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))
    twins = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    optimizer, reference = NAdam([early, late]), torch.optim.NAdam(twins, foreach=False)
    for step in range(6):
        weights = [early] if step < 3 else [early, late]
        sum(linear(torch.ones(1, 3), w, None, NAdam).sum() for w in weights).backward()
        sum(w.sum() for w in (twins[:1] if step < 3 else twins)).backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    for ours, theirs in zip((early, late), twins, strict=True):
        assert optimizer.state[ours]["step"] == reference.state[theirs]["step"]
        # torch keeps mu_product in fp32: six roundings.
        torch.testing.assert_close(
            optimizer.state[ours]["mu_product"].float(), reference.state[theirs]["mu_product"], rtol=1e-6, atol=0
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_counts_are_seen_only_after_step() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    assert optimizer.state[layer.weight]["step"] == 0
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 1


def test_a_state_that_copies_the_weight_begins_at_the_first_update() -> None:
    layer = linear_for(SlowSGD)(3, 2, bias=False)
    optimizer = SlowSGD(layer.parameters(), lr=0.5, alpha=0.5, every=2)
    loaded = torch.full((2, 3), 8.0)
    layer.load_state_dict({"weight": loaded})
    for expected in (7.5, 7.5, 7.0, 7.0):  # fast 7.5; 7.0 pulled half-way back to 8; and again from 7.5
        x = torch.ones(1, 3)
        step_once(layer, optimizer, x)
        assert torch.equal(layer.weight, torch.full((2, 3), expected))
