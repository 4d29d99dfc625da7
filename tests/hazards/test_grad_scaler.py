"""Hazard: a loss scale that nobody undoes. A GradScaler cannot unscale a gradient that was never stored: it raises."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, Linear, linear


def test_stepping_through_a_scaler_raises_with_the_reason() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(layer(torch.randn(4, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"weight \[2, 3\].*GradScaler cannot unscale.*bfloat16"):
        scaler.step(optimizer)


def test_a_scaler_works_on_ordinary_gradients() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = AdamW(layer.parameters(), lr=0.1, eps=1e-3)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1, eps=1e-3, foreach=False)
    x = torch.randn(4, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(layer(x).pow(2).sum()).backward()
    scaler.step(optimizer)
    twin(x).pow(2).sum().backward()
    reference.step()
    # One step of lr=0.1: a few roundings of 2^-24.
    torch.testing.assert_close(layer.weight, twin.weight, rtol=0, atol=1e-7)


def test_a_scaler_skips_a_non_finite_step_and_nothing_moves() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = AdamW(layer.parameters(), lr=0.1)
    old = layer.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(layer(torch.full((4, 3), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(layer.weight, old) and layer.weight not in optimizer.state


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_stay_visible(value: float) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = AdamW([weight])
    x = torch.ones(4, 3)
    x[1, 2] = value
    linear(x, weight).sum().backward()
    moments = optimizer.state[weight]["exp_avg"]
    assert not torch.isfinite(moments[:, 2]).any() and torch.isfinite(moments[:, :2]).all()
    assert torch.isnan(weight[:, 2]).all() and torch.isfinite(weight[:, :2]).all()
