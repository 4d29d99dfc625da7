"""torch's learning-rate schedulers drive a fused optimizer as they drive torch.optim's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import forge_dsl
from tests.integration.models import PAIRS, Pair, decoder, loss_of

STEPS = 16


def sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1, cycle_momentum=True)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    "OneCycleLR": one_cycle,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "SequentialLR": sequence,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.05),
}


def run(optimizer: torch.optim.Optimizer, model: Any, make: Callable[[Any], Any]) -> list[Any]:
    """The learning rates and momenta of every step."""
    scheduler = make(optimizer)
    seen = []
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        seen.append((float(group["lr"]), group.get("betas"), group.get("momentum")))
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Plateaus are met at fixed steps: losses of two implementations differ in their last bits.
        arguments = [1 / (1 + step // 4)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
        scheduler.step(*arguments)
    return seen


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[4], PAIRS[7]], ids=lambda p: p.ours)
def test_the_same_rates_bit_for_bit_and_the_same_weights(pair: Pair, make: Callable[[Any], Any]) -> None:
    ours, theirs = decoder(), decoder()
    optimizer = forge_dsl.fuse(ours, pair.fused(), **pair.arguments)
    reference = pair.make_torch(theirs.parameters())
    assert run(optimizer, ours, make) == run(reference, theirs, make)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # 16 steps of at most 0.01 and weights of at most 4: see test_torch_trajectory for the bound.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGDMomentum"])
def test_a_tensor_learning_rate_is_read_at_use(name: str) -> None:
    pair = next(p for p in PAIRS if p.ours == name)
    ours, theirs = decoder(), decoder()
    arguments = {**pair.arguments, "lr": torch.tensor(0.003)}
    optimizer = forge_dsl.fuse(ours, pair.fused(), **arguments)
    make = SCHEDULERS["LambdaLR"]
    reference = pair.make_torch(theirs.parameters(), lr=0.003)
    got, want = run(optimizer, ours, make), run(reference, theirs, make)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert [rate for rate, *_ in got] == pytest.approx([rate for rate, *_ in want], rel=1e-6)  # the tensor is fp32
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_scheduler_resumes_with_the_optimizer() -> None:
    whole, first, second = decoder(), decoder(), decoder()
    kept = forge_dsl.fuse(whole, PAIRS[0].fused(), lr=0.01)
    early = forge_dsl.fuse(first, PAIRS[0].fused(), lr=0.01)
    schedulers = [one_cycle(kept), one_cycle(early)]

    def go(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    go(whole, kept, schedulers[0], range(10))
    go(first, early, schedulers[1], range(5))
    late = forge_dsl.fuse(second, PAIRS[0].fused(), lr=0.5)
    again = one_cycle(late)
    second.load_state_dict(first.state_dict())
    late.load_state_dict(early.state_dict())
    again.load_state_dict(schedulers[1].state_dict())
    go(second, late, again, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
