"""Accelerate: prepare, backward, step, zero_grad, save_state and load_state; clipping and accumulation raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from tests.integration.models import PAIRS, Pair, decoder, loss_of

accelerate = pytest.importorskip("accelerate", reason="needs forge-dsl[hf]")

BOUND = 2e-6
ADAMW = PAIRS[0]


def prepared(fused: bool = True, pair: Pair = ADAMW, **options: Any) -> tuple[Any, ...]:
    """Accelerator, model, optimizer and scheduler."""
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = decoder()
    if fused:
        optimizer = forge_dsl.fuse(model, pair.fused(), **pair.arguments)
    else:
        optimizer = pair.make_torch(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> nn.Module:
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def apart(a: nn.Module, b: nn.Module) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_prepared_objects_follow_torch() -> None:
    ours, theirs = prepared(), prepared(fused=False)
    assert type(ours[2]).__name__ == "AcceleratedOptimizer"
    assert apart(train(*ours, range(30)), train(*theirs, range(30))) <= BOUND
    assert ours[2].param_groups[0]["lr"] == theirs[2].param_groups[0]["lr"]
    assert not ours[2].step_was_skipped


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_a_loaded_state_continues_with_the_same_bits(pair: Pair, tmp_path: Path) -> None:
    unbroken = train(*prepared(pair=pair), range(12))
    first = prepared(pair=pair)
    train(*first, range(7))
    first[0].save_state(str(tmp_path))
    second = prepared(pair=pair)
    second[0].load_state(str(tmp_path))
    assert apart(train(*second, range(7, 12)), unbroken) == 0


def test_bf16_autocast_stays_near_torch() -> None:
    ours = train(*prepared(mixed_precision="bf16"), range(20))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    theirs = train(*prepared(fused=False, mixed_precision="bf16"), range(20))
    assert apart(ours, theirs) < 2e-3


def test_accumulation_raises_in_the_first_backward_and_nothing_has_changed() -> None:
    accelerator, model, optimizer, scheduler = prepared(gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"gradient_accumulation_steps=1.*larger batch"):
        train(accelerator, model, optimizer, scheduler, range(2))
    assert apart(model, decoder()) == 0
    assert not optimizer.state


def test_an_accumulation_that_was_left_can_be_ended() -> None:
    accelerator, model, optimizer, _ = prepared(gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"GradientState\(\)\.sync_gradients = True"), accelerator.accumulate(model):
        loss_of(model, 0).backward()
    accelerate.state.GradientState().sync_gradients = True
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_raises_in_the_first_step(clip: str) -> None:
    accelerator, model, _, _ = prepared()
    accelerator.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match=r"no call of clip_grad_norm_.*clamp.*torch\.nn\.functional\.linear"):
        getattr(accelerator, clip)(model.parameters(), 1.0)


def test_other_optimizers_still_accumulate_and_clip() -> None:
    accelerator, model, optimizer, _ = prepared(fused=False, gradient_accumulation_steps=2)
    for step in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert apart(model, decoder()) > 0
