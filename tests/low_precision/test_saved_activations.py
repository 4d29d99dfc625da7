"""Inputs of fused layers kept in 8 bits until backward: what that costs in accuracy, and what it saves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import forge_dsl
from forge_dsl import optim, testing
from forge_dsl.runtime import activations, compiled, gate
from forge_dsl.runtime.linear import fused_linear
from tests.low_precision.common import assert_same, make, parameter, snapshot

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Tokens of very different sizes, each with a spread of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 96, generator=generator) * torch.exp(torch.randn(64, 96, generator=generator))
    return (x * 10 ** torch.linspace(-4, 2, 64)[:, None]).to(testing.device(), dtype)


def restored(x: Tensor) -> Tensor:
    return activations.decode(*activations.encode(x), x.dtype)


def bound(x: Tensor) -> Tensor:
    """The stated error of each element, float64."""
    x = x.double().abs()
    return torch.maximum(x / 16, x.amax(-1, keepdim=True) * 2.0**-17)


# -- the encoding -----------------------------------------------------------------------------------------------------


@dtypes
def test_each_element_is_within_the_stated_error(dtype: torch.dtype) -> None:
    x = rows(dtype)
    # Below its least normal number fp16 has steps of 2^-24 itself.
    floor = 2.0**-25 if dtype == torch.float16 else 0.0
    error = (restored(x).double() - x.double()).abs()
    assert (error <= bound(x) + floor).all()
    assert error.mean() > 0


@dtypes
def test_what_is_read_back_is_kept_as_it_is(dtype: torch.dtype) -> None:
    """Decoding rounds nothing, so what comes out is a fixed point."""
    once = restored(rows(dtype))
    assert torch.equal(restored(once), once)


@dtypes
def test_the_largest_and_the_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    least = 2.0**-24 if dtype == torch.float16 else limits.tiny
    x = torch.tensor([[limits.max, 1.0], [-limits.max, 0.0], [least, -least], [0.0, -0.0]], dtype=dtype)
    back = restored(x)
    assert back.isfinite().all() and (back[2:].abs() == x[2:].abs()).all()
    assert ((back[:2, 0] - x[:2, 0]).double().abs() <= limits.max / 16).all()


@dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_and_leaves_the_rest_of_its_row(dtype: torch.dtype, bad: float) -> None:
    x = rows(dtype)
    want = restored(x)
    x[5, 7] = bad
    back = restored(x)
    assert back[5, 7].isnan()
    back[5, 7] = want[5, 7]
    rest = torch.ones(64, dtype=torch.bool)
    rest[5] = False
    assert torch.equal(back[rest], want[rest])
    assert ((back - x).double().abs()[5] <= bound(want * 17 / 16)[5])[torch.arange(96) != 7].all()


def test_every_shape_is_taken() -> None:
    for shape in ((7,), (3, 7), (2, 3, 7), (2, 1), (1, 1, 1)):
        x = torch.randn(shape)
        codes, scales = activations.encode(x)
        assert codes.shape == x.shape and scales.shape == (*x.shape[:-1], 1)
        assert restored(x).shape == x.shape
    strided = torch.randn(8, 6).t()
    assert torch.equal(restored(strided), restored(strided.contiguous()))


# -- the layer --------------------------------------------------------------------------------------------------------


def weight_gradient(x: Tensor, dy: Tensor, saved: str | None) -> Tensor:
    """dW that an SGD step with a rate of 1 subtracts from a weight of zeros, fp32."""
    weight = nn.Parameter(torch.zeros(dy.shape[1], x.shape[1], device=x.device))
    optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0, saved_activations=saved)
    fused_linear(x, weight, None, type(optimizer)).backward(dy)
    return -weight.detach().double()


def test_the_weight_gradient_is_within_the_error_of_its_inputs() -> None:
    x, dy = rows(torch.float32), torch.randn(64, 33, device=testing.device())
    exact = dy.double().T @ x.double()
    allowed = dy.double().abs().T @ bound(x) + 64 * 2.0**-24 * dy.double().abs().T @ x.double().abs() * 17 / 16
    error = (weight_gradient(x, dy, "fp8") - exact).abs()
    assert (error <= allowed).all()
    # Errors of tokens are independent: far from the bound, and a few percent of the gradient.
    assert 1e-3 < error.norm() / exact.norm() < 0.05


@dtypes
@pytest.mark.parametrize("leading", [(), (9,), (3, 5)])
def test_a_step_has_the_bits_of_a_step_on_the_quantised_input(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((*leading, 67), generator=generator).to(testing.device(), dtype)
    dy = torch.randn((*leading, 65), generator=generator).to(testing.device(), dtype)
    runs = []
    for saved, given in (("fp8", x), (None, restored(x))):
        weight, bias = parameter(65, 67, dtype=dtype), parameter(65, dtype=dtype)
        optimizer = make("AdamW", [weight, bias], saved_activations=saved)
        given = given.clone().requires_grad_()
        fused_linear(given, weight, bias, type(optimizer)).backward(dy)
        optimizer.step()
        runs.append((snapshot(optimizer), given.grad))
    for got, want in zip(runs[0][0], runs[1][0], strict=True):
        assert_same(got, want)
    assert torch.equal(runs[0][1], runs[1][1]), "dX does not depend on x"


def test_the_output_is_computed_from_the_whole_input() -> None:
    weight = parameter(65, 67)
    optimizer = make("AdamW", [weight], saved_activations="fp8")
    x = rows(torch.bfloat16)[:, :67]
    got = fused_linear(x, weight, None, type(optimizer))
    assert torch.equal(got, torch.nn.functional.linear(x, weight.detach()))


def test_under_autocast_the_cast_input_is_kept() -> None:
    runs = []
    x = rows(torch.float32)[:, :67]
    for saved, given in (("fp8", x), (None, restored(x.bfloat16()).float())):
        weight = parameter(65, 67, dtype=torch.float32)
        optimizer = make("AdamW", [weight], saved_activations=saved)
        with torch.autocast(testing.device().type, torch.bfloat16):
            y = fused_linear(given, weight, None, type(optimizer))
        y.backward(torch.ones_like(y))
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[0], runs[1])


def test_a_token_that_is_not_finite_stays_visible() -> None:
    x, dy = rows(torch.float32), torch.ones(64, 33, device=testing.device())
    x[5, 7] = math.inf
    gradient = weight_gradient(x, dy, "fp8")
    assert not gradient[:, 7].isfinite().any()
    assert gradient[:, torch.arange(96) != 7].isfinite().all()


def test_no_tokens_and_no_inputs() -> None:
    for tokens, features in ((0, 7), (3, 0)):
        weight = nn.Parameter(torch.ones(5, features))
        optimizer = make("AdamW", [weight], saved_activations="fp8")
        fused_linear(torch.randn(tokens, features), weight, None, type(optimizer)).sum().backward()
        optimizer.step()
        assert optimizer.state[weight]["step"] == 1


def test_the_input_may_change_after_forward() -> None:
    """Nothing of it is kept; the version is that of the encoding, which nobody else has."""
    weight = parameter(65, 67)
    optimizer = make("AdamW", [weight], saved_activations="fp8")
    x = rows(torch.bfloat16)[:, :67].contiguous()
    first = fused_linear(x, weight, None, type(optimizer))
    kept = restored(x)
    x.mul_(2)
    second = fused_linear(x, weight, None, type(optimizer))
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gate, "update_inside_backward", lambda _optimizer, _binding, _weight, x, _dy: seen.append(x.decode())
        )
        (first.sum() + second.sum()).backward()
    parts = seen[0].split(64)
    assert any(torch.equal(x, kept) for x in parts) and any(torch.equal(x, kept * 2) for x in parts)


# -- memory -----------------------------------------------------------------------------------------------------------


def saved_bytes(forward: Callable[[], Tensor], but: nn.Module) -> int:
    """Bytes of distinct memory that a graph keeps for backward, parameters left out."""
    found: dict[int, tuple[Tensor, int]] = {}
    own = {p.untyped_storage().data_ptr() for p in but.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            found[memory.data_ptr()] = tensor, memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for _, size in found.values())


class Shared(nn.Module):
    """Queries, keys and values of one input, which nothing else saves."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


