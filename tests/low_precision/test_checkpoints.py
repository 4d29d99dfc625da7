"""Checkpoints hold codes, scales, bits beside a weight and the position of the draws, and drop what no longer fits."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import optim, testing
from tests.low_precision.common import (
    FORMATS,
    assert_same,
    elementwise_steps,
    linear_steps,
    make,
    mixed,
    parameter,
    snapshot,
    through_a_file,
)

EVERY = {**FORMATS, "int8, extra 8": {"state_dtype": "int8", "extra_bits": 8}, "mixed": None}
# Codes are no numbers to torch, which is said once: see test_export_says_that_codes_are_not_numbers.
pytestmark = pytest.mark.filterwarnings("ignore:the state dict holds")
forms = pytest.mark.parametrize("form", EVERY)


def saved_whole(value):
    """Pickled by torch.save; pickle itself cannot load torch's 8-bit floats, which are the scales of fp8."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "torch.save": saved_whole}


def options_of(form: str, name: str = "AdamW") -> dict:
    options = EVERY[form]
    return mixed(name) if options is None else options


def parameters() -> list[nn.Parameter]:
    images = parameter(2, 3, 23, 31, seed=3).data
    wide = parameter(40, 130, seed=4).data
    return [
        parameter(65, 67),
        parameter(67, seed=1),
        parameter(2, 3, 23, 31, seed=2),
        nn.Parameter(images.to(memory_format=torch.channels_last)),
        nn.Parameter(wide[1:36, 2:128:2]),
    ]


