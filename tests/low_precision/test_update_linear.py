"""`optimizer.update_linear`: a fused layer's update for a linear layer that somebody else wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_dsl import Scaled, testing
from forge_dsl.runtime import activations, gate, tickets
from forge_dsl.runtime.linear import fused_linear
from tests.low_precision.common import ARGUMENTS, assert_same, make, optimizer_class, parameter, snapshot
from tests.low_precision.operands import E4M3, whole_operand

launched = pytest.mark.skipif(
    not testing.can_launch(optimizer_class("AdamW").rule), reason="needs a GPU, or Triton's interpreter"
)


class Layer(torch.autograd.Function):
    """A linear layer whose backward hands x and dy over as `quantise` makes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, optimizer: Any, quantise: Any = lambda tensor: tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.optimizer, ctx.quantise, ctx.updated = optimizer, quantise, None
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        Layer.updated = ctx.optimizer.update_linear(weight, ctx.quantise(x), ctx.quantise(dy))
        return dx, None, None, None

    updated: bool | None = None


def quantised(x: Tensor) -> Scaled:
    return Scaled(*activations.encode(x))


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(testing.device())


def pair(**options: Any) -> tuple[nn.Parameter, Any]:
    weight = parameter(33, 67, dtype=torch.float32)
    return weight, make("AdamW", [weight], **options)


# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_steps_a_weight_as_a_fused_layer_does(name: str) -> None:
    runs = []
    for own in (True, False):
        weight, bias = parameter(33, 67, dtype=torch.float32), parameter(33, dtype=torch.float32)
        optimizer = make(name, [weight, bias])
        for step in range(3):
            x = some(2, 9, 67, seed=step).requires_grad_()
            y = Layer.apply(x, weight, optimizer) + bias if own else fused_linear(x, weight, bias, type(optimizer))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(optimizer))
    for got, want in zip(*runs, strict=True):
        assert_same(got, want, name)


