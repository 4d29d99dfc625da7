"""LoRA adapters over a frozen base: the adapters train, the base stays and costs no state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl.optim import AdamW
from tests.frameworks.llama import llama, sequences

peft = pytest.importorskip("peft", reason="needs peft")

STEPS = 20


def with_adapters() -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(llama(), config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    data = sequences(4 * STEPS)
    for step in steps:
        tokens = torch.stack([row["input_ids"] for row in data[4 * step : 4 * step + 4]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fused(model: nn.Module) -> Any:
    return forge_dsl.fuse(model, AdamW, lr=3e-3, eps=1e-3)


def test_adapters_follow_torch_and_the_base_stays() -> None:
    ours, theirs = with_adapters(), with_adapters()
    optimizer = fused(ours)
    train(ours, optimizer)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    train(theirs, torch.optim.AdamW(trained, lr=3e-3, eps=1e-3, foreach=False))
    start = dict(with_adapters().named_parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if "lora_" in name:
            assert (a - b).abs().max() <= 2e-6 and not torch.equal(a, start[name]), name
        else:
            assert torch.equal(a, start[name]), name


def test_the_base_costs_no_state_and_no_gradient() -> None:
    model = with_adapters()
    optimizer = fused(model)
    train(model, optimizer, range(2))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None and p not in optimizer.state for p in frozen)
    adapters = {p: name for name, p in model.named_parameters() if p.requires_grad}
    assert set(optimizer.state) == set(adapters)
    routes = {row.name: row.route for row in optimizer.report().rows}
    assert {routes[name] for name in adapters.values()} == {"backward"}


def test_merged_adapters_compute_what_was_trained() -> None:
    model = with_adapters()
    train(model, fused(model))
    tokens = sequences(2, seed=5)[0]["input_ids"][None]
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        got = model.merge_and_unload()(input_ids=tokens).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = with_adapters()
    train(model, fused(model))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), name


class TwoLayers(nn.Module):
    """Layers that are large enough for fp8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.gelu(self.a(x)))


def test_adapters_train_over_a_base_in_fp8() -> None:
    base = TwoLayers()
    forge_dsl.fuse(base, AdamW, weight_dtype="fp8")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["a", "b"]))
    optimizer = forge_dsl.fuse(model, AdamW, lr=1e-2, weight_dtype="fp8")
    before = {name: p.detach().clone().view(torch.uint8) for name, p in model.named_parameters()}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().view(torch.uint8), before[name]) == ("lora_" not in name), name
    assert base.a.base_layer.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        want = model(x)
        merged = forge_dsl.unfuse(model).merge_and_unload()
        torch.testing.assert_close(merged(x), want, rtol=0, atol=1e-5)