def twin(source: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of the same values and layouts, as a loaded model has them."""
    made = parameters()
    with torch.no_grad():
        for p, value in zip(made, source, strict=True):
            p.copy_(value)
    return made


def train(optimizer, held: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        elementwise_steps(optimizer, held[1:], range(step, step + 1))
        linear_steps(optimizer, held[0], range(step, step + 1))


def assert_all_same(got, want) -> None:
    for number, (ours, theirs) in enumerate(zip(snapshot(got), snapshot(want), strict=True)):
        assert_same(ours, theirs, f"parameter {number}")


@forms
@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGDMomentum", "Adagrad"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(name: str, form: str) -> None:
    options = options_of(form, name)
    if name == "SGD" and isinstance(options.get("state_dtype"), dict):
        options = {"extra_bits": 8}
    held = parameters()
    optimizer = make(name, held, seed=11, **options)
    train(optimizer, held, range(2))
    saved = through_a_file(optimizer.state_dict())
    resumed = twin(held)
    again = make(name, resumed, seed=12, **options)
    again.load_state_dict(saved)
    assert_all_same(again, optimizer)
    train(optimizer, held, range(2, 4))
    train(again, resumed, range(2, 4))
    assert_all_same(again, optimizer)
    assert again.state_dict()["state"][0].keys() == optimizer.state_dict()["state"][0].keys()


def test_a_state_dict_says_what_it_holds() -> None:
    held = parameters()
    optimizer = make("AdamW", held, seed=5, state_dtype={"exp_avg": "int8", "exp_avg_sq": "fp8"}, extra_bits=8)
    train(optimizer, held, range(2))
    entry = through_a_file(optimizer.state_dict())["state"][0]
    assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.uint8
    assert entry["exp_avg_scale"].dtype == torch.uint8 and entry["exp_avg_scale"].shape == (2, 65)
    assert entry["exp_avg_sq_scale"].dtype == torch.float8_e8m0fnu
    assert entry["weight_low"].dtype == torch.int8
    assert entry["rounding"].tolist() == [5, 0, 2]
    assert optimizer.state_dict()["state"][2]["rounding"].tolist() == [5, 2, 2]


@forms
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_copies_go_on_with_the_same_bits(name: str, how: str, form: str) -> None:
    options = {"extra_bits": 8} if name == "SGD" and form == "mixed" else options_of(form, name)
    held = [parameter(65, 67), parameter(67, seed=1)]
    optimizer = make(name, held, seed=3, **options)
    other = make(name, twin_of(held), seed=4, **options)
    train(optimizer, held, range(2))
    other.load_state_dict(optimizer.state_dict())  # draws go on from the seed of the checkpoint
    with torch.no_grad():
        for mine, theirs in zip(other.param_groups[0]["params"], held, strict=True):
            mine.copy_(theirs)
    source = other.param_groups[0]["params"]
    made, others = COPIES[how]([other, source])
    for ran, values in ((other, source), (made, others)):
        train(ran, values, range(2, 4))
    train(optimizer, held, range(2, 4))
    assert_all_same(other, optimizer)
    assert_all_same(made, optimizer)


def test_an_optimizer_without_fp8_can_be_pickled() -> None:
    held = [parameter(65, 67), parameter(67, seed=1)]
    optimizer = make("AdamW", held, seed=3, state_dtype="int8", extra_bits=8)
    train(optimizer, held, range(2))
    made, others = pickle.loads(pickle.dumps([optimizer, held]))
    train(optimizer, held, range(2, 4))
    train(made, others, range(2, 4))
    assert_all_same(made, optimizer)


def twin_of(held: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in held]


# -- bits beside a weight ---------------------------------------------------------------------------------------------


class Extra:
    """A bf16 weight with 8 more bits, some steps into a run whose rate is now 0: the 24 bits stay what they are."""

    def __init__(self) -> None:
        self.weight = parameter(65, 67)
        self.optimizer = make("SGD", [self.weight], lr=1e-3, weight_decay=0.0, extra_bits=8)
        elementwise_steps(self.optimizer, [self.weight], range(2))
        self.optimizer.param_groups[0]["lr"] = 0.0
        assert self.low.any()

    @property
    def low(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["weight_low"]

    def step(self) -> None:
        elementwise_steps(self.optimizer, [self.weight], range(2, 3))


@pytest.fixture
def extra() -> Extra:
    return Extra()


def test_extra_bits_stay_while_nothing_else_writes_the_weight(extra: Extra) -> None:
    before, weight = extra.low.clone(), extra.weight.detach().clone()
    extra.step()
    assert torch.equal(extra.low, before) and torch.equal(extra.weight.detach(), weight)


@pytest.mark.parametrize("how", ["in place", "load_state_dict"])
def test_extra_bits_are_dropped_when_something_else_wrote_the_weight(extra: Extra, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            extra.weight.mul_(2)
        else:
            model = nn.Linear(67, 65, bias=False, dtype=torch.bfloat16)
            model.weight = extra.weight
            model.load_state_dict({"weight": torch.randn(65, 67).bfloat16()})
    written = extra.weight.detach().clone()
    extra.step()
    assert not extra.low.any() and torch.equal(extra.weight.detach(), written)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_extra_bits_are_kept_whichever_is_loaded_first(extra: Extra, first: str) -> None:
    saved, weight, low = through_a_file(extra.optimizer.state_dict()), extra.weight.detach().clone(), extra.low.clone()
    fresh = parameter(65, 67, seed=9)
    again = make("SGD", [fresh], lr=0.0, weight_decay=0.0, extra_bits=8)
    for what in (first, "optimizer" if first == "model" else "model"):
        if what == "optimizer":
            again.load_state_dict(saved)
        else:
            with torch.no_grad():
                fresh.copy_(weight)
    elementwise_steps(again, [fresh], range(2, 3))
    assert torch.equal(again.state[fresh]["weight_low"], low) and torch.equal(fresh.detach(), weight)


def test_extra_bits_of_another_weight_are_dropped_on_loading(extra: Extra) -> None:
    saved = through_a_file(extra.optimizer.state_dict())
    fresh = parameter(65, 67, seed=9)
    before = fresh.detach().clone()
    again = make("SGD", [fresh], lr=0.0, weight_decay=0.0, extra_bits=8)
    again.load_state_dict(saved)
    elementwise_steps(again, [fresh], range(2, 3))
    assert not again.state[fresh]["weight_low"].any() and torch.equal(fresh.detach(), before)


def test_bits_that_no_longer_fit_are_not_saved_as_if_they_did(extra: Extra) -> None:
    """The weight is written, saved before the next step, and loaded with it."""
    with torch.no_grad():
        extra.weight.mul_(3)
    saved, weight = through_a_file(extra.optimizer.state_dict()), extra.weight.detach().clone()
    fresh = nn.Parameter(weight.clone())
    again = make("SGD", [fresh], lr=0.0, weight_decay=0.0, extra_bits=8)
    again.load_state_dict(saved)
    elementwise_steps(again, [fresh], range(2, 3))
    assert not again.state[fresh]["weight_low"].any() and torch.equal(fresh.detach(), weight)


@pytest.mark.parametrize("how", COPIES)
def test_bits_that_no_longer_fit_are_not_copied_as_if_they_did(extra: Extra, how: str) -> None:
    with torch.no_grad():
        extra.weight.mul_(3)
    made, weight = COPIES[how]([extra.optimizer, extra.weight])
    before = weight.detach().clone()
    elementwise_steps(made, [weight], range(2, 3))
    assert not made.state[weight]["weight_low"].any() and torch.equal(weight.detach(), before)


def test_saving_between_loading_the_optimizer_and_loading_the_model_loses_nothing(extra: Extra) -> None:
    saved, weight, low = through_a_file(extra.optimizer.state_dict()), extra.weight.detach().clone(), extra.low.clone()
    fresh = parameter(65, 67, seed=9)
    again = make("SGD", [fresh], lr=0.0, weight_decay=0.0, extra_bits=8)
    again.load_state_dict(saved)
    again.load_state_dict(through_a_file(again.state_dict()))
    with torch.no_grad():
        fresh.copy_(weight)
    elementwise_steps(again, [fresh], range(2, 3))
    assert torch.equal(again.state[fresh]["weight_low"], low)


# -- torch.optim ------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).to(testing.device())


def steps(layers: nn.Module, optimizer, which: range) -> None:
    for step in which:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).to(testing.device())
        (layers(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_of_torch_goes_on_in_an_int8_optimizer_with_the_states_that_it_holds() -> None:
    layers = model()
    theirs = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    steps(layers, theirs, range(3))
    ours = forge_dsl.fuse(layers, optim.AdamW, lr=1e-3, state_dtype="int8")
    ours.load_state_dict(theirs.state_dict())
    for key, entry in ours.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[name], theirs.state_dict()["state"][key][name])
    steps(layers, ours, range(3, 6))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_decoded_state_dict_goes_on_in_torch_within_the_error_of_the_codes(form: str) -> None:
    layers = model()
    ours = forge_dsl.fuse(layers, optim.AdamW, lr=1e-3, state_dtype=form)
    steps(layers, ours, range(20))
    plain = copy.deepcopy(layers)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    decoded = through_a_file(ours.decoded_state_dict())
    assert {name for entry in decoded["state"].values() for name in entry} == {"step", "exp_avg", "exp_avg_sq"}
    theirs.load_state_dict(decoded)
    for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.decoded_state_dict()["state"][_index(ours, p)]["exp_avg"], theirs.state[q]["exp_avg"])
    before = [p.detach().clone() for p in layers.parameters()]
    steps(layers, ours, range(20, 30))
    steps(plain, theirs, range(20, 30))
    for p, q, start in zip(layers.parameters(), plain.parameters(), before, strict=True):
        assert (p - q).norm() < 0.2 * (q - start).norm()


def _index(optimizer, parameter) -> int:
    return next(i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is parameter)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_export_says_that_codes_are_not_numbers(form: str) -> None:
    layers = model()
    ours = forge_dsl.fuse(layers, optim.AdamW, state_dtype=form)
    steps(layers, ours, range(1))
    with pytest.warns(UserWarning, match=r"'exp_avg' of 0.weight .*8-bit codes.*decoded_state_dict"):
        ours.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.decoded_state_dict()


def test_codes_and_numbers_that_torch_would_round_are_each_told_once() -> None:
    layers = model().to(torch.bfloat16)
    ours = forge_dsl.fuse(layers, optim.AdamW, state_dtype={"exp_avg": "int8", "exp_avg_sq": "fp32"})
    for parameter_ in layers.parameters():
        parameter_.grad = torch.ones_like(parameter_)
    ours.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours.state_dict()
        ours.state_dict()
    assert ["8-bit codes" in str(one.message) for one in told] == [True, False]


def test_a_trip_through_torch_keeps_the_weight_and_loses_only_what_torch_cannot_keep() -> None:
    weight = parameter(65, 67)
    ours = make("AdamW", [weight], amsgrad=False, state_dtype=torch.float32, extra_bits=8)
    elementwise_steps(ours, [weight], range(2))
    theirs = torch.optim.AdamW([weight])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load_state_dict(ours.state_dict())  # casts every entry to bf16
    before = weight.detach().clone()
    ours.load_state_dict(theirs.state_dict())
    ours.param_groups[0]["lr"] = 0.0
    elementwise_steps(ours, [weight], range(2, 3))
    assert torch.equal(weight.detach(), before) and not ours.state[weight]["weight_low"].any()


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(exp_avg_scale=e["exp_avg_scale"][:1]), "'exp_avg' of .*scales of shape .2, 65."),
        (lambda e: e.update(exp_avg_scale=e["exp_avg_scale"].float()), "'exp_avg' of .*uint8 or float8_e8m0fnu"),
        (lambda e: e.update(exp_avg=e["exp_avg"].float()), "'exp_avg' of .*expected uint8 codes"),
        (
            lambda e: e.pop("exp_avg_scale"),
            "'exp_avg' of .* is torch.uint8 of shape .65, 67.; expected fp32, bf16 or fp16",
        ),
        (lambda e: e.pop("exp_avg"), "lacks 'exp_avg'"),
        (lambda e: e.update(weight_low=e["weight_low"][:3]), "'weight_low' of .*is torch.int8 of shape .3, 67."),
        (lambda e: e.update(exp_avg_scales=e["exp_avg_scale"]), "no state 'exp_avg_scales'"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change, message: str) -> None:
    weight = parameter(65, 67)
    optimizer = make("AdamW", [weight], amsgrad=False, state_dtype="int8", extra_bits=8)
    elementwise_steps(optimizer, [weight], range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][0])
    before = snapshot(optimizer)[0]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer)[0], before)


def test_codes_for_a_parameter_that_cannot_have_them_are_decoded() -> None:
    weight = parameter(65, 67)
    optimizer = make("AdamW", [weight], amsgrad=False, state_dtype="int8")
    elementwise_steps(optimizer, [weight], range(2))
    transposed = nn.Parameter(weight.detach().t().contiguous().t())
    again = make("AdamW", [transposed], amsgrad=False, state_dtype="int8")
    again.load_state_dict(optimizer.state_dict())
    want = optimizer.decoded_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(again.state[transposed][name], want[name])
    elementwise_steps(again, [transposed], range(2, 3))