def test_the_contract_of_a_step_is_that_of_a_fused_layer() -> None:
    weight, optimizer = pair()
    version = weight._version
    Layer.apply(some(9, 67), weight, optimizer).sum().backward()
    assert Layer.updated is True and weight._version > version
    with pytest.raises(RuntimeError, match="which was never stored"):
        weight.grad + 1
    with pytest.raises(RuntimeError, match="Call step\\(\\) first"):
        optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
    with pytest.raises(RuntimeError, match="call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    assert weight.grad is None


def test_x_and_dy_may_be_in_8_bits_with_the_bits_of_what_they_stand_for() -> None:
    runs = []
    for quantise in (quantised, lambda tensor: quantised(tensor).decode()):
        weight, optimizer = pair()
        for step in range(2):
            Layer.apply(some(9, 67, seed=step), weight, optimizer, quantise).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_it_works_outside_of_a_backward() -> None:
    x, dy = whole_operand(9, 67, 1), whole_operand(9, 33, 2)
    runs = []
    for own in (True, False):
        weight, optimizer = pair()
        if own:
            with torch.no_grad():
                assert optimizer.update_linear(weight, x, dy)
        else:
            fused_linear(x.decode(torch.float32), weight, None, type(optimizer)).backward(dy.decode(torch.float32))
        optimizer.step()
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_autocast_around_a_call_changes_nothing() -> None:
    runs = []
    for enabled in (True, False):
        weight, optimizer = pair(schedule="banded")
        with torch.no_grad(), torch.autocast(weight.device.type, torch.bfloat16, enabled=enabled):
            optimizer.update_linear(weight, some(9, 67), some(9, 33))
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_leading_dimensions_are_tokens() -> None:
    runs = []
    for shape in ((3, 4), (12,)):
        weight, optimizer = pair()
        with torch.no_grad():
            optimizer.update_linear(weight, some(12, 67).view(*shape, 67), some(12, 33).view(*shape, 33))
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_a_frozen_weight_and_a_backward_that_does_not_want_it_are_left_alone() -> None:
    weight, optimizer = pair()
    before = weight.detach().clone()
    x = some(9, 67).requires_grad_()
    torch.autograd.grad(Layer.apply(x, weight, optimizer).sum(), x)
    assert Layer.updated is False
    Layer.apply(x, weight, optimizer).sum().backward(inputs=[x])
    assert Layer.updated is False
    weight.requires_grad_(False)
    Layer.apply(x, weight, optimizer).sum().backward()
    assert Layer.updated is False
    assert torch.equal(weight, before) and weight.grad is None and not optimizer.state.get(weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_works_in_a_checkpointed_segment(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    runs = []
    for segmented in (False, True):
        weight, optimizer = pair()
        for step in range(2):
            x = some(9, 67, seed=step).requires_grad_()
            if segmented:
                y = checkpoint(lambda x, w=weight, o=optimizer: Layer.apply(x, w, o), x, use_reentrant=reentrant)
            else:
                y = Layer.apply(x, weight, optimizer)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_beside_fused_layers_and_ordinary_ones() -> None:
    first, second, third = (parameter(16, 16, seed=n, dtype=torch.float32) for n in range(3))
    optimizer = make("AdamW", [first, second, third])
    for step in range(2):
        h = fused_linear(some(5, 16, seed=step), first, None, type(optimizer)).tanh()
        F.linear(Layer.apply(h, second, optimizer).tanh(), third).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [float(optimizer.state[p]["step"]) for p in (first, second, third)] == [2, 2, 2]


# -- what it refuses, with nothing changed ----------------------------------------------------------------------------


def refused(optimizer: Any, weight: Any, x: Any, dy: Any, error: type[Exception], message: str) -> None:
    bindings = list(optimizer.bindings())
    before = [(binding.weight.detach().clone(), binding.updated) for binding in bindings]
    with torch.no_grad(), pytest.raises(error, match=message):
        optimizer.update_linear(weight, x, dy)
    for binding, (old, updated) in zip(bindings, before, strict=True):
        assert torch.equal(binding.weight, old) and binding.updated == updated


def test_operands_that_do_not_fit() -> None:
    weight, optimizer = pair()
    x, dy = some(9, 67), some(9, 33)
    refused(optimizer, weight, some(9, 66), dy, ValueError, r"x of shape \[9, 66\] does not fit .*expected \[..., 67\]")
    refused(optimizer, weight, x, some(9, 67), ValueError, r"dy of shape \[9, 67\] does not fit .*expected \[..., 33\]")
    refused(optimizer, weight, x, some(8, 33), ValueError, "x has 9 tokens and dy 8")
    refused(optimizer, weight, x, whole_operand(8, 33, 0), ValueError, "x has 9 tokens and dy 8")
    refused(optimizer, weight, x, dy.double(), TypeError, "dy of shape .* got torch.float64")
    refused(
        optimizer, weight, x.to(E4M3), dy, TypeError, r"come with their scales, as forge_dsl.Scaled\(codes, scales\)"
    )
    refused(optimizer, weight, [x], dy, TypeError, "x: expected a tensor or a forge_dsl.Scaled, got list")
    refused(optimizer, weight, x.to("meta"), dy, ValueError, "x is on meta, .* on (cpu|cuda:0)")


def test_weights_that_are_not_its_own() -> None:
    weight, optimizer = pair()
    x, dy = some(9, 67), some(9, 33)
    other = parameter(33, 67, dtype=torch.float32)
    message = "a weight .* that this AdamW does not have: pass the parameter itself"
    refused(optimizer, other, x, dy, ValueError, message)
    refused(optimizer, weight.detach().clone(), x, dy, ValueError, message)
    refused(optimizer, None, x, dy, ValueError, message)
    bias = parameter(33, dtype=torch.float32)
    refused(make("AdamW", [bias]), bias, x, dy, ValueError, r"takes weights \[out, in\]")
    make_newer = make("AdamW", [weight])
    refused(optimizer, weight, x, dy, RuntimeError, "was given to a newer optimizer")
    assert make_newer.has(weight)


def test_a_second_update_in_a_step() -> None:
    weight, optimizer = pair()
    x, dy = some(9, 67), some(9, 33)
    with torch.no_grad():
        optimizer.update_linear(weight, x, dy)
    refused(optimizer, weight, x, dy, RuntimeError, "already updated by an earlier backward since the last step")
    optimizer.step()
    refused(optimizer, weight, x, dy, RuntimeError, r"zero_grad\(\) was not called since")
    optimizer.zero_grad()
    with torch.no_grad():
        optimizer.update_linear(weight, x, dy)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


def test_hyper_parameters_that_changed_since_the_steps_first_update() -> None:
    weights = [parameter(4, 4, seed=n, dtype=torch.float32) for n in range(2)]
    optimizer = make("AdamW", weights)
    x = some(3, 4)
    with torch.no_grad():
        optimizer.update_linear(weights[0], x, x)
    optimizer.param_groups[0]["lr"] = 0.5
    refused(optimizer, weights[1], x, x, RuntimeError, "lr of a param group changed")


def test_a_gradient_that_came_by_another_route() -> None:
    weight, optimizer = pair()
    weight.grad = torch.zeros_like(weight)
    refused(optimizer, weight, some(9, 67), some(9, 33), RuntimeError, "already has an ordinary gradient")


def test_a_fused_layer_that_has_not_run_backward() -> None:
    weight, optimizer = pair()
    y = fused_linear(some(9, 67), weight, None, type(optimizer))
    refused(optimizer, weight, some(9, 67), some(9, 33), RuntimeError, "also used by a fused layer")
    del y
    with torch.no_grad():
        assert optimizer.update_linear(weight, some(9, 67), some(9, 33))


@pytest.mark.parametrize("inspected", [False, True])
def test_a_fused_layer_of_the_same_weight_in_one_backward(inspected: bool) -> None:
    """Found by a walk through the graph in a weight's first step; later by its version, or by the use that waits."""
    weight = parameter(16, 16, dtype=torch.float32)
    optimizer = make("AdamW", [weight])
    optimizer.binding_of(weight).inspected = inspected
    x = some(5, 16)
    with pytest.raises(RuntimeError, match=r"reaches the loss through|modified by an inplace operation"):
        fused_linear(Layer.apply(x, weight, optimizer).tanh(), weight, None, type(optimizer)).sum().backward()
    other = parameter(16, 16, dtype=torch.float32)
    optimizer = make("AdamW", [other])
    optimizer.binding_of(other).inspected = inspected
    before = other.detach().clone()
    with pytest.raises(RuntimeError, match=r"reaches the loss through|also used by a fused layer"):
        Layer.apply(fused_linear(x, other, None, type(optimizer)).tanh(), other, optimizer).sum().backward()
    assert torch.equal(other, before)


def test_a_compiled_use_that_has_not_run_backward() -> None:
    weight, optimizer = pair()
    ticket = tickets.issue(optimizer.binding_of(weight))
    refused(optimizer, weight, some(9, 67), some(9, 33), RuntimeError, "also used by a fused layer")
    del ticket
    with torch.no_grad():
        assert optimizer.update_linear(weight, some(9, 67), some(9, 33))


def test_grad_that_is_enabled() -> None:
    weight, optimizer = pair()
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="grad is enabled"):
        optimizer.update_linear(weight, some(9, 67), some(9, 33))
    x = some(9, 67).requires_grad_()
    with pytest.raises(RuntimeError, match="grad is enabled"):
        torch.autograd.grad(Layer.apply(x, weight, optimizer).square().sum(), x, create_graph=True)
    assert torch.equal(weight, before)


def test_a_weight_that_is_not_in_the_graph() -> None:
    weight, optimizer = pair()
    before = weight.detach().clone()
    y = Layer.apply(some(9, 67).requires_grad_(), weight.detach(), optimizer)
    with pytest.raises(RuntimeError, match="give the parameter itself to your autograd function"):
        y.sum().backward()
    assert torch.equal(weight, before)


def test_autograd_grad_of_the_weight() -> None:
    weight, optimizer = pair()
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad asks for the gradient of a weight"):
        torch.autograd.grad(Layer.apply(some(9, 67), weight, optimizer).sum(), weight)


@pytest.mark.parametrize("again", ["own", "ordinary"])
def test_a_second_use_deeper_in_the_graph(again: str) -> None:
    weight = parameter(16, 16, dtype=torch.float32)
    optimizer = make("AdamW", [weight])
    before = weight.detach().clone()
    x = some(5, 16)
    h = Layer.apply(x, weight, optimizer) if again == "own" else F.linear(x, weight)
    with pytest.raises(RuntimeError, match=r"reaches the loss through .* as well as through the function that calls"):
        Layer.apply(h.tanh(), weight, optimizer).sum().backward()
    assert torch.equal(weight, before)


def test_torch_compile_is_told_what_to_do() -> None:
    weight, optimizer = pair()
    x, dy = some(9, 67), some(9, 33)

    @torch.no_grad()
    def update() -> bool:
        return optimizer.update_linear(weight, x, dy)

    with pytest.raises(Exception, match=r"cannot be traced by torch\.compile"):
        torch.compile(update, backend="eager", fullgraph=True)()
    assert torch.compile(torch.compiler.disable(update), backend="eager")()


# -- inputs that fused layers save in 8 bits --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [pytest.param("fused", marks=launched), "banded"])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layers_codes_go_on_to_the_update_and_the_bits_are_those_of_decoding_first(
    dtype: torch.dtype, uses: int, schedule: str, monkeypatch
) -> None:
    runs, kinds = [], []
    apply = gate.update_inside_backward
    record = lambda o, b, w, x, dy: kinds.append(type(x)) or apply(o, b, w, x, dy)  # noqa: E731
    monkeypatch.setattr(gate, "update_inside_backward", record)
    for first in (False, True):
        if first:
            monkeypatch.setattr(activations, "operand", lambda c, s, dtype, _: activations.decode(c, s, dtype))
        weight = parameter(33, 67, dtype=dtype)
        optimizer = make("AdamW", [weight], saved_activations="fp8", schedule=schedule)
        for step in range(2):
            inputs = [some(11, 67, seed=10 * step + n).to(dtype) for n in range(uses)]
            sum(fused_linear(x, weight, None, type(optimizer)).square().sum() for x in inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(optimizer)[0])
    assert kinds == [Scaled, Scaled, Tensor, Tensor]
    assert_same(runs[0], runs[1])


def test_uses_whose_codes_cannot_be_joined_are_decoded() -> None:
    """One use without a token of input features saves nothing in 8 bits: x is as it is there."""
    weight, optimizer = pair(saved_activations="fp8")
    full, none = some(9, 67), some(0, 67)
    y = (
        fused_linear(full, weight, None, type(optimizer)).sum()
        + fused_linear(none, weight, None, type(optimizer)).sum()
    )
    y.backward()
    optimizer.step()
    other, plain = pair()
    fused_linear(
        activations.decode(*activations.encode(full), torch.float32), other, None, type(plain)
    ).sum().backward()
    plain.step()
    assert_same(snapshot(optimizer)[0], snapshot(plain)[0])


def test_the_gradient_of_autograd_grad_is_that_of_the_codes() -> None:
    weight, optimizer = pair(saved_activations="fp8")
    x = some(9, 67)
    (got,) = torch.autograd.grad(fused_linear(x, weight, None, type(optimizer)).sum(), weight)
    want = torch.ones(33, 9, device=x.device) @ activations.decode(*activations.encode(x), torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_code_is_read_as_more_than_its_type_holds(dtype: torch.dtype) -> None:
    """So that one definition serves, without a clamp that would hide an overflow elsewhere."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, 1.0, -largest], [largest / 1.02, 0.0, 3.0]], dtype=dtype)
    codes, scales = activations.encode(x)
    for read in {dtype, torch.float32}:
        back = Scaled(codes, scales).decode(read)
        assert back.isfinite().all()
        assert ((back.double() - x.double()).abs() <= largest / 16).all()
