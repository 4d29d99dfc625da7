"""Entries that `state_dict` never wrote are refused: by name, with the way out, before anything changes."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from tests.low_precision.common import assert_same, elementwise_steps, make, parameter, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:the state dict holds")
FORMS = {"bf16": {}, "int8": {"state_dtype": "int8"}, "extra bits": {"state_dtype": "int8", "extra_bits": 8}}
forms = pytest.mark.parametrize("form", FORMS)


def trained(form: str, name: str = "AdamW", seed: int = 0, steps: int = 2):
    held = [parameter(65, 67), parameter(67, 3, seed=1), parameter(6, seed=2)]
    optimizer = make(name, held, seed=seed, **FORMS[form])
    elementwise_steps(optimizer, held, range(steps))
    return held, optimizer


def refuses(optimizer, saved, *words: str) -> None:
    """Loading raises with these words, and leaves states, groups, counts and seeds as they were."""

    def all_of_it():
        places = [binding.table.position(binding.row) for binding in optimizer.bindings()]
        return [{**group, "params": None} for group in optimizer.param_groups], places

    before, others = snapshot(optimizer), copy.deepcopy(all_of_it())
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all_of_it() == others
    for now, then in zip(snapshot(optimizer), before, strict=True):
        assert_same(now, then)


POSITIONS = {
    "a list": [0, 1, 2],
    "a tuple": (0, 1, 2),
    "a dict of other keys": {"seed": 0, "weight": 1, "updates": 2},
    "a number": 3,
    "text": "0, 1, 2",
    "int32": torch.tensor([0, 1, 2], dtype=torch.int32),
    "booleans": torch.tensor([True, True, True]),
    "two numbers": torch.tensor([0, 1]),
    "four numbers": torch.tensor([0, 1, 2, 3]),
    "a matrix": torch.tensor([[0, 1, 2]]),
    "empty": torch.zeros(0, dtype=torch.int64),
    "NaN": torch.tensor([0.0, math.nan, 2.0]),
    "floats of another shape": torch.zeros(2),
    "a negative seed": torch.tensor([-1, 1, 2]),
    "a negative weight": torch.tensor([0, -1, 2]),
    "negative updates": torch.tensor([0, 1, -2]),
    "no updates": torch.tensor([0, 1, 0]),
    "another count than step": torch.tensor([0, 1, 7]),
    "that of another weight": torch.tensor([0, 2, 2]),
}


@forms
@pytest.mark.parametrize("wrong", POSITIONS)
def test_a_wrong_position_of_the_draws_is_refused(form: str, wrong: str) -> None:
    _, optimizer = trained(form)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["rounding"] = POSITIONS[wrong]
    refuses(optimizer, saved, "'rounding' of", '["params"][', "expected", "Remove 'rounding'")


@forms
def test_positions_of_some_weights_only_are_refused(form: str) -> None:
    _, optimizer = trained(form)
    saved = copy.deepcopy(optimizer.state_dict())
    for missing in range(3):
        partial = copy.deepcopy(saved)
        del partial["state"][missing]["rounding"]
        refuses(optimizer, partial, "lacks 'rounding'", f'["params"][{missing}]', "Remove 'rounding'")


@forms
def test_an_entry_of_another_optimizer_is_refused_where_it_draws_like_its_neighbour(form: str) -> None:
    _, optimizer = trained(form)
    other, _ = trained(form)[1], None
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["rounding"] = other.state_dict()["state"][0]["rounding"]
    refuses(optimizer, saved, "both draw as weight 0 of seed 0", "another optimizer")


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_what_torch_has_cast_is_left_out(form: str, dtype: torch.dtype) -> None:
    held, optimizer = trained(form, seed=2**40)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["rounding"] = entry["rounding"].to(dtype)  # 2^40 is infinite in fp16
    again = make("AdamW", [nn.Parameter(p.detach().clone()) for p in held], seed=3, **FORMS[form])
    again.load_state_dict(saved)
    assert [b.table.seeds[b.row] for b in again.bindings()] == [(3, 0), (3, 1), (3, 2)]


@forms
def test_a_checkpoint_without_positions_is_accepted(form: str) -> None:
    _, optimizer = trained(form)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        del entry["rounding"]
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0]["rounding"].tolist() == [0, 0, 2]


def test_weights_that_are_not_rounded_need_no_position() -> None:
    held = [parameter(8, 16), nn.Parameter(torch.randn(5)), parameter(7)]
    optimizer = make("AdamW", held, seed=4)
    elementwise_steps(optimizer, held[:2], range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert ["rounding" in saved["state"].get(index, {}) for index in range(3)] == [True, False, False]
    optimizer.load_state_dict(saved)


def test_weights_that_had_not_begun_never_draw_like_those_of_the_checkpoint() -> None:
    _, optimizer = trained("bf16")
    saved = copy.deepcopy(optimizer.state_dict())
    first, second = saved["state"][0]["rounding"], saved["state"][1]["rounding"]
    first[1], second[1] = 1, 2  # as from an optimizer that held its weights in another order
    del saved["state"][2]
    optimizer.load_state_dict(saved)
    places = [binding.table.seeds[binding.row] for binding in optimizer.bindings()]
    assert places[:2] == [(0, 1), (0, 2)] and len(set(places)) == 3
    optimizer.load_state_dict(optimizer.state_dict())


LOW = {
    "low of another shape": {"weight_low": torch.zeros(3, 67, dtype=torch.int8)},
    "low of another type": {"weight_low": torch.zeros(65, 67, dtype=torch.int32)},
    "low that is no tensor": {"weight_low": "bits"},
    "low with NaN": {"weight_low": torch.full((65, 67), math.nan)},
    "a fingerprint of floats": {"weight_fingerprint": torch.tensor(3.0)},
    "a fingerprint of two numbers": {"weight_fingerprint": torch.tensor([1, 2])},
    "a negative fingerprint": {"weight_fingerprint": torch.tensor(-1)},
    "a fingerprint that is no tensor": {"weight_fingerprint": 7},
}


@pytest.mark.parametrize("wrong", LOW)
def test_wrong_bits_beside_a_weight_are_refused(wrong: str) -> None:
    _, optimizer = trained("extra bits")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0].update(LOW[wrong])
    refuses(optimizer, saved, repr(next(iter(LOW[wrong]))), '["params"][0]', "expected", "Remove")


NUMBERS = [-1, -1.0, 0.5, math.nan, math.inf, "two", None.__class__, [1], torch.tensor(-3.0), torch.tensor(math.nan)]


@pytest.mark.parametrize("value", [*NUMBERS, torch.zeros(2), torch.zeros(0), torch.tensor(1j), {"step": 2}], ids=str)
def test_a_count_that_is_none_is_refused(value) -> None:
    _, optimizer = trained("bf16")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = value
    refuses(optimizer, saved, "'step' of", '["params"][0]', "expected")


def test_a_recurrent_scalar_that_is_no_number_is_refused() -> None:
    _, optimizer = trained("bf16", "NAdam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["mu_product"] = "one"
    refuses(optimizer, saved, "'mu_product' of", "is str; expected a number")


@pytest.mark.parametrize(
    ("make_wrong", "words"),
    [
        (lambda saved: None, ("no optimizer's state dict", "NoneType", "'optimizer'")),
        (lambda saved: [saved], ("no optimizer's state dict", "list")),
        (lambda saved: {"optimizer": saved}, ("no optimizer's state dict", "'optimizer'")),
        (lambda saved: {"state": saved["state"]}, ("no optimizer's state dict", "'state'")),
        (lambda saved: {**saved, "state": []}, ("no optimizer's state dict",)),
        (lambda saved: {**saved, "param_groups": [{"lr": 1e-3}]}, ("parameter group 0 has no list of 'params'",)),
        (lambda saved: {**saved, "param_groups": ["x"]}, ("parameter group 0 has no list of 'params'",)),
        (lambda saved: {**saved, "state": {**saved["state"], 1: 5}}, ("the entry of", '["params"][1]', "is int")),
        (lambda saved: group(saved, params=[0, 0, 2]), ("one entry, 0", '["params"][0]', '["params"][1]')),
        (lambda saved: group(saved, lr=-1.0), ("parameter group 0", "Invalid learning rate: -1.0")),
        (lambda saved: group(saved, betas=(0.9,)), ("parameter group 0", "Invalid betas value")),
        (lambda saved: group(saved, eps=math.nan), ("parameter group 0", "Invalid epsilon value")),
    ],
)
def test_a_state_dict_of_another_form_is_refused(make_wrong, words) -> None:
    _, optimizer = trained("bf16")
    refuses(optimizer, make_wrong(copy.deepcopy(optimizer.state_dict())), *words)


@pytest.mark.parametrize("change", [{"lr": "fast"}, {"amsgrad": 1}])
def test_an_argument_of_another_type_names_its_group(change) -> None:
    _, optimizer = trained("bf16")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TypeError, match="loaded state dict, parameter group 0: Invalid"):
        optimizer.load_state_dict(group(copy.deepcopy(before), **change))
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]


def group(saved, **change):
    saved["param_groups"][0].update(change)
    return saved


def test_entries_survive_a_trip_through_torch() -> None:
    held, optimizer = trained("bf16")
    theirs = torch.optim.AdamW(held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state[held[0]]["step"] == 2
