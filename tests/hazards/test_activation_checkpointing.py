"""Hazard: a weight updated between two checkpointed segments gives a silently wrong input gradient."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import forge_dsl
from forge_dsl import optim
from tests.runtime.handwritten import AdamW, Linear, linear, same_bits, snapshot, unchanged


def run(forward, wrap=None, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after some steps of a small model whose forward is `forward(first, second, x, wrap)`."""
    torch.manual_seed(0)
    first, second = Linear(3, 3), Linear(3, 3)
    optimizer = AdamW([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(steps):
        x = torch.randn(4, 3, requires_grad=True)
        forward(first, second, x, wrap or (lambda function, x: function(x))).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(optimizer.state[p]["step"] == steps for p in first.parameters())
    return [p.detach() for p in [*first.parameters(), *second.parameters()]]


def shared_in_two_segments(first, second, x, wrap):
    h = wrap(lambda x: torch.tanh(first(x)), x)
    h = torch.tanh(second(h))
    return wrap(lambda x: torch.tanh(first(x)), h)


def one_segment(first, second, x, wrap):
    return wrap(lambda x: second(torch.tanh(first(torch.tanh(first(x))))), x)


def one_segment_each(first, second, x, wrap):
    return wrap(lambda x: torch.tanh(second(x)), wrap(lambda x: torch.tanh(first(x)), x))


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


@pytest.mark.parametrize("forward", [shared_in_two_segments, one_segment, one_segment_each])
@pytest.mark.parametrize("early_stop", [True, False])
def test_non_reentrant_checkpointing_changes_nothing(forward, early_stop: bool) -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        checkpointed = run(forward, non_reentrant)
    assert all(same_bits(a, b) for a, b in zip(run(forward), checkpointed, strict=True))


@pytest.mark.parametrize("forward", [one_segment, one_segment_each])
def test_reentrant_checkpointing_of_one_segment_per_weight_changes_nothing(forward) -> None:
    assert all(same_bits(a, b) for a, b in zip(run(forward), run(forward, reentrant), strict=True))


def test_nested_checkpoints_change_nothing() -> None:
    def nested(first, second, x, wrap):
        return wrap(lambda x: torch.tanh(second(wrap(lambda x: torch.tanh(first(x)), x))), x)

    plain = run(nested)
    for wrap in (non_reentrant, reentrant):
        assert all(same_bits(a, b) for a, b in zip(plain, run(nested, wrap), strict=True))


def model() -> tuple[Linear, Linear, AdamW]:
    first, second = Linear(3, 3), Linear(3, 3)
    return first, second, AdamW([*first.parameters(), *second.parameters()], lr=0.1)


def test_two_reentrant_segments_of_one_weight_raise_before_anything_changes() -> None:
    first, second, optimizer = model()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        shared_in_two_segments(first, second, torch.randn(4, 3, requires_grad=True), reentrant).sum().backward()
    assert unchanged(optimizer, before)


@pytest.mark.parametrize("inside_first", [True, False])
def test_a_reentrant_segment_and_a_use_outside_raise_before_anything_changes(inside_first: bool) -> None:
    first, second, optimizer = model()
    before = snapshot(optimizer)
    x = torch.randn(4, 3, requires_grad=True)
    y = second(first(reentrant(first, x)) if inside_first else reentrant(first, first(x)))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.sum().backward()
    assert unchanged(optimizer, before)


def test_a_reentrant_forward_that_was_dropped_does_not_count() -> None:
    first, second, optimizer = model()
    x = torch.randn(4, 3, requires_grad=True)
    reentrant(first, x)
    with torch.no_grad():
        reentrant(first, x)
    for _ in range(2):
        second(reentrant(first, x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[first.weight]["step"] == 2


def test_a_use_hidden_from_the_graph_raises_when_it_is_recomputed_too_late() -> None:
    """A detached use inside a segment has no node, so the weight may step before the segment is recomputed."""
    first, second, optimizer = model()
    x = torch.randn(4, 3, requires_grad=True)
    h = non_reentrant(lambda x: second(x) * first(x).detach(), x)
    with pytest.raises(RuntimeError, match="recomputation after this backward has updated it"):
        first(h).sum().backward()
    del optimizer


def test_recomputation_is_never_a_second_step() -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    optimizer = AdamW([weight])
    calls = []

    def segment(x):
        calls.append(torch._C._current_graph_task_id())
        return linear(x, weight)

    non_reentrant(segment, torch.ones(1, 3, requires_grad=True)).sum().backward()
    optimizer.step()
    assert len(calls) == 2 and calls[1] != -1
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_makes_no_more_products_than_torch(
    early_stop: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint stops once everything is saved again, and the last layer of a segment saves before its product."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = forge_dsl.fuse(layers, optim.AdamW, lr=0.1)
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop), bf16:
        y = checkpoint(layers, torch.randn(2, 8), use_reentrant=False)
    products, product = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: products.append(args) or product(*args))
    y.sum().backward()
    optimizer.step()
    assert len(products) == (2 if early_stop else 3)


@pytest.mark.parametrize("kept", [{}, {"saved_activations": "fp8"}, {"weight_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(128,), (4, 128), (2, 3, 128), (0, 128)], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_what_is_recomputed_has_the_bits_of_the_first_time(autocast, shape, bias: bool, kept: dict[str, str]) -> None:
    def trained(wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sizes = [(128, 64), (64, 96), (96, 128)]
        dtype = torch.float32 if autocast else torch.bfloat16
        layers = [torch.nn.Linear(a, b, bias=bias, dtype=dtype) for a, b in sizes]
        relu = torch.nn.ReLU(inplace=True)  # changes what a fused layer returned
        model = torch.nn.Sequential(layers[0], relu, layers[1], torch.nn.Tanh(), layers[2])
        optimizer = forge_dsl.fuse(model, optim.AdamW, lr=0.1, **kept)
        for _ in range(2):
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = wrap(model, x)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
            gradient = x.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        return [*(p.detach().view(torch.uint8) for p in model.parameters()), gradient]

    wanted = trained(lambda function, x: function(x))
    for wrap in (non_reentrant, reentrant):
        assert all(map(torch.equal, wanted, trained(wrap)))


def test_selective_checkpoints_find_the_operations_of_the_first_time() -> None:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def selective(function, x):
        return checkpoint(
            function, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(saved)
        )

    for forward in (one_segment, one_segment_each):
        assert all(same_bits(a, b) for a, b in zip(run(forward), run(forward, selective), strict=True))


def test_a_tensor_subclass_goes_through_a_checkpoint() -> None:
    def gradients(wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4)
        optimizer = forge_dsl.fuse(layer, optim.SGD, lr=1.0)
        x = TwoTensor(torch.ones(5, 8), torch.ones(5, 8)).requires_grad_()
        wrap(lambda x: layer(x).sin(), x).sum().backward()
        optimizer.step()
        return [x.grad.a, x.grad.b]

    assert all(map(torch.equal, gradients(lambda function, x: function(x)), gradients(non_reentrant)))