@pytest.mark.parametrize(("make_model", "layers"), [(lambda: nn.Linear(64, 32, dtype=torch.bfloat16), 1), (Shared, 3)])
def test_a_bf16_input_takes_half_the_memory_and_a_byte_a_token_also_if_layers_share_it(make_model, layers: int) -> None:
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    sizes = []
    for saved in (None, "fp8"):
        model = make_model()
        optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations=saved)
        sizes.append(saved_bytes(lambda: model(x + 0), model))  # noqa: B023 - called at once
        assert optimizer.saved_activations == saved
    assert sizes == [128 * 64 * 2, 128 * 64 + 128]


def test_a_shared_input_is_encoded_once_and_again_after_it_has_changed(monkeypatch) -> None:
    calls = []
    encode = activations.encode
    monkeypatch.setattr(activations, "encode", lambda x: calls.append(x) or encode(x))
    model = Shared()
    optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations="fp8")
    x = torch.randn(128, 64).bfloat16()
    y = model(x)
    assert len(calls) == 1
    x.mul_(2)
    z = model(x)
    assert len(calls) == 2
    (y + z).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del y, z
    model(x)
    assert len(calls) == 3, "an encoding that no graph holds is not kept"


def test_neither_inputs_nor_encodings_are_kept_alive() -> None:
    model = Shared()
    optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations="fp8")
    before = len(activations._known)
    for _ in range(3):
        model(torch.randn(16, 64).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(activations._known) == before


# -- training ---------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer, steps: int = 40) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x) - x[:, :8].tanh()).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGDMomentum])
def test_a_model_trains_as_it_does_with_whole_inputs(cls) -> None:
    more = {"lr": 5e-3} if cls is optim.AdamW else {"lr": 0.3, "momentum": 0.9}
    runs = []
    for saved in (None, "fp8"):
        model = network()
        runs.append(train(model, forge_dsl.fuse(model, cls, saved_activations=saved, **more)))
    whole, eight = (sum(losses[-10:]) / 10 for losses in runs)
    assert runs[0] != runs[1]
    assert whole < 0.5 * runs[0][0], "it learns"
    assert abs(eight - whole) < 0.05 * whole


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_take_the_same_steps(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    runs = []
    for segmented in (False, True):
        model = network()
        optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations="fp8")
        for step in range(3):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if segmented else model(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(optimizer))
    for got, want in zip(*runs, strict=True):
        assert_same(got, want)


# -- the option -------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_optimizer_keeps_the_option() -> None:
    made = copy.deepcopy(make("AdamW", [parameter(4, 4)], saved_activations="fp8"))
    assert made.saved_activations == "fp8"


@pytest.mark.parametrize("wrong", ["int8", True, torch.float8_e4m3fn, ""])
def test_anything_else_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r'Invalid saved_activations: .*expected None or "fp8"'):
        make("AdamW", [parameter(4, 4)], saved_activations=wrong)


@pytest.mark.skipif(not compiled.SUPPORTED, reason="layers run eagerly in a compiled model of this torch")
def test_compiled_graphs_refuse_it() -> None:
    model = network()
    optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations="fp8")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r'0\.weight .*saved_activations="fp8" is not possible under torch.compile'):
        fast(torch.randn(4, 32))
    assert optimizer.saved_activations == "fp8"
