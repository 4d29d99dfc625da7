"""Without zero_grad(), torch adds every step's gradients up; a fused weight cannot, so the next backward says so."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim
from forge_dsl.runtime.linear import fused_linear


def test_a_backward_without_zero_grad_since_the_last_step_raises_before_anything_changes() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([weight, bias], lr=1.0)
    x = torch.ones(2, 4)
    fused_linear(x, weight, bias, optim.SGD).sum().backward()
    optimizer.step()
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was not called"):
        fused_linear(x, weight, bias, optim.SGD).sum().backward()
    assert torch.equal(weight, before)
    optimizer.zero_grad()
    fused_linear(x, weight, bias, optim.SGD).sum().backward()
    optimizer.step()


def test_module_zero_grad_will_do() -> None:
    layer = torch.nn.Linear(4, 3)
    optimizer = optim.AdamW(layer.parameters())
    for _ in range(3):
        fused_linear(torch.ones(2, 4), layer.weight, layer.bias, optim.AdamW).sum().backward()
        optimizer.step()
        layer.zero_grad()
    assert optimizer.state[layer.weight]["step"] == 3


@pytest.mark.parametrize("clear", [lambda layer: layer.zero_grad(), lambda layer: setattr(layer.weight, "grad", None)])
def test_gradients_cleared_between_backward_and_step_are_noticed(clear) -> None:
    layer = torch.nn.Linear(4, 3)
    optimizer = optim.SGD(layer.parameters(), lr=1.0)
    fused_linear(torch.ones(2, 4), layer.weight, layer.bias, optim.SGD).sum().backward()
    clear(layer)
    bias = layer.bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"cleared between backward and step\(\).*call step\(\) again"):
        optimizer.step()
    assert torch.equal(layer.bias, bias)
    optimizer.step()
    optimizer.zero_grad()
    fused_linear(torch.ones(2, 4), layer.weight, layer.bias, optim.SGD).sum().backward()
    optimizer.step()
