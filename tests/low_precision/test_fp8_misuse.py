"""What people do to weights in fp8 as if they were numbers: each works, or is refused with the way out."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint

import forge_dsl
from forge_dsl import fp8, optim
from forge_dsl.runtime import coded
from tests.low_precision.common import assert_same, optimizer_class
from tests.low_precision.test_fp8_layers import CODES, bits, build, everything, fuse, inputs, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:the state dict holds")
WRITTEN = r"written\s+in place.*forge_dsl\.fp8\.assign"


def numbers(shape: torch.Size, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------ writes in place

WRITES = {
    "copy_": lambda w: w.copy_(torch.ones(w.shape)),
    "fill_": lambda w: w.fill_(1.0),
    "zero_": lambda w: w.zero_(),
    "ones_": nn.init.ones_,
    "constant_": lambda w: nn.init.constant_(w, 0.5),
    "a row": lambda w: w[3].fill_(1.0),
    "a detached alias": lambda w: w.detach().fill_(1.0),
    "codes of another": lambda w: w.copy_(coded.encode(numbers(w.shape))[0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_in_place_is_noticed_wherever_codes_are_read(write) -> None:
    model = build()
    optimizer = fuse(model, state_dtype="int8")
    train(model, optimizer, range(1))
    weight = model[0].weight
    with torch.no_grad():
        write(weight)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=rf"0\.weight \[67, 65\] is kept.*{WRITTEN}"):
        model(inputs(1, model))
    with pytest.raises(RuntimeError, match=WRITTEN), torch.no_grad():
        model(inputs(1, model))
    with pytest.raises(RuntimeError, match=WRITTEN), torch.no_grad():
        optimizer.update_linear(weight, inputs(1, model), torch.ones(9, 67).bfloat16())
    with pytest.raises(RuntimeError, match=WRITTEN):
        fp8.decode(weight)
    with pytest.raises(RuntimeError, match=WRITTEN):
        forge_dsl.unfuse(model)
    # Neither a move, nor another optimizer, nor a copy, nor a file makes it right.
    model._apply(lambda tensor: tensor.clone())
    fuse(model)
    for same in (model, copy.deepcopy(model), whole(model)):
        with pytest.raises(RuntimeError, match=WRITTEN), torch.no_grad():
            same(inputs(1, model))
    assert_same(dict(model.state_dict()), {name: before[name] for name in model.state_dict()})
    fp8.assign(model[0].weight, numbers(weight.shape))
    train(model, fuse(model), range(1))


def test_a_write_of_scales_is_noticed_too() -> None:
    model = build()
    optimizer = fuse(model)
    assert optimizer.has(model[2].weight)
    with torch.no_grad():
        model[2].weight_scale.view(torch.uint8).fill_(127)
    with pytest.raises(RuntimeError, match=WRITTEN):
        model(inputs(0, model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_assign_writes_numbers_and_the_run_goes_on(dtype: torch.dtype) -> None:
    model = build()
    optimizer = fuse(model)
    train(model, optimizer, range(2))
    weight, scales, values = model[0].weight, model[0].weight_scale, numbers(model[0].weight.shape).to(dtype)
    nn.init.ones_(weight)
    fp8.assign(weight, values)
    want = coded.encode(values)
    assert model[0].weight is weight and model[0].weight_scale is scales
    assert torch.equal(bits(weight), bits(want[0])) and torch.equal(bits(scales), bits(want[1]))
    train(model, optimizer, range(2, 4))
    assert optimizer.state_dict()["state"][0]["step"] == 4
    fp8.assign(weight, model[2].weight.new_zeros(weight.shape, dtype=torch.float32))
    assert (fp8.decode(weight) == 0).all()
    own = fp8.parameter(values[:, :4].float())
    fp8.assign(own, fp8.parameter(2 * values[:, :4].float()))
    assert torch.equal(fp8.decode(own), 2 * fp8.decode(fp8.parameter(values[:, :4].float())))


def test_what_assign_cannot_take_is_refused_before_anything_is_written() -> None:
    model = build()
    fuse(model)
    before = dict(copy.deepcopy(model.state_dict()))
    weight = model[0].weight
    with pytest.raises(ValueError, match=r"values: expected shape \[67, 65\]"):
        fp8.assign(weight, torch.ones(65, 67))
    with pytest.raises(TypeError, match="expected floating-point"):
        fp8.assign(weight, torch.ones(67, 65, dtype=torch.int64))
    with pytest.raises(TypeError, match="values: expected a tensor, got float"):
        fp8.assign(weight, 1.0)
    with pytest.raises(TypeError, match=r"not kept in fp8.*weight\.copy_"):
        fp8.assign(model[4].weight, torch.ones(8, 96))
    assert_same(dict(model.state_dict()), before)
    with torch.no_grad():
        model(inputs(0, model))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_loading_is_a_right_write_and_makes_up_for_a_wrong_one(assign: bool, plain: bool) -> None:
    model, other = build(), build(seed=1)
    fuse(model)
    if not plain:
        fuse(other)
    nn.init.ones_(model[0].weight)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    fuse(other)
    with torch.no_grad():
        assert torch.equal(model(inputs(0, model)), other(inputs(0, model)))


def test_a_load_that_fails_does_not_hide_a_write() -> None:
    model, other = build(), build(seed=1)
    optimizer, _ = fuse(model), fuse(other)
    nn.init.ones_(model[0].weight)
    saved = dict(other.state_dict())
    saved["0.weight_scale"] = saved["0.weight_scale"][:1].contiguous()
    before = bits(model[0].weight)
    with pytest.raises(RuntimeError, match=r"0\.weight_scale has shape \[1, 67\], expected \[2, 67\]"):
        model.load_state_dict(saved)
    assert torch.equal(bits(model[0].weight), before)
    del saved["0.weight"], saved["0.weight_scale"]
    model.load_state_dict(saved, strict=False)
    assert optimizer.has(model[0].weight)
    with pytest.raises(RuntimeError, match=WRITTEN):
        model(inputs(0, model))


# ------------------------------------------------------------------------------------------------------- frozen weights


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("weight_dtype", ["fp8", None])
@pytest.mark.parametrize("copied", [False, True])
def test_a_frozen_weight_stays_as_it_is_when_fuse_is_called_again(weight_dtype, copied: bool) -> None:
    model = build()
    train(model, fuse(model), range(1))
    model = copy.deepcopy(model) if copied else model
    model[0].weight.requires_grad_(False)
    before = bits(model[0].weight), bits(model[0].weight_scale), bits(model[2].weight)
    optimizer = fuse(model, weight_dtype=weight_dtype)
    assert not optimizer.has(model[0].weight)
    train(model, optimizer, range(2))
    assert torch.equal(bits(model[0].weight), before[0]) and torch.equal(bits(model[0].weight_scale), before[1])
    assert not torch.equal(bits(model[2].weight), before[2])
    assert {row.name: row.route for row in optimizer.report().rows}["0.weight"] == "frozen"
    forge_dsl.unfuse(model)


@pytest.mark.parametrize("copied", [False, True])
def test_adapters_train_over_a_frozen_base_in_fp8(copied: bool) -> None:
    model = build()
    fuse(model)
    model = copy.deepcopy(model) if copied else model
    model.requires_grad_(False)
    numbers_before = fp8.decode(model[0].weight)
    torch.manual_seed(1)
    model[0] = Adapter(model[0], 64).bfloat16()
    optimizer = fuse(model)
    assert (model[0].base.weight.dtype, model[0].down.weight.dtype) == (CODES, CODES)
    x = inputs(0, model)
    with torch.no_grad():
        low = F.linear(F.linear(x, fp8.decode(model[0].down.weight)), fp8.decode(model[0].up.weight))
        assert torch.equal(model[0](x), F.linear(x, numbers_before, model[0].base.bias) + low)
    before = bits(model[0].down.weight)
    losses = train(model, optimizer, range(6))
    assert torch.tensor(losses).isfinite().all() and not torch.equal(bits(model[0].down.weight), before)
    assert torch.equal(fp8.decode(model[0].base.weight), numbers_before)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


# ----------------------------------------------------------------------------------- helpers of distributed checkpoints


@pytest.mark.parametrize("name", ["AdamW", "SGDMomentum", "Lion"])
@pytest.mark.parametrize("full", [False, True])
def test_the_helpers_resume_a_run_before_its_first_step(name: str, full: bool, tmp_path) -> None:
    options = dcp.StateDictOptions(full_state_dict=full, cpu_offload=full)
    model = build()
    optimizer = fuse(model, name)
    train(model, optimizer, range(2))
    weights, states = dcp.get_state_dict(model, optimizer, options=options)
    saved = {"model": weights, "optimizer": states}
    distributed_checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other = build(seed=1)
    again = fuse(other, name)
    numbers_before = fp8.decode(other[0].weight)
    places = dict(zip(("model", "optimizer"), dcp.get_state_dict(other, again, options=options), strict=True))
    assert torch.equal(fp8.decode(other[0].weight), numbers_before)
    assert all(p.grad is None for p in other.parameters())
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    distributed_checkpoint.load(places, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_state_dict(
        other, again, model_state_dict=places["model"], optim_state_dict=places["optimizer"], options=options
    )
    assert_same(everything(other, again), everything(model, optimizer))


def test_the_helpers_leave_nothing_behind_where_a_weight_was_written() -> None:
    model = build()
    optimizer = fuse(model)
    nn.init.ones_(model[0].weight)
    dcp.get_state_dict(model, optimizer)
    assert optimizer.param_groups[0]["lr"] > 0 and all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match=WRITTEN):
        model(inputs(0, model))


def test_a_zero_gradient_is_that_of_a_layer_without_tokens() -> None:
    runs = []
    for ordinary in (False, True):
        model = build()
        optimizer = fuse(model, weight_decay=0.1)
        train(model, optimizer, range(1))
        weight = model[0].weight
        if ordinary:
            weight.grad = torch.zeros_like(weight)
        else:
            model[0](inputs(0, model)[:0]).sum().backward()
            model[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        runs.append(everything(model, optimizer))
        assert optimizer.state[weight]["step"] == 2
    assert_same(runs[1], runs[0])


# --------------------------------------------------------------------------------------------------- weights of another


def test_functional_call_uses_the_scales_of_the_weights_that_it_is_given() -> None:
    model, other = build(), build(seed=1)
    fuse(model)
    optimizer = fuse(other)
    # Scales that differ everywhere.
    fp8.assign(other[0].weight, 64 * fp8.decode(other[0].weight))
    x = inputs(0, model)
    before = dict(copy.deepcopy(model.state_dict()))
    with torch.no_grad():
        want = other(x)
        own = model(x)
        for given in (dict(other.named_parameters()), other.state_dict(), copy.deepcopy(other.state_dict())):
            assert torch.equal(torch.func.functional_call(model, given, (x,)), want)
            assert torch.equal(model(x), own)
        bare = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
        with pytest.raises(RuntimeError, match="is codes without scales"):
            torch.func.functional_call(model, bare, (x,))
        mine = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, mine, (x,)), own)
    assert_same(dict(model.state_dict()), before)
    held = other.state_dict()
    for _ in range(2):
        torch.func.functional_call(model, dict(other.named_parameters()), (x,)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(model, held, (x,)), other(x))
    assert_same(dict(model.state_dict()), before)


def test_a_weight_that_was_replaced_by_one_of_codes_needs_its_scales() -> None:
    model = build()
    optimizer = fuse(model)
    old, scales = model[0].weight, model[0].weight_scale
    model[0].weight = nn.Parameter(old.detach().clone())
    with pytest.raises(RuntimeError, match=r"codes without scales.*fp8\.attach"):
        model(inputs(0, model))
    fp8.attach(model[0].weight, scales.clone())
    with torch.no_grad():
        y = model(inputs(0, model))
        model[0].weight = old
        assert torch.equal(model(inputs(0, model)), y) and optimizer.has(old)
    model[0].weight = nn.Parameter(coded.encode(4 * fp8.decode(old))[0])
    fp8.attach(model[0].weight, coded.encode(4 * fp8.decode(old))[1])
    train(model, fuse(model), range(2))
    other = build()
    fuse(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(fp8.decode(other[0].weight), fp8.decode(model[0].weight))


@pytest.mark.parametrize("again", ["fuse", "unfuse"])
def test_a_weight_that_was_replaced_by_one_of_numbers_is_one_of_numbers(again: str) -> None:
    model, other = build(), build(seed=1)
    optimizer = fuse(model)
    replaced = model[0].weight = nn.Parameter(numbers(model[0].weight.shape).bfloat16())
    before = replaced.detach().clone()
    model.bfloat16()
    with torch.no_grad():
        assert torch.equal(model[0](inputs(0, model)), F.linear(inputs(0, model), before, model[0].bias))
    kept = fuse(other)
    with pytest.raises(RuntimeError, match=r"0\.weight is torch\.float8.*fuse\(\) again"):
        model.load_state_dict(other.state_dict())
    assert torch.equal(replaced, before) and kept.has(other[0].weight)
    if again == "unfuse":
        forge_dsl.unfuse(model)
        assert torch.equal(model[0].weight, before) and list(model.state_dict()) == list(build().state_dict())
        return
    optimizer = fuse(model)
    assert model[0].weight is replaced and torch.equal(bits(replaced), bits(coded.encode(before)[0]))
    train(model, optimizer, range(1))
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("how", [copy.deepcopy, whole], ids=["deepcopy", "torch.save"])
def test_the_numbers_of_a_copy_are_known_before_its_first_forward(how) -> None:
    model = build()
    fuse(model)
    other = how(model)
    assert torch.equal(fp8.decode(other[0].weight), fp8.decode(model[0].weight))
    assert fp8.scales(other[0].weight) is other[0].weight_scale
    again = how(other.to(torch.float32))
    assert fp8.decode(again[0].weight).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- what messages say


def test_the_message_for_a_tensor_that_is_not_in_codes_says_so() -> None:
    for function in (fp8.decode, fp8.scales):
        with pytest.raises(TypeError, match=r"shape \[3, 3\], torch\.float32, is not kept in fp8 codes"):
            function(torch.ones(3, 3))
    codes, scales = coded.encode(torch.ones(64, 64))
    for wrong, match in (
        (lambda: fp8.parameter([[1.0]]), "weight: expected a tensor, got list"),
        (lambda: fp8.attach(codes, None), "scales: expected a tensor, got NoneType"),
        (lambda: fp8.attach(None, scales), "weight: expected a tensor, got NoneType"),
        (lambda: fp8.attach(codes, scales, torch.int8), "dtype: expected torch.float32"),
        (lambda: fp8.decode([1.0]), "weight: expected a tensor, got list"),
        (lambda: fp8.decode(fp8.parameter(torch.ones(4, 4)), torch.float64), "dtype: expected torch.float32"),
    ):
        with pytest.raises(TypeError, match=match):
            wrong()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, CODES])
def test_an_input_in_a_type_that_layers_do_not_compute_in(dtype: torch.dtype, autocast: bool, grad: bool) -> None:
    model = build()
    optimizer = fuse(model)
    assert optimizer.has(model[0].weight)
    x = inputs(0, model).to(dtype)
    match = rf"x of shape \[9, 65\] is {re.escape(str(dtype))}.*fp32, bf16 or fp16, this one in torch\.bfloat16"
    cast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.set_grad_enabled(grad), cast, pytest.raises(TypeError, match=match):
        model[0](x)


def test_the_missing_gradient_of_such_a_weight_names_a_way_that_exists() -> None:
    model = build()
    optimizer = fuse(model)
    model(inputs(0, model)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight.*kept in fp8.*unfuse") as found:
        model[0].weight.grad + 1
    assert "autograd.grad" not in str(found.value)
    optimizer.step()


def test_a_model_in_double_says_what_layers_compute_in_and_goes_on_in_single() -> None:
    model = build(torch.float32)
    optimizer = fuse(model)
    model.double()
    with pytest.raises(TypeError, match=r"float64.*compute in fp32, bf16 or fp16"):
        model(torch.randn(9, 65, dtype=torch.float64))
    model.float()
    train(model, optimizer, range(1))


def test_an_fp8_checkpoint_becomes_one_of_plain_torch() -> None:
    model = build()
    train(model, fuse(model), range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = forge_dsl.unfuse(copy.deepcopy(model)).state_dict()
    other = build(seed=1)
    other.load_state_dict(plain)
    with torch.no_grad():
        assert torch.equal(other(inputs(0, model)), model(inputs(0, model)))


def test_a_weight_added_later_keeps_its_type() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    optimizer = forge_dsl.fuse(model, optimizer_class("AdamW"), weight_dtype="fp8", lr=1e-3)
    model[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].weight]})
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(1))
    assert model[0].weight.dtype == torch.bfloat16 and not torch.equal(model[0].weight, before)
    assert isinstance(optimizer, optim.AdamW)
