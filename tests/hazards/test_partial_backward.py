"""Hazard: `torch.autograd.grad(loss, x)` and `backward(inputs=[x])` stepped the weight. Only wanted ones step."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, integers, linear, same_bits, snapshot, unchanged


@pytest.fixture
def case():
    weight = torch.nn.Parameter(integers(4, 3))
    optimizer = AdamW([weight], lr=0.1)
    x = integers(5, 3, seed=1).requires_grad_()
    dy = integers(5, 4, seed=2)
    return weight, optimizer, x, dy


def test_gradients_of_inputs_alone_change_nothing(case) -> None:
    weight, optimizer, x, dy = case
    before = snapshot(optimizer)
    (dx,) = torch.autograd.grad((linear(x, weight) * dy).sum(), x)
    assert same_bits(dx, dy @ weight.detach())
    (linear(x, weight) * dy).sum().backward(inputs=[x])
    assert same_bits(x.grad, dx)
    assert weight.grad is None and unchanged(optimizer, before)


def test_autograd_grad_returns_the_exact_weight_gradient_and_updates_nothing(case) -> None:
    weight, optimizer, x, dy = case
    before = snapshot(optimizer)
    loss = (linear(x, weight) * dy).sum() + linear(2 * x, weight).sum()
    (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert same_bits(grad, dy.T @ x.detach() + torch.ones(4, 5) @ (2 * x.detach()))
    grad_w, grad_x = torch.autograd.grad(loss, [weight, x], retain_graph=True)
    assert same_bits(grad, grad_w) and grad_x.shape == x.shape
    assert unchanged(optimizer, before)
    loss.backward()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_backward_with_the_weight_among_its_inputs_steps_it(case) -> None:
    weight, optimizer, x, dy = case
    (linear(x, weight) * dy).sum().backward(inputs=[weight])
    optimizer.step()
    assert x.grad is None and optimizer.state[weight]["step"] == 1


def test_two_weights_of_which_one_is_wanted(case) -> None:
    weight, _, x, _ = case
    other = torch.nn.Parameter(integers(2, 4, seed=3))
    optimizer = AdamW([weight, other])
    old = other.detach().clone()
    linear(linear(x, weight), other).sum().backward(inputs=[weight])
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
    assert other not in optimizer.state and same_bits(other.detach(), old)


def test_a_gradient_of_the_input_first_and_a_step_afterwards(case) -> None:
    weight, optimizer, x, dy = case
    loss = (linear(x, weight) * dy).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_a_graph_freed_without_stepping_its_weight_is_not_in_the_way(case) -> None:
    weight, optimizer, x, dy = case
    loss = (linear(x, weight) * dy).sum()
    torch.autograd.grad(loss, x)
    (linear(x, weight) * dy).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1 and loss.requires_grad


def test_grad_of_a_sum_that_ignores_an_output_leaves_its_weight_alone(case) -> None:
    weight, optimizer, x, _ = case
    outputs = torch.unbind(torch.stack([linear(x, weight).sum(), x.sum()]))
    before = snapshot(optimizer)
    x.sum().backward()
    assert unchanged(optimizer, before) and outputs[0].requires_grad
