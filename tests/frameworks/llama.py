"""A two-layer Llama from a config, with random weights, and data for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl

transformers = pytest.importorskip("transformers", reason="needs forge-dsl[hf]")

VOCABULARY, CONTEXT = 29, 12


def llama(**options: Any) -> nn.Module:
    """Always the same weights. No dropout, as in Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


def sequences(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, CONTEXT), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def two_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Norms without decay and at half the rate."""
    groups = forge_dsl.decay_groups(model, weight_decay)
    groups[1]["lr"] = lr / 2
    return groups
