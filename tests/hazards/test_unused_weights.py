"""Hazard: decay applied though the weight got no gradient. Unused: untouched. Zero tokens: a gradient of zero."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, Linear, linear, same_bits


def test_an_unused_weight_is_untouched_and_does_not_count() -> None:
    used, unused = Linear(3, 2), Linear(3, 2)
    optimizer = AdamW([*used.parameters(), *unused.parameters()], weight_decay=0.5)
    old = unused.weight.detach().clone()
    for _ in range(2):
        used(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(unused.weight.detach(), old)
    assert unused.weight not in optimizer.state and unused.bias not in optimizer.state
    unused(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[unused.weight]["step"] == 1 and optimizer.state[used.weight]["step"] == 2


def test_a_skipped_step_keeps_counts() -> None:
    layer, other = Linear(3, 2), Linear(3, 2)
    optimizer = AdamW([*layer.parameters(), *other.parameters()])
    for used in (layer, other, layer):
        used(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[layer.weight]["step"] == 2 and optimizer.state[other.weight]["step"] == 1


@pytest.mark.parametrize("leading", [(0,), (0, 5), (3, 0)])
def test_zero_tokens_move_moments_and_decay_as_with_torch(leading: tuple[int, ...]) -> None:
    start = torch.randn(4, 3)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = AdamW([ours], lr=0.1, weight_decay=0.5, eps=1e-3)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.5, eps=1e-3, foreach=False)
    for x in (torch.randn(2, 3), torch.zeros(*leading, 3)):
        linear(x, ours).sum().backward()
        torch.nn.functional.linear(x, theirs).sum().backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    assert optimizer.state[ours]["step"] == 2
    # Two steps of lr=0.1: a few roundings of 2^-24 each.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"], rtol=1e-6, atol=0)


def test_an_output_that_the_loss_ignores_leaves_the_weight_alone() -> None:
    first, second = Linear(3, 2, bias=False), Linear(3, 2, bias=False)
    optimizer = AdamW([first.weight, second.weight])
    x = torch.randn(4, 3)

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.set_materialize_grads(False)
            return a.clone(), b.clone()

        @staticmethod
        def backward(ctx, da, db):
            return da, db

    a, _ = Both.apply(first(x), second(x))
    a.sum().backward()
    optimizer.step()
    assert optimizer.state[first.weight]["step"] == 1
    assert second.weight not in optimizer.state and second.weight.grad is None
