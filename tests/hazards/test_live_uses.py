"""Hazard: a weight updated while another graph still needs its old value. Raise before anything changes, or wait."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.runtime.handwritten import AdamW, Linear, linear, snapshot, unchanged


def model() -> tuple[torch.nn.Sequential, AdamW]:
    layers = torch.nn.Sequential(Linear(3, 3), torch.nn.Tanh(), Linear(3, 2))
    return layers, AdamW(layers.named_parameters())


def test_a_live_graph_that_is_not_part_of_this_backward_raises() -> None:
    layers, optimizer = model()
    kept = layers[0](torch.randn(4, 3)).sum()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"0\.weight \[3, 3\].*Sum the losses.*no_grad"):
        layers(torch.randn(4, 3)).sum().backward()
    assert unchanged(optimizer, before)
    del kept
    layers(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["step"] == 1


def test_both_graphs_in_one_backward_are_one_step() -> None:
    layers, optimizer = model()
    first = layers[0](torch.randn(4, 3)).sum()
    (layers(torch.randn(4, 3)).sum() + first).backward()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["step"] == 1


def test_discarded_forwards_cost_nothing() -> None:
    layers, optimizer = model()
    for _ in range(200):
        layers(torch.randn(4, 3))
    layers(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["step"] == 1


def test_a_graph_held_only_by_a_reference_cycle_is_not_in_the_way() -> None:
    layers, optimizer = model()
    gc.disable()
    try:
        holder: list[object] = [layers(torch.randn(4, 3)).sum()]
        holder.append(holder)
        del holder
        layers(torch.randn(4, 3)).sum().backward()
    finally:
        gc.enable()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["step"] == 1


def test_eval_and_no_grad_leave_no_trace() -> None:
    layers, optimizer = model()
    before = snapshot(optimizer)
    with torch.no_grad():
        kept = [layers(torch.randn(4, 3)) for _ in range(3)]
    with torch.inference_mode():
        kept.append(layers(torch.randn(4, 3)))
    layers.eval()
    layers(torch.randn(4, 3)).sum().backward()
    assert not unchanged(optimizer, before) and all(not y.requires_grad for y in kept)


def test_the_loss_of_the_last_step_may_be_kept() -> None:
    layers, optimizer = model()
    losses = []
    for _ in range(3):
        loss = layers(torch.randn(4, 3)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    assert optimizer.state[layers[0].weight]["step"] == 3


def test_an_exception_in_backward_leaves_the_next_backward_possible() -> None:
    layers, optimizer = model()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Fails.apply(layers(torch.randn(4, 3))).sum().backward()
    layers(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["step"] == 1


def test_hooks_on_activations_work_and_a_hook_on_the_weight_raises() -> None:
    layers, optimizer = model()
    seen = []
    x = torch.randn(4, 3, requires_grad=True)
    y = layers[0](x)
    y.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert len(seen) == 1
    handle = layers[0].weight.register_hook(lambda grad: grad)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="hook on its gradient"):
        layers(torch.randn(4, 3)).sum().backward()
    assert unchanged(optimizer, before)
    handle.remove()
    layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(RuntimeError, match="hook on its gradient"):
        layers(torch.randn(4, 3)).sum().backward()


def test_module_backward_hooks_work() -> None:
    layers, optimizer = model()
    seen = []
    layers[0].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))
    layers(torch.randn(4, 3, requires_grad=True)).sum().backward()
    optimizer.step()
    assert len(seen) == 1


def test_thousands_of_uses_are_one_step() -> None:
    weight = torch.nn.Parameter(torch.eye(2))
    optimizer = AdamW([weight])
    x = torch.ones(1, 2)
    total = sum(linear(x, weight).sum() for _ in range(2000))
    total.backward()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
