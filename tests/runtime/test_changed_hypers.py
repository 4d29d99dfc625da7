"""What is put into `param_groups` after construction is checked when it has changed, before it reaches a weight."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl.runtime import arguments
from generated import SGDMomentum, adamw
from generated.adamw import AdamW

BAD = [
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"lr": math.nan}, ValueError, "Invalid learning rate: nan"),
    ({"lr": math.inf}, ValueError, "Invalid learning rate: inf"),
    ({"lr": "1e-3"}, TypeError, "Invalid learning rate: '1e-3'.*got str"),
    ({"lr": None}, TypeError, "Invalid learning rate: None"),
    ({"lr": [1e-3]}, ValueError, "Invalid lr value"),
    ({"lr": torch.tensor(math.nan)}, ValueError, "Invalid learning rate: nan"),
    ({"lr": torch.tensor([0.1, 0.2])}, ValueError, "Tensor lr must be 1-element"),
    ({"betas": (0.9,)}, ValueError, "Invalid betas value.*a tuple of 2 numbers"),
    ({"betas": (0.9, 0.99, 0.999)}, ValueError, "Invalid betas value.*a tuple of 2 numbers"),
    ({"betas": 0.9}, ValueError, "Invalid betas value"),
    ({"betas": [0.9, 1.0]}, ValueError, "Invalid beta parameter at index 1: 1.0"),
    ({"betas": (math.nan, 0.9)}, ValueError, "Invalid beta parameter at index 0"),
    ({"eps": -1e-8}, ValueError, "Invalid epsilon value"),
    ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value"),
    ({"amsgrad": 1}, TypeError, "Invalid amsgrad value: 1"),
]
bad = pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[str(case[0]) for case in BAD])


def trained(fused: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = forge_dsl.fuse(model, AdamW) if fused else AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model, optimizer):
    saved = optimizer.state_dict()
    return copy.deepcopy([list(model.parameters()), [saved["state"][key] for key in sorted(saved["state"])]])


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other))


@bad
@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_bad_value_is_refused_before_anything_changes_and_a_good_one_goes_on(change, error, message, at) -> None:
    model, optimizer = trained(fused=at == "backward")
    group = optimizer.param_groups[0]
    before, kept = everything(model, optimizer), {name: group[name] for name in change}
    if at == "backward":
        group.update(change)
        with pytest.raises(error, match=f"{message}(.|\n)*has been changed to this.*zero_grad"):
            model(torch.ones(2, 3)).sum().backward()
    else:
        model(torch.ones(2, 3)).sum().backward()
        group.update(change)
        for _ in range(2):
            with pytest.raises(error, match=f"{message}(.|\n)*has been changed to this.*call step"):
                optimizer.step()
    group.update(kept)
    assert same(everything(model, optimizer), before)
    if at == "backward":
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 3


@bad
def test_step_checks_every_group_before_it_updates_one(change, error, message) -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.param_groups[1].update(change)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(torch.equal(weight, torch.ones(3)) for weight in weights) and not optimizer.state[weights[0]]


def test_what_is_required_of_several_together_is_checked() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGDMomentum([weight], momentum=0.9, nesterov=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        optimizer.step()


def test_a_value_is_checked_when_it_changes_and_only_then(monkeypatch) -> None:
    checked = []
    check = arguments.check_changed
    monkeypatch.setattr(
        arguments, "check_changed", lambda r, g, names: (checked.append(set(names)), check(r, g, names))
    )
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])
    for step in range(6):
        weight.grad = torch.ones(3)
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    assert len(checked) == 2 and checked[1] == {"lr"}


def test_a_tensor_on_a_device_is_not_read() -> None:
    group = {**AdamW([nn.Parameter(torch.ones(1))]).param_groups[0], "lr": torch.empty((), device="meta")}
    arguments.check_changed(adamw.RULE, group, {"lr"})
    with pytest.raises(ValueError, match="1-element"):
        arguments.check_changed(adamw.RULE, {**group, "lr": torch.empty(2, device="meta")}, {"lr"})
    with pytest.raises(ValueError, match="epsilon"):
        arguments.check_changed(adamw.RULE, {**group, "eps": -1.0}, {"eps"})
    assert arguments.flatten(group["lr"])


def test_the_rounding_of_a_schedule_down_to_zero_is_no_bad_value() -> None:
    ends = [end_of_schedule(start, total) for start in (1.0, 0.1, 1 / 3, 0.7) for total in (3, 7, 10, 97, 300)]
    assert any(end < 0 for end in ends)


def end_of_schedule(start: float, total: int) -> float:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start, 0.0, total)
    for _ in range(total + 2):
        weight.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
    AdamW([nn.Parameter(torch.ones(3))]).load_state_dict(optimizer.state_dict())
    return optimizer.param_groups[0]["lr"]


def test_rounding_never_excuses_a_value_that_is_excluded() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for change in ({"betas": (0.9, 1.0)}, {"lr": -1e-9}, {"weight_decay": -1e-9}):
        optimizer = AdamW([weight], weight_decay=0.0)
        optimizer.param_groups[0].update(change)
        with pytest.raises(ValueError, match="Invalid"):
            optimizer.step()


@pytest.mark.parametrize("value", ["0.1", b"0.1"])
def test_text_is_no_number_even_where_python_reads_it(value) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"Invalid learning rate.*got (str|bytes)"):
        AdamW([weight], lr=value)
    with pytest.raises(TypeError, match=r"Invalid beta parameter at index 1.*got (str|bytes)"):
        AdamW([weight], betas=(0.9, value))
