"""GPT-2 of transformers: its linear layers are `Conv1D`, with weights [in, out]."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge_dsl
from forge_dsl.fusion import FusedForward
from forge_dsl.optim import SGD, AdamW, SGDMomentum

transformers = pytest.importorskip("transformers", reason="needs forge-dsl[hf]")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

VOCABULARY, CONTEXT = 29, 12


def gpt2(**options: Any) -> Any:
    """Always the same weights, and no dropout."""
    torch.manual_seed(0)
    silent = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **silent, **options))


def batch(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range = range(5), call: Any = None) -> list[float]:
    losses = []
    for step in steps:
        loss = (model if call is None else call)(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


PAIRS = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGDMomentum, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (AdamW, torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-4}),
]


@pytest.mark.parametrize("checkpoints", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize(("fused", "plain", "arguments"), PAIRS, ids=["SGD", "SGDMomentum", "AdamW"])
def test_it_trains_as_under_torch(fused: Any, plain: Any, arguments: dict[str, Any], checkpoints: Any) -> None:
    model, twin = gpt2(), gpt2()
    for one in (model, twin):
        if checkpoints is not None:
            one.train()
            one.gradient_checkpointing_enable(checkpoints)
            one.enable_input_require_grads()
    optimizer, reference = forge_dsl.fuse(model, fused, **arguments), plain(twin.parameters(), **arguments)
    assert train(model, optimizer) == pytest.approx(train(twin, reference), abs=2e-6)
    assert largest_difference(model, twin) < 2e-6
    inside = optimizer.report().select("backward")
    assert [row.name.split(".")[-2] for row in inside] == ["c_attn", "c_proj", "c_fc", "c_proj"] * 2
    assert {row.reason for row in inside} == {"linear"}


def layer_and_twin(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layer = Conv1D(65, 67).to(dtype)
    return layer, copy.deepcopy(layer)


@pytest.mark.parametrize("schedule", ["auto", "banded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [{}, {"state_dtype": "int8"}, {"saved_activations": "fp8"}], ids=str)
def test_the_update_is_that_of_the_gradient_torch_would_have(dtype: torch.dtype, kept: Any, schedule: str) -> None:
    """And `dx`, the bias and a gradient that is asked for; in every format, of a weight used twice."""
    layer, twin = layer_and_twin(dtype)
    optimizer = forge_dsl.fuse(layer, AdamW, lr=1e-2, schedule=schedule, stochastic_rounding=False, **kept)
    reference = AdamW(
        twin.parameters(), lr=1e-2, schedule=schedule, stochastic_rounding=False, state_dtype=kept.get("state_dtype")
    )
    x = torch.randn(2, 5, 67, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for one, given in zip((layer, twin), inputs, strict=True):
        (one(given) * one(given + 1)).float().sum().backward()
    assert layer.weight.grad is not None and type(layer.weight.grad) is not Tensor
    bound = {"rtol": 0.1, "atol": 0.02} if kept.get("saved_activations") or dtype == torch.bfloat16 else {}
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **({} if dtype == torch.float32 else bound))
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)
    optimizer.step()
    reference.step()
    if not bound:
        torch.testing.assert_close(layer.weight, twin.weight)
    else:
        moved = (twin.weight - layer.weight).float().norm() / 1e-2 / layer.weight.numel() ** 0.5
        assert moved < 0.5  # of steps of 1e-2 nearly everywhere


def test_a_gradient_that_is_asked_for_is_the_weights() -> None:
    layer, twin = layer_and_twin()
    optimizer = forge_dsl.fuse(layer, AdamW)
    x = torch.randn(5, 67)
    found, expected = (torch.autograd.grad(one(x).square().sum(), one.weight)[0] for one in (layer, twin))
    torch.testing.assert_close(found, expected)
    assert not optimizer.state


def test_autocast_computes_in_its_type() -> None:
    """A step differs by what torch rounds and a fused layer does not: the gradient, to bf16."""
    model, twin, start = gpt2(), gpt2(), gpt2()
    optimizer, reference = forge_dsl.fuse(model, SGD, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert train(model, optimizer, range(1)) == train(twin, reference, range(1))
    for ours, theirs, before in zip(model.parameters(), twin.parameters(), start.parameters(), strict=True):
        assert (ours - theirs).norm() <= 2**-8 * (theirs - before).norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_a_compiler_it_runs_eagerly_with_the_same_result(backend: str) -> None:
    torch.compiler.reset()
    model, twin = gpt2(), gpt2()
    optimizer, reference = forge_dsl.fuse(model, AdamW, eps=1e-4), forge_dsl.fuse(twin, AdamW, eps=1e-4)
    losses = train(model, optimizer, range(2), torch.compile(model, backend=backend))
    assert losses == pytest.approx(train(twin, reference, range(2)), abs=2e-6)
    assert largest_difference(model, twin) < 2e-6


def test_copies_evaluation_and_unfuse() -> None:
    model, plain = gpt2(), gpt2()
    optimizer = forge_dsl.fuse(model, AdamW)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model,
        forge_dsl.unfuse(copy.deepcopy(model)),
    ):
        with torch.no_grad():
            assert torch.equal(other(batch(0)).logits, plain(batch(0)).logits)
    train(model, optimizer, range(1))
    forge_dsl.unfuse(model)
    assert not any(isinstance(module.__dict__.get("forward"), FusedForward) for module in model.modules())
    loss = model(batch(1)).logits.sum()
    loss.backward()
    assert type(model.transformer.h[0].attn.c_attn.weight.grad) is Tensor


def test_weights_in_fp8_are_for_torchs_own_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Conv1D(64, 64)).bfloat16()
    optimizer = forge_dsl.fuse(model, AdamW, weight_dtype="fp8")
    assert [module.weight.dtype for module in model] == [torch.float8_e4m3fn, torch.bfloat16]
    reasons = {row.name: row.reason for row in optimizer.report().rows}
    assert reasons["1.weight"] == "linear, weight not in fp8: its layer is no torch.nn.Linear"
    model(torch.randn(3, 64).bfloat16()).sum().backward()
    optimizer.step()


def test_operands_that_do_not_fit_are_named() -> None:
    layer, _ = layer_and_twin()
    optimizer = forge_dsl.fuse(layer, AdamW)
    with pytest.raises(RuntimeError, match=r"x of shape \[4, 65\] does not fit weight of shape \[65, 67\]"):
        layer(torch.randn(4, 65))
    with pytest.raises(RuntimeError, match="expected one dtype"):
        layer(torch.randn(4, 67).bfloat16())
    assert not optimizer.state


def test_a_subclass_with_a_forward_of_its_own_is_left_alone() -> None:
    class Scaled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    optimizer = forge_dsl.fuse(layer, AdamW)
    assert {row.name: row.route for row in optimizer.report().rows}["0.weight"] == "step"
