"""Hazard: one learning rate for all groups, warm-up unseen. lr is read from `param_groups` when it is used."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import SGD, AdamW, Linear, linear, linear_for


def test_each_group_has_its_own_arguments() -> None:
    slow, fast = linear_for(SGD)(3, 2, bias=False), linear_for(SGD)(3, 2, bias=False)
    fast.load_state_dict(slow.state_dict())
    start = slow.weight.detach().clone()
    optimizer = SGD([{"params": slow.parameters(), "lr": 0.125}, {"params": fast.parameters()}], lr=0.5)
    x = torch.ones(1, 3)
    (slow(x) + fast(x)).sum().backward()
    optimizer.step()
    assert torch.equal(slow.weight, start - 0.125)
    assert torch.equal(fast.weight, start - 0.5)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[5],
        ),
    ],
    ids=["LambdaLR", "OneCycleLR", "CosineAnnealingLR", "SequentialLR"],
)
def test_schedules_act_as_with_torch(scheduler) -> None:
    weights = []
    for layer_class, optimizer_class, more in (
        (Linear, AdamW, {}),
        (torch.nn.Linear, torch.optim.AdamW, {"foreach": False}),
    ):
        torch.manual_seed(0)
        layer = layer_class(4, 3)
        optimizer = optimizer_class(layer.parameters(), lr=0.05, eps=1e-3, **more)
        schedule = scheduler(optimizer)
        for _ in range(15):
            optimizer.zero_grad()
            layer(torch.randn(5, 4)).pow(2).sum().backward()
            optimizer.step()
            schedule.step()
        weights.append(layer.weight.detach())
    # 15 updates of at most lr=0.1 that differ by a few roundings each: 2^-24 relative of the step, accumulated.
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-6)


def test_tensor_learning_rate_is_read_at_use() -> None:
    layer = linear_for(SGD)(3, 2, bias=False)
    start = layer.weight.detach().clone()
    lr = torch.tensor(0.5)
    optimizer = SGD(layer.parameters(), lr=lr)
    lr.fill_(0.25)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, start - 0.25)
    lr.fill_(0.5)
    optimizer.zero_grad()
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, start - 0.25 - 0.5)


def test_closure_runs_forward_and_backward_first() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    start = layer.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
    assert loss.requires_grad and not torch.equal(layer.weight, start)
    assert optimizer.state[layer.weight]["step"] == optimizer.state[layer.bias]["step"] == 2


def test_a_learning_rate_that_changes_between_backward_and_step_raises_before_anything_else_changes() -> None:
    layer = linear_for(SGD)(4, 3)
    optimizer = SGD(layer.parameters(), lr=0.5)
    bias = layer.bias.detach().clone()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(RuntimeError, match="lr of a param group changed between backward"):
        optimizer.step()
    assert torch.equal(layer.bias, bias)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert torch.equal(layer.bias, bias - 0.5)


def test_a_learning_rate_that_changes_inside_backward_reaches_no_weight_and_raises_in_step() -> None:
    weights = [torch.nn.Parameter(torch.eye(3)) for _ in range(2)]
    optimizer = SGD(weights, lr=0.5)
    hidden = linear(torch.ones(1, 3), weights[0], optimizer_class=SGD)
    hidden.register_hook(lambda _: optimizer.param_groups[0].update(lr=0.25))
    linear(hidden, weights[1], optimizer_class=SGD).sum().backward()
    assert all(torch.equal(weight.detach(), torch.eye(3) - 0.5) for weight in weights)
    with pytest.raises(RuntimeError, match="lr of a param group changed between backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
