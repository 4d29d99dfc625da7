"""Hazard: an in-place write that autograd does not see makes a second backward silent garbage. Versions are bumped."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim
from tests.runtime.handwritten import AdamW, Linear, snapshot, unchanged


def test_the_fused_update_bumps_the_version() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    version = layer.weight._version
    layer(torch.randn(4, 3)).sum().backward()
    assert layer.weight._version > version
    version = layer.bias._version
    optimizer.step()
    assert layer.bias._version > version


def test_a_kernel_that_autograd_does_not_see_bumps_it_too() -> None:
    """The Triton kernels write through pointers (here in the interpreter, unless there is a GPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight, bias = (torch.nn.Parameter(torch.ones(*shape, device=device)) for shape in ((2, 3), (2,)))
    optimizer = optim.SGD([weight, bias], schedule="fused")
    versions = weight._version, bias._version
    optim.sgd_linear(torch.ones(4, 3, device=device), weight, bias).sum().backward()
    optimizer.step()
    assert weight._version > versions[0] and bias._version > versions[1]


def test_another_graph_that_saved_the_old_weight_raises() -> None:
    layer = Linear(3, 2, bias=False)
    optimizer = AdamW(layer.parameters())
    x = torch.randn(4, 3, requires_grad=True)
    other = torch.nn.functional.linear(x, layer.weight)
    layer(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()
    del optimizer


@pytest.mark.parametrize("stepped", [False, True])
def test_a_second_backward_through_a_retained_graph_raises_and_changes_nothing(stepped: bool) -> None:
    model = torch.nn.Sequential(Linear(3, 4), torch.nn.Tanh(), Linear(4, 2))
    optimizer = AdamW(model.parameters())
    loss = model(torch.randn(5, 3)).sum()
    loss.backward(retain_graph=True)
    if stepped:
        optimizer.step()
        optimizer.zero_grad()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"Run the forward again|sum the losses"):
        loss.backward()
    assert unchanged(optimizer, before)


def test_input_gradients_after_the_update_raise() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    x = torch.randn(4, 3, requires_grad=True)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its old value is gone"):
        torch.autograd.grad(loss, x)
    del optimizer


def test_a_weight_changed_between_forward_and_backward_raises_before_anything_changes() -> None:
    model = torch.nn.Sequential(Linear(3, 4), torch.nn.Tanh(), Linear(4, 2))
    optimizer = AdamW(model.parameters())
    loss = model(torch.randn(5, 3)).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="modified in place between its forward and its backward"):
        loss.backward()
    assert unchanged(optimizer, before)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_raises_and_changes_nothing() -> None:
    layer = Linear(3, 2)
    optimizer = AdamW(layer.parameters())
    before = snapshot(optimizer)
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        layer(x).sum().backward(create_graph=True)
    assert unchanged(optimizer, before)
