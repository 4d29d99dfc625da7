"""A fused transformer follows torch.optim's single-tensor path, through schedules, groups, saves and switches.

The bound: gradients differ by the order of their sums, which is 2^-24 of their size, and each step computes with a few
roundings of its change (`forge_dsl.testing.Bound`: 64 of 2^-24, and one half ulp per store). Those differences feed
back through the loss, so the comparison allows `GROWTH` times what 50 independent steps would add up to.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl.testing import Bound
from tests.integration.models import PAIRS, Pair, decoder, loss_of, train

STEPS = 50
GROWTH = 4.0
WARM_UP = 10


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Linear warm-up, then linear decay, for both groups."""
    rate = lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP) + 0.1)  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def groups(model: nn.Module, pair: Pair) -> list[dict[str, Any]]:
    made = forge_dsl.decay_groups(model, pair.arguments["weight_decay"], exclude=[nn.Embedding])
    made[1]["lr"] = pair.arguments["lr"] / 2
    return made


def our_side(model: nn.Module, pair: Pair) -> torch.optim.Optimizer:
    return forge_dsl.fuse(model, pair.fused(), params=groups(model, pair), **pair.arguments)


def torch_side(model: nn.Module, pair: Pair) -> torch.optim.Optimizer:
    return pair.make_torch(groups(model, pair))


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run(build: Any, sides: list[Any], pair: Pair, steps: int = STEPS) -> nn.Module:
    """Train through the sides in turn, each taking over from a checkpoint of the one before."""
    model = build()
    optimizer = sides[0](model, pair)
    scheduler = schedule(optimizer)
    part = steps // len(sides)
    for index, side in enumerate(sides):
        if index:
            saved = through_a_file([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
            model = build()
            optimizer = side(model, pair)
            scheduler = schedule(optimizer)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            scheduler.load_state_dict(saved[2])
        train(model, optimizer, range(index * part, (index + 1) * part), scheduler)
    return model


def largest_change(build: Any, pair: Pair) -> dict[str, float]:
    """The largest change that a step of torch's makes to each parameter, over the run."""
    model = build()
    optimizer = torch_side(model, pair)
    scheduler, changes = schedule(optimizer), {name: 0.0 for name, _ in model.named_parameters()}
    for step in range(STEPS):
        before = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(step, step + 1), scheduler)
        for name, parameter in model.named_parameters():
            changes[name] = max(changes[name], (parameter - before[name]).abs().max().item())
    return changes


def check(got: nn.Module, want: nn.Module, changes: dict[str, float], pair: Pair, what: str) -> None:
    # Lion takes the sign of its moment: where that is within rounding of 0 the step goes the other way.
    flips = 0.02 if pair.ours == "Lion" else 0.0
    bound = Bound(ulps=64 * GROWTH, stored=GROWTH, flips=flips)
    for (name, a), b in zip(got.named_parameters(), want.parameters(), strict=True):
        bound.check(a.detach(), b.detach(), STEPS, changes[name], 2.0**-24, f"{pair.ours} {what}: {name}")


def id_of(pair: Pair) -> str:
    return pair.ours


@pytest.mark.parametrize("pair", PAIRS, ids=id_of)
def test_fifty_steps_follow_torch_also_over_a_save_and_switches(pair: Pair) -> None:
    changes = largest_change(decoder, pair)
    want = run(decoder, [torch_side], pair)
    whole = run(decoder, [our_side], pair)
    check(whole, want, changes, pair, "unbroken")
    resumed = run(decoder, [our_side, our_side], pair)
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), "a resumed run has the bits of an unbroken one"
    check(run(decoder, [torch_side, our_side], pair), want, changes, pair, "from torch")
    check(run(decoder, [our_side, torch_side], pair), want, changes, pair, "to torch")


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("pair", PAIRS, ids=id_of)
def test_a_llama_of_transformers_follows_torch(pair: Pair) -> None:
    changes = largest_change(llama, pair)
    want = run(llama, [torch_side], pair)
    whole = run(llama, [our_side], pair)
    check(whole, want, changes, pair, "llama")
    mixed = run(llama, [torch_side, our_side, our_side, torch_side, our_side], pair)
    check(mixed, want, changes, pair, "llama over four switches")


def test_the_layers_of_a_llama_are_fused() -> None:
    model = llama()
    optimizer = forge_dsl.fuse(model, PAIRS[0].fused())
    rows = optimizer.report().rows
    assert {row.name for row in rows if row.route == "step"} == {
        name for name, p in model.named_parameters() if "norm" in name or "embed" in name
    }
    before = list(model.state_dict())
    loss_of(model, 0).backward()
    assert list(model.state_dict()) == before
