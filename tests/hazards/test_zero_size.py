"""Hazard: kernels that fail on, or ignore, a dimension of size zero."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.runtime.handwritten import AdamW, linear

SIZES = [0, 1, 3]


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), list(itertools.product(SIZES, SIZES, SIZES)))
@pytest.mark.parametrize("bias", [True, False])
def test_every_dimension_may_be_empty(tokens: int, inputs: int, outputs: int, bias: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(outputs, inputs))
    b = torch.nn.Parameter(torch.ones(outputs)) if bias else None
    optimizer = AdamW([weight] if b is None else [weight, b], lr=0.1)
    x = torch.ones(tokens, inputs, requires_grad=True)
    y = linear(x, weight, b)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, b))
    y.sum().backward()
    optimizer.step()
    assert x.grad.shape == x.shape
    assert optimizer.state[weight]["step"] == 1
    assert not weight.numel() or not torch.equal(weight, torch.ones_like(weight))
    if b is not None:
        assert b.grad.shape == (outputs,)


def test_an_empty_parameter_of_another_shape() -> None:
    parameter = torch.nn.Parameter(torch.empty(2, 0, 3))
    optimizer = AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3), (1, 2, 0, 3)])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    weight, b = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4))
    x = torch.randn(*leading, 3, requires_grad=True)
    y = torch.nn.functional.linear(x, weight, b)
    dy = torch.randn(y.shape)
    dx, grad, db = torch.autograd.grad(y, [x, weight, b], dy)
    optimizer = AdamW([weight, b])
    ours = linear(x, weight, b)
    assert torch.equal(ours, y)
    our_dx, our_grad, our_db = torch.autograd.grad(ours, [x, weight, b], dy)
    # The same products, summed in an order of the library's choice: at most 12 terms.
    torch.testing.assert_close(our_dx, dx, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_grad, grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_db, db, rtol=1e-6, atol=1e-6)
    del optimizer
