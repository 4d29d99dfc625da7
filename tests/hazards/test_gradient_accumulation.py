"""Hazard: accumulating over k micro-batches made k optimizer steps. Here it raises, or is one step of the sum."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, Linear, integers, same_bits, snapshot, unchanged


def test_second_backward_before_step_raises_and_changes_nothing() -> None:
    model = torch.nn.Sequential(Linear(3, 4), torch.nn.Tanh(), Linear(4, 2))
    optimizer = AdamW(model.named_parameters())
    model(torch.randn(5, 3)).sum().backward()
    before = snapshot(optimizer)
    biases = model[0].bias.grad.clone()
    with pytest.raises(RuntimeError, match=r"[02]\.weight \[.*sum the losses.*step\(\)"):
        model(torch.randn(5, 3)).sum().backward()
    assert unchanged(optimizer, before)
    assert torch.equal(model[0].bias.grad, biases)


def test_summed_micro_batches_equal_one_big_batch_and_count_one_step() -> None:
    batches = [integers(4, 3, seed=seed) for seed in range(3)]
    models = []
    for losses in (lambda f: sum(f(x).sum() for x in batches), lambda f: f(torch.cat(batches)).sum()):
        torch.manual_seed(0)
        layer = Linear(3, 2)
        optimizer = AdamW(layer.parameters(), lr=0.1)
        losses(layer).backward()
        optimizer.step()
        assert optimizer.state[layer.weight]["step"] == 1
        models.append(layer)
    assert same_bits(models[0].weight, models[1].weight)


def test_backward_after_step_is_a_new_step() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    for step in (1, 2, 3):
        layer(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        assert optimizer.state[layer.weight]["step"] == step
        assert optimizer.state[layer.bias]["step"] == step
        optimizer.zero_grad()


def test_zero_grad_cannot_discard_what_backward_applied() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="already updated"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert layer.weight.grad is None and layer.bias.grad is None


def test_step_again_without_backward_raises() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) after each step"):
        optimizer.step()
    assert unchanged(optimizer, before)
