"""Hazard: run-to-run differences, and values read from memory that nobody wrote."""

from __future__ import annotations

import pytest
import torch

from forge_dsl.runtime.banded import linear_step_banded
from tests.runtime.handwritten import ADAMW, AdamW, Linear, exact_step, integers, same_bits


def train(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Linear(65, 33), torch.nn.GELU(), Linear(33, 17))
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(129, 65)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_two_runs_are_bitwise_equal() -> None:
    assert all(same_bits(a, b) for a, b in zip(train(3), train(3), strict=True))


@pytest.fixture
def poisoned():
    """Every `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_no_uninitialised_memory_is_read(poisoned) -> None:
    assert torch.isnan(torch.empty(4)).all()
    assert all(torch.isfinite(p).all() for p in train(4))


@pytest.mark.parametrize("in_features", [1, 3, 1000])
def test_bands_of_any_height_give_the_same_bits(in_features: int, monkeypatch, poisoned) -> None:
    start, x, dy = integers(37, in_features), integers(20, in_features, seed=1), integers(20, 37, seed=2)
    hypers = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    flags = {"amsgrad": False, "maximize": False}
    zeros = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    expected, states, _ = exact_step(ADAMW, start, dy.T @ x, zeros, hypers, flags)
    table, _ = ADAMW.step_scalars(step=1.0, **hypers, **flags)
    for elements in (1, 7 * in_features, 36 * in_features, 1 << 20):
        monkeypatch.setattr("forge_dsl.runtime.banded.CPU_BAND", elements)
        weight = start.clone()
        held = [torch.zeros_like(start), torch.zeros_like(start), None]
        s = torch.tensor([*map(float, table), float("nan"), float("nan"), float("nan")])
        linear_step_banded(ADAMW, x, dy, weight, held, s, (False, False), True)
        assert same_bits(weight, expected)
        assert same_bits(held[0], states["exp_avg"]) and same_bits(held[1], states["exp_avg_sq"])
