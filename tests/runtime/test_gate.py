"""The gate counts a weight's uses in a backward, and the last of them updates the weight: who is counted, and when."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.handwritten import AdamW, linear, snapshot, unchanged


def pair() -> tuple[torch.nn.Parameter, AdamW]:
    weight = torch.nn.Parameter(torch.eye(3) + 0.1)
    return weight, AdamW([weight])


def steps(weight: torch.nn.Parameter, optimizer: AdamW) -> int:
    optimizer.step()
    return int(optimizer.state[weight]["step"])


def test_a_backward_that_starts_at_a_use_waits_for_the_others() -> None:
    weight, optimizer = pair()
    x = torch.ones(2, 3)
    old = weight.detach().clone()
    first = linear(x, weight)
    seen = []
    first.register_hook(seen.append)
    linear(first, weight).backward(torch.ones(2, 3))
    assert torch.equal(seen[0], torch.ones(2, 3) @ old) and steps(weight, optimizer) == 1


def test_a_use_that_gets_no_gradient_is_counted_too() -> None:
    weight, optimizer = pair()

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    x = torch.ones(2, 3, requires_grad=True)
    Half.apply(linear(x, weight), linear(2 * x, weight)).sum().backward()
    assert steps(weight, optimizer) == 1


def test_uses_without_any_gradient_leave_the_weight_alone() -> None:
    weight, optimizer = pair()

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    before = snapshot(optimizer)
    (Nothing.apply(linear(torch.ones(2, 3), weight)).sum() + weight.new_zeros((), requires_grad=True)).backward()
    assert unchanged(optimizer, before) and weight.grad is None


def test_a_gradient_asked_for_inside_backward_disturbs_no_count() -> None:
    weight, optimizer = pair()
    x = torch.ones(2, 3, requires_grad=True)
    started, asked = [], []
    first, second = linear(x, weight), linear(3 * x, weight)
    loss = first.sum() + second.sum()

    def hook(grad: torch.Tensor) -> None:
        if not started:
            started.append(True)  # the gradient that is asked for comes by here as well
            asked.append(torch.autograd.grad(loss, weight, retain_graph=True)[0])

    first.register_hook(hook)
    second.register_hook(hook)
    loss.backward(retain_graph=True)
    assert torch.equal(asked[0], torch.full((3, 3), 8.0)) and steps(weight, optimizer) == 1


def test_the_weight_as_input_of_its_own_layer_raises_before_anything_changes() -> None:
    weight, optimizer = pair()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="reaches the loss through FusedLinearBackward as well"):
        linear(weight, weight).sum().backward()
    assert unchanged(optimizer, before)


def test_a_forward_that_raised_is_not_in_the_way() -> None:
    weight, optimizer = pair()
    with pytest.raises(RuntimeError, match=r"x of shape \[2, 4\] does not fit") as held:
        linear(torch.ones(2, 4), weight)
    linear(torch.ones(2, 3), weight).sum().backward()
    assert held.value is not None and steps(weight, optimizer) == 1


def test_a_forward_that_raised_leaves_other_weights_alone_too() -> None:
    weight, optimizer = pair()
    other = torch.nn.Parameter(torch.eye(3))
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(RuntimeError, match="does not fit") as held:
        linear(torch.ones(2, 4), other)
    linear(torch.ones(2, 3), weight).sum().backward()
    assert held.value is not None and steps(weight, optimizer) == 1


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(2, 3), torch.zeros(()), torch.zeros(4)])
def test_a_bias_that_would_be_broadcast_raises(bias: torch.Tensor) -> None:
    weight, _optimizer = pair()
    with pytest.raises(RuntimeError, match=r"bias of shape .* does not fit"):
        linear(torch.ones(2, 3), weight, bias)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.ones(2, 3, dtype=torch.int64), TypeError),
        (torch.ones(2, 3, dtype=torch.bfloat16), RuntimeError),
        (torch.ones(2, 3, dtype=torch.float64), RuntimeError),
        (torch.ones(()), RuntimeError),
        (torch.ones(2, 3, device="meta"), RuntimeError),
    ],
)
def test_an_input_that_does_not_fit_is_named(x: torch.Tensor, error: type[Exception]) -> None:
    weight, _optimizer = pair()
    with pytest.raises(error, match=r"^x of shape"):
        linear(x, weight)
    with torch.autocast("cpu"), pytest.raises((TypeError, RuntimeError), match=r"^x of shape"):
        linear(x if x.dtype != torch.bfloat16 else x[:, :2], weight)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [([[1.0, 2.0, 3.0]], None, "x: expected a tensor, got list"), (torch.ones(2, 3), 3.0, "bias: expected a tensor")],
)
def test_what_is_no_tensor_is_named(x: object, bias: object, message: str) -> None:
    weight, _optimizer = pair()
    with pytest.raises(TypeError, match=message):
        linear(x, weight, bias)
    with torch.no_grad(), pytest.raises(TypeError, match=message):
        linear(x, weight, bias)


def test_a_weight_that_was_cast_between_two_uses_raises_at_the_second() -> None:
    weight, _optimizer = pair()
    kept = linear(torch.ones(2, 3), weight)
    weight.data = weight.data.bfloat16()
    with pytest.raises(RuntimeError, match="cast or moved while a graph that uses it is alive"):
        linear(torch.ones(2, 3, dtype=torch.bfloat16), weight)
    del kept
    with pytest.raises(RuntimeError, match=r"was torch.float32 on cpu when its optimizer was built"):
        linear(torch.ones(2, 3, dtype=torch.bfloat16), weight).sum().backward()


def test_functorch_is_told_to_use_something_else() -> None:
    weight, _optimizer = pair()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(lambda x: linear(x, weight))(torch.ones(2, 4, 3))


def test_the_newest_of_three_optimizers_owns_the_weight() -> None:
    weight, first = pair()
    second, third = AdamW([weight]), AdamW([weight])
    assert [o.binding_of(weight).owns for o in (first, second, third)] == [False, False, True]
    linear(torch.ones(2, 3), weight).sum().backward()
    assert steps(weight, third) == 1
    with pytest.raises(RuntimeError, match=r"was given to a newer optimizer"):
        second.step()
