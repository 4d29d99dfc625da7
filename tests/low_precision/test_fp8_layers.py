"""Models whose fused layers keep their weights in fp8: what a state dict, a copy, a cast or a refusal does to them."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import forge_dsl
from forge_dsl import fp8, optim
from forge_dsl.runtime import coded
from forge_dsl.runtime.linear import fused_linear
from tests.low_precision.common import ARGUMENTS, assert_same, optimizer_class, through_a_file

CODES, SCALES = torch.float8_e4m3fn, torch.float8_e8m0fnu
# Codes of states are no numbers to torch, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:the state dict holds")


def build(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(65, 67), nn.GELU(), nn.Linear(67, 96, bias=False), nn.LayerNorm(96), nn.Linear(96, 8)
    return nn.Sequential(*layers).to(dtype)


def fuse(model: nn.Module, name: str = "AdamW", **options):
    return forge_dsl.fuse(model, optimizer_class(name), **{**ARGUMENTS[name], "weight_dtype": "fp8", **options})


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bytes."""
    return tensor.detach().clone().view(torch.uint8)


def inputs(step: int, model: nn.Module, features: int = 65) -> Tensor:
    dtype = next(p.dtype for p in model.parameters() if p.dtype != CODES)
    return torch.randn(9, features, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model: nn.Module, optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(inputs(step, model)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model: nn.Module, optimizer) -> dict[str, Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(value)
    return {name: value.detach().clone() for name, value in found.items()}


# ------------------------------------------------------------------------------------------------- what the layers are


def test_parameters_stay_the_same_objects_and_the_state_dict_holds_codes_and_scales() -> None:
    model = build()
    before, numbers = dict(model.named_parameters()), model[0].weight.detach().clone()
    optimizer = fuse(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    held = {name: (value.dtype, tuple(value.shape)) for name, value in model.state_dict().items()}
    assert held["0.weight"] == (CODES, (67, 65)) and held["0.weight_scale"] == (SCALES, (2, 67))
    assert held["2.weight"] == (CODES, (96, 67)) and held["4.weight"] == (torch.bfloat16, (8, 96))
    assert "4.weight_scale" not in held and held["0.bias"][0] == torch.bfloat16
    codes, scales = coded.encode(numbers)
    assert torch.equal(bits(model[0].weight), bits(codes)) and torch.equal(bits(model[0].weight_scale), bits(scales))
    with torch.no_grad():
        x = inputs(0, model)
        assert torch.equal(model[0](x), F.linear(x, coded.decode(codes, scales, x.dtype), model[0].bias))
    train(model, optimizer, range(3))
    assert not torch.equal(bits(model[0].weight), bits(codes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_the_input_is_that_of_the_old_weight(dtype: torch.dtype) -> None:
    model = build(dtype)
    optimizer = fuse(model, lr=1.0)
    assert optimizer.has(model[2].weight)
    old = fp8.decode(model[2].weight)
    x = torch.randn(2, 3, 67, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    model[2](x).backward(dy)
    assert torch.equal(x.grad, (dy.reshape(6, 96) @ old).view(2, 3, 67))
    assert not torch.equal(fp8.decode(model[2].weight), old)


def test_autocast_decides_what_a_layer_computes_in() -> None:
    model = build(torch.float32)
    optimizer = fuse(model)
    x = torch.randn(9, 65, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](x)
        want = F.linear(x, fp8.decode(model[0].weight, torch.bfloat16), model[0].bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, want)
    y.float().sum().backward()
    optimizer.step()
    assert x.grad is not None and x.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"expected one dtype, or torch\.autocast"):
        model[0](x.bfloat16())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 64)
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 80, bias=False)
        self.head.weight = self.embedding.weight
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.across = nn.Linear(64, 64, bias=False)
        self.across.weight = nn.Parameter(self.across.weight.detach().clone().t())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.across(self.frozen(self.b(self.a(self.embedding(tokens))))))


def test_what_cannot_be_in_fp8_keeps_its_type_and_the_report_says_why() -> None:
    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = fuse(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {
        "embedding.weight": torch.bfloat16,
        "a.weight": CODES,
        "frozen.weight": torch.bfloat16,
        "across.weight": torch.bfloat16,
    }
    rows = {row.name: row for row in optimizer.report().rows}
    assert rows["a.weight"].reason == "linear, weight in fp8"
    assert rows["a.weight"].weight == 64 * 64 + 64 and rows["a.weight"].gradient == 64 * 64 * 2
    assert rows["across.weight"].reason == "linear, weight not in fp8: it is not contiguous in memory"
    assert "tied" in rows["embedding.weight"].reason and rows["embedding.weight"].route == "step"
    assert rows["frozen.weight"].reason == "requires no gradient"
    small = build()
    reasons = {row.name: row.reason for row in fuse(small).report().rows}
    assert reasons["4.weight"] == "linear, weight not in fp8: it has fewer than 4096 numbers"


def test_layers_that_share_a_weight_share_its_scales_and_step_it_once() -> None:
    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = fuse(model)
    assert model.a.weight_scale is model.b.weight_scale
    model(torch.arange(7)).float().square().mean().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][1]["step"] == 1
    loaded = copy.deepcopy(model)
    assert loaded.a.weight is loaded.b.weight and loaded.a.weight_scale is loaded.b.weight_scale
    forge_dsl.unfuse(model)
    assert model.a.weight is model.b.weight and model.b.weight.dtype == torch.bfloat16


def test_a_frozen_weight_passes_gradients_through_and_stands_still() -> None:
    model = build()
    optimizer = fuse(model)
    train(model, optimizer, range(1))
    model[2].weight.requires_grad_(False)
    before = bits(model[2].weight)
    x = inputs(0, model, 67).requires_grad_()
    model[2](x).sum().backward()
    assert torch.equal(x.grad, torch.ones(9, 96, dtype=x.dtype) @ fp8.decode(model[2].weight))
    optimizer.step()
    assert torch.equal(bits(model[2].weight), before)


# --------------------------------------------------------------------------------------------------------------- memory


def test_no_decoded_weight_is_kept_for_backward_nor_outlives_it() -> None:
    model = build()
    optimizer = fuse(model)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs(0, model)).float().square().mean()
    weights = [t for t in saved if tuple(t.shape) in {(67, 65), (65, 67), (96, 67), (67, 96)}]
    assert {t.dtype for t in weights} == {CODES} and len(weights) == 2
    addresses = {model[0].weight.data_ptr(), model[2].weight.data_ptr()}
    assert {t.data_ptr() for t in weights} == addresses
    del weights
    assert _numbers_alive() == 0
    loss.backward()
    optimizer.step()
    # What is left are the states, which are bf16 too.
    assert _numbers_alive() == len(optimizer.rule.spec.states) * 2


def _numbers_alive() -> int:
    """Tensors of the size of a weight in a type of numbers."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    weights = [tensor for tensor in tensors if tuple(tensor.shape) in {(67, 65), (96, 67)}]
    return sum(tensor.dtype in (torch.bfloat16, torch.float32, torch.float16) for tensor in weights)


def test_bytes_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).bfloat16()
    optimizer = forge_dsl.fuse(model, optim.AdamW, weight_dtype="fp8", state_dtype="int8")
    assert optimizer.report().bytes_per_parameter == pytest.approx(3 * (1 + 1 / 64))


# ---------------------------------------------------------------------------------------------- state dicts and copies


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGDMomentum", "Adagrad", "Lion"])
@pytest.mark.parametrize("state", ["int8", None])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(name: str, state: str | None) -> None:
    model = build()
    optimizer = fuse(model, name, seed=3, state_dtype=state)
    train(model, optimizer, range(2))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = build(seed=1)
    again = fuse(other, name, seed=4, state_dtype=state)
    again.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["model"])
    assert_same(everything(other, again), everything(model, optimizer))
    assert train(model, optimizer, range(2, 4)) == train(other, again, range(2, 4))
    assert_same(everything(other, again), everything(model, optimizer))


def test_a_safetensors_file_holds_the_model(tmp_path) -> None:
    files = pytest.importorskip("safetensors.torch")
    model = build()
    optimizer = fuse(model)
    train(model, optimizer, range(1))
    other = build(seed=1)
    fuse(other)
    files.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(files.load_file(tmp_path / "model.safetensors"))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    # A file of bytes, for formats that know no 8-bit floats.
    raw = {n: t.view(torch.uint8) if t.dtype in (CODES, SCALES) else t for n, t in model.state_dict().items()}
    another = build(seed=2)
    fuse(another)
    another.load_state_dict(raw)
    assert_same(dict(another.state_dict()), dict(model.state_dict()))


def test_an_ordinary_state_dict_is_encoded() -> None:
    model, plain = build(), build(seed=1)
    fuse(model)
    model.load_state_dict(plain.state_dict())
    codes, scales = coded.encode(plain[0].weight)
    assert torch.equal(bits(model[0].weight), bits(codes)) and torch.equal(bits(model[0].weight_scale), bits(scales))
    assert torch.equal(model[0].bias, plain[0].bias)


@pytest.mark.parametrize("wrong", ["no scales", "numbers and scales", "scales of another type"])
def test_a_state_dict_that_does_not_fit_leaves_the_layer_alone(wrong: str) -> None:
    model = build()
    fuse(model)
    given = build(seed=1)
    fuse(given)
    saved = dict(given.state_dict())
    if wrong == "no scales":
        del saved["0.weight_scale"]
    elif wrong == "numbers and scales":
        saved["0.weight"] = saved["0.weight"].float()
    else:
        saved["0.weight_scale"] = saved["0.weight_scale"].float()
    before = bits(model[0].weight), bits(model[0].weight_scale)
    with pytest.raises(RuntimeError, match=r"0\.weight(_scale)? is torch"):
        model.load_state_dict(saved)
    assert torch.equal(bits(model[0].weight), before[0]) and torch.equal(bits(model[0].weight_scale), before[1])


def whole(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, whole], ids=["deepcopy", "torch.save"])
def test_copies_of_model_and_optimizer_go_on_with_the_same_bits(how) -> None:
    model = build()
    optimizer = fuse(model, state_dtype="int8")
    train(model, optimizer, range(2))
    other, again = how((model, optimizer))
    assert other[0].weight is not model[0].weight and other[0].weight_scale is not model[0].weight_scale
    assert train(model, optimizer, range(2, 4)) == train(other, again, range(2, 4))
    assert_same(everything(other, again), everything(model, optimizer))


def test_a_copy_of_a_model_evaluates_and_trains_once_it_has_an_optimizer() -> None:
    model = build()
    optimizer = fuse(model)
    other = copy.deepcopy(model)
    before = bits(model[0].weight)
    with torch.no_grad():
        assert torch.equal(other(inputs(0, model)), model(inputs(0, model)))
    with pytest.raises(RuntimeError, match="no optimizer has it"):
        other(inputs(0, model))
    again = forge_dsl.fuse(other, optimizer_class("AdamW"), **ARGUMENTS["AdamW"])
    assert train(other, again, range(2)) == pytest.approx(train(model, optimizer, range(2)))
    assert other[0].weight.dtype == CODES and not torch.equal(bits(model[0].weight), before)
    assert_same(everything(other, again), everything(model, optimizer))


def test_a_model_whose_optimizer_was_not_kept_is_told_so() -> None:
    model = build()
    fuse(model)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"its optimizer was deleted.* keep what fuse\(\) returns"):
        model(inputs(0, model))


def test_assigned_tensors_need_a_new_optimizer() -> None:
    model = build()
    optimizer = fuse(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="does not have it"):
        model(inputs(0, model))
    optimizer = fuse(model)
    train(model, optimizer, range(2))


# ---------------------------------------------------------------------------------------------------------------- casts


def test_casts_leave_the_codes_alone_and_change_what_the_layer_computes_in() -> None:
    model = build()
    optimizer = fuse(model)
    codes, scales = model[0].weight, model[0].weight_scale
    before = bits(codes), bits(scales)
    steps = range(1)
    for cast, dtype in (
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.float(), torch.float32),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to("cpu", torch.float32), torch.float32),
        (lambda m: m.cpu(), torch.float32),
        (lambda m: m.bfloat16(), torch.bfloat16),
    ):
        cast(model)
        assert model[0].weight is codes and model[0].weight_scale is scales
        assert (codes.dtype, scales.dtype) == (CODES, SCALES)
        assert torch.equal(bits(codes), before[0]) and torch.equal(bits(scales), before[1])
        assert model[0].bias.dtype == dtype == coded.compute_dtype(codes)
        with torch.no_grad():
            assert model(inputs(0, model)).dtype == dtype
    train(model, optimizer, steps)
    assert list(dict(model.named_parameters())) == list(dict(build().named_parameters()))


def test_a_move_of_memory_takes_the_scales_along() -> None:
    """What `.to(device)` does, with a copy in the place of another device."""
    model = build()
    optimizer = fuse(model)
    old = model[0].weight.data_ptr(), model[0].weight_scale.data_ptr()
    want = everything(model, optimizer)
    model._apply(lambda tensor: tensor.clone())
    assert old[0] != model[0].weight.data_ptr() and old[1] != model[0].weight_scale.data_ptr()
    assert_same(everything(model, optimizer), want)
    other = build()
    assert train(model, optimizer, range(2)) == train(other, fuse(other), range(2))


def test_a_cast_of_the_bytes_themselves_is_refused_with_nothing_changed() -> None:
    model = build()
    fuse(model)
    want = {name: value.clone() for name, value in model[0].state_dict().items()}
    with pytest.raises(TypeError, match="kept in fp8 codes"):
        model[0].type(torch.float16)
    assert_same(dict(model[0].state_dict()), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unfuse_gives_ordinary_weights_back_and_the_optimizer_goes_on(dtype: torch.dtype) -> None:
    model = build(dtype)
    optimizer = fuse(model, state_dtype="int8")
    train(model, optimizer, range(2))
    numbers = fp8.decode(model[0].weight)
    loss = model(inputs(0, model)).float().square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="call step\\(\\) before"):
        forge_dsl.unfuse(model)
    assert model[0].weight.dtype == CODES
    optimizer.step()
    optimizer.zero_grad()
    numbers = fp8.decode(model[0].weight)
    forge_dsl.unfuse(model)
    assert model[0].weight.dtype == dtype and torch.equal(model[0].weight, numbers)
    assert list(model.state_dict()) == list(build().state_dict())
    train(model, optimizer, range(3))
    assert not torch.equal(model[0].weight, numbers)
    model.load_state_dict(build(seed=1).state_dict())
    copy.deepcopy(model).half()


# ----------------------------------------------------------------------------------------------------- refusals, or not


def untouched(model: nn.Module, change) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change()
    assert_same(dict(model.state_dict()), before)
    assert "forward" not in model[0].__dict__ and "_apply" not in model[0].__dict__


def test_what_cannot_work_is_refused_before_anything_is_changed() -> None:
    model = build()

    def refused(match: str, error=ValueError, **options) -> None:
        with pytest.raises(error, match=match):
            fuse(model, **options)

    untouched(model, lambda: refused("Invalid weight_dtype", weight_dtype="int8"))
    untouched(model, lambda: refused("Invalid weight_dtype", weight_dtype=torch.bfloat16))
    untouched(model, lambda: refused("Invalid weight_dtype", weight_dtype=8))
    untouched(model, lambda: refused("extra_bits=8", extra_bits=8))
    untouched(model, lambda: refused("Invalid learning rate", lr=-1.0))
    model(inputs(0, model)).sum().backward()
    untouched(model, lambda: refused("has a gradient"))


def test_codes_without_their_scales_are_refused() -> None:
    codes, scales = coded.encode(torch.randn(64, 64))
    weight = nn.Parameter(codes)
    with pytest.raises(TypeError, match="its scales are not known"):
        optim.AdamW([weight])
    with pytest.raises(RuntimeError, match="its scales are not known"):
        fp8.decode(weight)
    fp8.attach(weight, scales)
    optim.AdamW([weight])
    with pytest.raises(ValueError, match="bits beside a weight belong to bf16"):
        optim.AdamW([weight], extra_bits=8)
    for wrong in (scales.view(torch.uint8), scales[:, :1], scales.t()):
        with pytest.raises(TypeError, match="scales of shape"):
            fp8.attach(weight, wrong)
    with pytest.raises(TypeError, match="expected fp32, bf16 or fp16"):
        fp8.parameter(torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected \\[out, in\\]"):
        fp8.parameter(torch.zeros(4))


def test_gradients_that_have_no_type_are_refused() -> None:
    model = build()
    optimizer = fuse(model)
    before = everything(model, optimizer)
    loss = model(inputs(0, model)).float().square().mean()
    with pytest.raises(RuntimeError, match="kept in codes"):
        torch.autograd.grad(loss, model[0].weight)
    assert_same(everything(model, optimizer), before)
    x = inputs(0, model).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).float().square().mean(), x)
    assert gradient.isfinite().all()
    assert_same(everything(model, optimizer), before)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="has an ordinary gradient"):
        optimizer.step()
    assert_same(everything(model, optimizer), before)


def test_a_second_backward_before_step_is_refused_as_for_any_fused_weight() -> None:
    model = build()
    optimizer = fuse(model)
    model(inputs(0, model)).sum().backward()
    after = bits(model[0].weight)
    with pytest.raises(RuntimeError, match="already updated by an earlier backward"):
        model(inputs(1, model)).sum().backward()
    assert torch.equal(bits(model[0].weight), after)
    optimizer.step()


def test_codes_that_are_written_between_forward_and_backward_are_noticed() -> None:
    model = build()
    optimizer = fuse(model)
    assert optimizer.has(model[0].weight)
    loss = model(inputs(0, model)).sum()
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.clone())
    with pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"):
        loss.backward()


def test_checkpointed_blocks_have_the_same_trajectory() -> None:
    runs = []
    for wrap in (False, True):
        model = build()
        optimizer = fuse(model)
        for step in range(3):
            x = inputs(step, model)
            y = checkpoint(model, x, use_reentrant=False) if wrap else model(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(everything(model, optimizer))
    assert_same(runs[1], runs[0])


def test_param_groups_and_schedulers_work_as_ever() -> None:
    model = build()
    groups = [
        {"params": [model[0].weight], "lr": 0.0, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p is not model[0].weight], "lr": 0.1},
    ]
    optimizer = fuse(model, params=groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    # Without a rate numbers stay what they are; a block whose largest was rounded down may have a smaller scale now.
    before = fp8.decode(model[0].weight), fp8.decode(model[2].weight)
    train(model, optimizer, range(1))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.05]
    assert torch.equal(fp8.decode(model[0].weight), before[0])
    assert not torch.equal(fp8.decode(model[2].weight), before[1])


def test_states_that_exist_from_construction_follow_the_weight() -> None:
    model = build(torch.float32)
    optimizer = fuse(model, "Adagrad", initial_accumulator_value=0.5)
    held = optimizer.state[model[0].weight]
    assert held["sum"].dtype == torch.bfloat16 and (held["sum"] == 0.5).all()
    assert optimizer.state[model[4].weight]["sum"].dtype == torch.float32


def test_a_decoded_state_dict_is_one_of_torch_optim() -> None:
    model = build()
    optimizer = forge_dsl.fuse(model, optim.AdamW, weight_dtype="fp8", state_dtype="int8")
    train(model, optimizer, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = optimizer.decoded_state_dict()
    plain = forge_dsl.unfuse(copy.deepcopy(model))
    theirs = torch.optim.AdamW(plain.parameters())
    theirs.load_state_dict(saved)
    plain(inputs(0, plain)).sum().backward()
    theirs.step()


def test_under_torch_compile_such_layers_are_breaks_in_the_graph() -> None:
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = build()
        optimizer = fuse(model)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(3):
            call(inputs(step, model)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(everything(model, optimizer))
    assert_same(runs[1], runs[0])


def test_it_goes_together_with_activations_in_8_bits_and_with_layers_of_ones_own() -> None:
    model = build()
    optimizer = fuse(model, saved_activations="fp8", state_dtype="int8")
    losses = train(model, optimizer, range(5))
    assert all(torch.tensor(losses).isfinite())
    weights = [fp8.parameter(torch.randn(70, 66, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    x, dy = torch.randn(9, 66), torch.randn(9, 70)
    optimizers = [optim.AdamW([weight], lr=1e-2) for weight in weights]
    fused_linear(x, weights[0], None, optim.AdamW).backward(dy)
    with torch.no_grad():
        assert optimizers[1].update_linear(weights[1], x, dy)
    assert torch.equal(bits(weights[0]), bits(weights[1]))
    assert torch.equal(bits(fp8.scales(weights[0])), bits(fp8.scales(weights[1])))
