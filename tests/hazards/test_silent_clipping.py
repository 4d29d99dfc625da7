"""Hazard: clipping after backward saw `grad is None` and did nothing. The placeholder makes every such use raise."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from forge_dsl.runtime.placeholder import GradientPlaceholder
from tests.runtime.handwritten import AdamW, Linear


@pytest.fixture
def layer() -> Linear:
    layer = Linear(3, 2, bias=False)
    layer.optimizer = AdamW(layer.named_parameters())  # type: ignore[assignment] - keeps it alive
    layer(torch.randn(4, 3)).sum().backward()
    return layer


READS = {
    "clip_grad_norm_": lambda w: torch.nn.utils.clip_grad_norm_([w], 1.0),
    "clip_grad_norm_ foreach": lambda w: torch.nn.utils.clip_grad_norm_([w], 1.0, foreach=True),
    "clip_grad_value_": lambda w: torch.nn.utils.clip_grad_value_([w], 1.0),
    "get_total_norm": lambda w: torch.nn.utils.get_total_norm([w.grad]),
    "norm": lambda w: w.grad.norm(),
    "add": lambda w: w.grad + 1,
    "mul_": lambda w: w.grad.mul_(0.5),
    "zero_": lambda w: w.grad.zero_(),
    "copy": lambda w: torch.empty(2, 3).copy_(w.grad),
    "bool": lambda w: bool(w.grad),
    "index": lambda w: w.grad[0],
    "item": lambda w: w.grad.item(),
    "tolist": lambda w: w.grad.tolist(),
    "numpy": lambda w: w.grad.numpy(),
    "data_ptr": lambda w: w.grad.data_ptr(),
    "isfinite": lambda w: torch.isfinite(w.grad).all(),
    "detach": lambda w: w.grad.detach(),
    "clone": lambda w: w.grad.clone(),
    "to": lambda w: w.grad.to(torch.float64),
    "torch's optimizer": lambda w: torch.optim.SGD([w], lr=1.0).step(),
    "pickle": lambda w: pickle.dumps(w.grad),
    "all_reduce of parameters": lambda w: torch.nn.utils.parameters_to_vector([w.grad]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_any_use_of_the_gradient_raises_with_the_way_out(layer: Linear, read) -> None:
    weight = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight \[2, 3\], which was never stored.*torch\.nn\.functional\.linear"):
        read(layer.weight)
    assert torch.equal(layer.weight, weight)


CLIPPING = {name: read for name, read in READS.items() if "clip" in name or "norm" in name}


@pytest.mark.parametrize("clip", CLIPPING.values(), ids=CLIPPING.keys())
def test_clipping_says_how_frameworks_leave_it_out(layer: Linear, clip) -> None:
    with pytest.raises(RuntimeError, match=r"max_grad_norm=0.*gradient_clip_val=None"):
        clip(layer.weight)


def test_metadata_and_clearing_work(layer: Linear) -> None:
    grad = layer.weight.grad
    assert isinstance(grad, GradientPlaceholder)
    assert grad.shape == (2, 3) and grad.dtype == torch.float32 and grad.device.type == "cpu" and grad is not None
    assert "no gradient was stored" in repr(grad)
    layer.weight.grad = None
    assert layer.weight.grad is None


def test_a_model_can_be_copied_and_saved_while_it_holds_placeholders(layer: Linear, tmp_path) -> None:
    del layer.optimizer
    copied = copy.deepcopy(layer)
    assert copied.weight.grad is None and torch.equal(copied.weight, layer.weight)
    torch.save(layer, tmp_path / "model.pt")
    leaf = torch.zeros(2, 3, requires_grad=True)
    leaf.grad = layer.weight.grad
    assert copy.deepcopy(leaf).grad is None


def test_zeroing_in_place_clears_placeholders_and_zeroes_the_rest() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.zeros(2))
