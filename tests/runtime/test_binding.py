"""Which optimizer a weight reports to, how long anything lives, and what the optimizer is to torch."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from tests.runtime.handwritten import SGD, AdamW, Linear, linear, linear_for, snapshot, unchanged


def test_a_weight_without_an_optimizer_raises_with_the_way_out() -> None:
    layer = Linear(3, 2)
    with pytest.raises(
        RuntimeError, match=r"no optimizer has the weight of shape \[2, 3\].*AdamW\(model.parameters\(\).*freeze"
    ):
        layer(torch.randn(4, 3))
    with torch.no_grad():
        assert layer(torch.randn(4, 3)).shape == (4, 2)


def test_a_weight_that_is_computed_says_so() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    with pytest.raises(RuntimeError, match="parametrised"):
        linear(torch.randn(4, 3), layer.weight * 2)
    del optimizer


def test_the_linear_function_of_another_optimizer_raises() -> None:
    layer = linear_for(SGD)(3, 2)
    optimizer = AdamW(layer.named_parameters())
    with pytest.raises(TypeError, match=r"weight \[2, 3\] belongs to AdamW, not to SGD"):
        layer(torch.randn(4, 3))
    del optimizer


def test_a_deleted_optimizer_is_forgotten_at_once() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None, "no reference cycle"
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="no optimizer has the weight"):
        layer(torch.randn(4, 3))


def test_weights_die_with_model_and_optimizer() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    gone = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer, optimizer
        assert gone() is None, "no reference cycle"
    finally:
        gc.enable()


def test_nothing_is_written_on_the_weight() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    assert not vars(layer.weight)
    del optimizer


def test_graphs_are_freed_without_the_garbage_collector() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    x = torch.randn(4, 3)
    gc.disable()
    try:
        y = layer(x)
        gone = weakref.ref(y.grad_fn)
        del y
        assert gone() is None
        layer(x).sum().backward()
    finally:
        gc.enable()
    del optimizer


def test_the_newest_optimizer_owns_the_weight_and_the_older_one_says_so() -> None:
    layer = Linear(3, 2)
    older = AdamW(layer.named_parameters())
    pending = layer(torch.randn(4, 3)).sum()
    newer = AdamW(layer.named_parameters())
    before = snapshot(newer)
    with pytest.raises(RuntimeError, match=r"weight \[2, 3\] was given to a newer optimizer"):
        pending.backward()
    assert unchanged(newer, before)
    del pending
    layer(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight \[2, 3\] was given to a newer optimizer"):
        older.step()
    newer.step()
    assert newer.state[layer.weight]["step"] == 1 and layer.weight not in older.state


def test_an_optimizer_deleted_before_backward_raises_and_changes_nothing() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    loss = layer(torch.randn(4, 3)).sum()
    old = layer.weight.detach().clone()
    del optimizer
    with pytest.raises(RuntimeError, match="deleted while a graph still needs it"):
        loss.backward()
    assert torch.equal(layer.weight, old)


def test_two_optimizers_of_one_model_step_their_own_weights() -> None:
    first, second = Linear(3, 4), linear_for(SGD)(4, 2)
    adam, sgd = AdamW(first.parameters()), SGD(second.parameters(), momentum=0.9)
    second(torch.tanh(first(torch.randn(5, 3)))).sum().backward()
    adam.step()
    sgd.step()
    assert adam.state[first.weight]["step"] == 1 and "momentum_buffer" in sgd.state[second.weight]
    adam.zero_grad()
    sgd.zero_grad()
    before = snapshot(adam)
    second(torch.tanh(first(torch.randn(5, 3)))).sum().backward(inputs=list(second.parameters()))
    assert unchanged(adam, before)


def test_it_is_a_torch_optimizer() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters(), lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 0.5 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert "lr: 0.5" in repr(optimizer) and "All groups" not in repr(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_group_added_mid_run_joins() -> None:
    first, second = Linear(3, 3), Linear(3, 2)
    optimizer = AdamW(first.parameters())
    first(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    second(first(torch.randn(4, 3))).sum().backward()
    optimizer.step()
    assert optimizer.state[first.weight]["step"] == 2 and optimizer.state[second.weight]["step"] == 1


def test_a_parameter_put_into_a_group_by_hand_is_refused_by_name() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(RuntimeError, match="use add_param_group"):
        optimizer.step()


def test_options_of_the_whole_optimizer_are_shown_and_copied() -> None:
    options = {"state_dtype": {"exp_avg": "int8"}, "arithmetic": "exact", "stochastic_rounding": False, "seed": 3}
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2, 2))], **options)
    for shown in (repr(optimizer), repr(copy.deepcopy(optimizer)), repr(pickle.loads(pickle.dumps(optimizer)))):
        assert shown.endswith(
            "All groups\n    state_dtype: {'exp_avg': 'int8'}\n    arithmetic: exact\n"
            "    stochastic_rounding: False\n    seed: 3\n)"
        )
