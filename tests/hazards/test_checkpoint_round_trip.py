"""Hazard: `load_state_dict` casts states to the parameter's dtype. Every bit comes back; what does not fit is named."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch

from tests.runtime.handwritten import SGD, Adagrad, AdamW, Linear, NAdam, linear_for, same_bits, snapshot, unchanged

CLASSES = [AdamW, NAdam, Adagrad, SGD]
MORE = {SGD: {"momentum": 0.9, "dampening": 0.5}}


def model(optimizer_class: type, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    layer = linear_for(optimizer_class)
    return torch.nn.Sequential(layer(3, 4), torch.nn.Tanh(), layer(4, 2)).to(dtype)


def train(layers, optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        dtype = layers[0].weight.dtype
        layers(torch.randn(5, 3).to(dtype)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    list(itertools.product([torch.float32, torch.bfloat16], [None, torch.float32, torch.float16])),
)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(optimizer_class, dtype, state_dtype) -> None:
    arguments = {"lr": 0.05, "state_dtype": state_dtype, **MORE.get(optimizer_class, {})}
    layers = model(optimizer_class, dtype)
    optimizer = optimizer_class(layers.parameters(), **arguments)
    train(layers, optimizer, range(3))
    resumed = model(optimizer_class, dtype)
    resumed.load_state_dict(layers.state_dict())
    again = optimizer_class(resumed.parameters(), **{**arguments, "lr": 0.7})
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert unchanged(again, snapshot(optimizer)) and again.param_groups[0]["lr"] == 0.05
    train(layers, optimizer, range(3, 6))
    train(resumed, again, range(3, 6))
    assert unchanged(again, snapshot(optimizer))


def test_a_state_dict_taken_between_backward_and_step_counts_the_update() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.parameters())
    layers(torch.randn(5, 3)).sum().backward()
    with pytest.warns(UserWarning, match="between backward and step"):
        saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["step"] == 1, "weights that backward updated"
    assert 1 not in saved["state"], "biases that step() has yet to update"
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 1 for p in layers.parameters())


def test_counts_in_a_state_dict_do_not_move_with_later_steps() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.parameters())
    train(layers, optimizer, range(2))
    saved = optimizer.state_dict()
    train(layers, optimizer, range(2))
    assert saved["state"][0]["step"] == 2 and optimizer.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"),
    [
        (AdamW, {"eps": 1e-3, "weight_decay": 0.1}),
        (AdamW, {"eps": 1e-3, "amsgrad": True}),
        (NAdam, {"eps": 1e-3, "weight_decay": 0.1}),
        (Adagrad, {"lr_decay": 0.1}),
        (SGD, {"momentum": 0.9, "dampening": 0.5}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_switching_between_torch_and_this_mid_run_keeps_the_trajectory(optimizer_class, arguments, direction) -> None:
    def torch_side():
        layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        layers.load_state_dict(model(optimizer_class).state_dict())
        reference = getattr(torch.optim, optimizer_class.__name__)
        return layers, reference(layers.parameters(), lr=0.02, foreach=False, **arguments)

    def our_side():
        layers = model(optimizer_class)
        return layers, optimizer_class(layers.parameters(), lr=0.02, **arguments)

    unbroken, whole = torch_side()
    train(unbroken, whole, range(6))
    sides = [torch_side, our_side] if direction == "from torch" else [our_side, torch_side]
    first, optimizer = sides[0]()
    train(first, optimizer, range(3))
    second, other = sides[1]()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    train(second, other, range(3, 6))
    for ours, theirs in zip(second.parameters(), unbroken.parameters(), strict=True):
        # Six steps at lr=0.02, each a few roundings of 2^-24 apart, through a curved loss.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def broken(change):
    layers = model(AdamW)
    optimizer = AdamW(layers.named_parameters(), amsgrad=True)
    train(layers, optimizer, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict)
    return optimizer, state_dict


CHANGES = {
    "lacks a state": (lambda d: d["state"][2].pop("exp_avg"), r"lacks 'exp_avg' of 2\.weight \[2, 4\]"),
    "lacks the count": (lambda d: d["state"][2].pop("step"), r"lacks 'step' of 2\.weight"),
    "lacks the optional state": (lambda d: d["state"][0].pop("max_exp_avg_sq"), r"'max_exp_avg_sq' of 0\.weight"),
    "wrong shape": (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(3, 4)),
        r"'exp_avg' of 0\.weight \[4, 3\] is torch.float32 of shape \[3, 4\]",
    ),
    "wrong dtype": (lambda d: d["state"][0].update(exp_avg=torch.zeros(4, 3, dtype=torch.int8)), "torch.int8"),
    "not a tensor": (lambda d: d["state"][0].update(exp_avg="x"), "is str"),
    "a vector of steps": (lambda d: d["state"][0].update(step=torch.zeros(2)), r"'step' of 0\.weight.*\[2\]"),
    "unknown state": (lambda d: d["state"][0].update(momentum_buffer=torch.zeros(4, 3)), "no state 'momentum_buffer'"),
    "another optimizer": (lambda d: d["param_groups"][0].pop("betas"), "not one of AdamW.*lacks betas"),
    "bad range": (lambda d: d["param_groups"][0].update(lr=-1.0), "Invalid learning rate: -1.0"),
    "missing parameter": (lambda d: d["param_groups"][0]["params"].pop(), "3 parameters, expected 4"),
    "more groups": (lambda d: d["param_groups"].append(d["param_groups"][0]), "different number of parameter groups"),
    "wrong order": (
        lambda d: d["param_groups"][0].update(param_names=["0.bias", "0.weight", "2.weight", "2.bias"]),
        "has parameter '0.bias' where group 0 has '0.weight'",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_what_does_not_fit_is_named_and_nothing_changes(change, message: str) -> None:
    optimizer, state_dict = broken(change)
    before, groups = snapshot(optimizer), copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert unchanged(optimizer, before)
    assert [{**g, "params": None} for g in optimizer.param_groups] == groups


def test_parameters_that_have_not_begun_stay_so() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.parameters())
    layers[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    again = AdamW(layers.parameters())
    train(layers, again, range(3))
    again.load_state_dict(optimizer.state_dict())
    assert layers[2].weight not in again.state
    again.zero_grad()
    train(layers, again, range(1))
    assert again.state[layers[2].weight]["step"] == 1 and again.state[layers[0].weight]["step"] == 2


def test_extra_group_entries_of_schedulers_survive_and_torchs_switches_do_not() -> None:
    layers = model(AdamW)
    reference = torch.optim.AdamW(layers.parameters(), foreach=False)
    torch.optim.lr_scheduler.ExponentialLR(reference, 0.9)
    optimizer = AdamW(layers.parameters())
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["initial_lr"] == 1e-3
    assert not {"foreach", "fused", "capturable"} & set(optimizer.param_groups[0])


def test_hooks_of_state_dicts_are_called() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.parameters())
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "saved", "load", "loaded"]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("optimizer_class", CLASSES)
def test_a_copied_pair_of_model_and_optimizer_goes_on_alike_and_apart(copier, optimizer_class) -> None:
    layers = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4))])
    optimizer = optimizer_class(layers.parameters(), lr=0.05, **MORE.get(optimizer_class, {}))

    def step(parameters, o) -> None:
        from forge_dsl.runtime.linear import fused_linear

        fused_linear(torch.ones(2, 3), *parameters, optimizer_class).pow(2).sum().backward()
        o.step()
        o.zero_grad()

    step(layers, optimizer)
    step(layers, optimizer)
    copied, other = copier((layers, optimizer))
    before = snapshot(optimizer)
    step(copied, other)
    assert unchanged(optimizer, before)
    step(layers, optimizer)
    assert unchanged(optimizer, snapshot(other))
    assert same_bits(copied[0].detach(), layers[0].detach())


def test_a_copied_model_is_not_bound_to_the_optimizer() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    with pytest.raises(RuntimeError, match=r"no optimizer has the weight of shape \[2, 3\]"):
        copy.deepcopy(layer)(torch.randn(1, 3))
    del optimizer


def test_a_checkpoint_loaded_between_backward_and_step_is_named_as_the_reason() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.named_parameters())
    train(layers, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    layers(torch.ones(2, 3)).sum().backward()
    optimizer.load_state_dict(saved)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) came between backward and step.*zero_grad\(\)"):
            optimizer.step()
    optimizer.zero_grad()
    train(layers, optimizer, range(1))
    assert optimizer.state[layers[0].weight]["step"] == 2


def test_a_second_step_after_a_load_in_its_place_is_not_blamed_on_the_load() -> None:
    layers = model(AdamW)
    optimizer = AdamW(layers.named_parameters())
    layers(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="called again without a new backward"):
        optimizer.step()
