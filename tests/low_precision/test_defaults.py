"""What is rounded stochastically, what is kept in which format, and what is refused, by default and when asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import testing
from forge_dsl.formats import registry
from forge_dsl.formats.block_wise import FourthPowers, SignedSquares
from tests.low_precision.common import (
    FORMATS,
    assert_same,
    bits,
    elementwise_steps,
    linear_steps,
    make,
    mixed,
    parameter,
    snapshot,
    tensors_of,
)


def run(dtype: torch.dtype, name: str = "AdamW", **options):
    weight = parameter(65, 67, dtype=dtype)
    optimizer = make(name, [weight], **options)
    linear_steps(optimizer, weight, range(2))
    return snapshot(optimizer)[0]


def differ(one: dict, other: dict, name: str) -> bool:
    return bool((bits(one[name]) != bits(other[name])).any())


def test_bf16_is_rounded_stochastically_by_default_and_to_nearest_when_asked() -> None:
    default, on, off = (run(torch.bfloat16, stochastic_rounding=value) for value in (None, True, False))
    assert_same(default, on)
    for name in ("weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert differ(default, off, name), name


def test_to_nearest_is_what_torch_stores() -> None:
    """One SGD step: the reference in fp32, rounded once to nearest even."""
    weight = parameter(65, 67)
    before, gradient = weight.detach().float(), torch.randn(65, 67, device=weight.device).bfloat16()
    optimizer = make("SGD", [weight], lr=1e-3, weight_decay=0.0, stochastic_rounding=False)
    weight.grad = gradient
    optimizer.step()
    assert torch.equal(weight.detach(), (before - torch.tensor(1e-3) * gradient.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_not_unless_asked_for(dtype: torch.dtype) -> None:
    default, off, on = (run(dtype, stochastic_rounding=value) for value in (None, False, True))
    assert_same(default, off)
    assert differ(default, on, "weight") == (dtype == torch.float16)


def test_bf16_states_of_fp32_weights_are_rounded_stochastically() -> None:
    default, off = (
        run(torch.float32, state_dtype=torch.bfloat16, stochastic_rounding=value) for value in (None, False)
    )
    assert differ(default, off, "exp_avg") and differ(default, off, "exp_avg_sq")


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_rounded_stochastically_unless_switched_off(form: str) -> None:
    default, off = (run(torch.float32, state_dtype=form, stochastic_rounding=value) for value in (None, False))
    assert differ(default, off, "exp_avg") and differ(default, off, "exp_avg_sq")


def test_the_domain_picks_the_code() -> None:
    weight = parameter(65, 67, dtype=torch.float32)
    optimizer = make("AdamW", [weight], state_dtype="int8", stochastic_rounding=False, amsgrad=False)
    gradient = torch.randn(65, 67, device=weight.device)
    weight.grad = gradient.clone()
    optimizer.step()
    state = optimizer.state[weight]
    beta1, beta2 = (torch.tensor(1.0 - b, dtype=torch.float64).float() for b in (0.9, 0.999))
    for name, codec, value in (
        ("exp_avg", SignedSquares(), beta1 * gradient.cpu()),
        ("exp_avg_sq", FourthPowers(), beta2 * gradient.cpu() * gradient.cpu()),
    ):
        codes, scales = codec.encode(value)
        assert torch.equal(state[name].cpu(), codes), name
        assert torch.equal(state[f"{name}_scale"].cpu(), scales), name


def test_small_and_one_dimensional_and_strided_parameters_keep_their_own_type() -> None:
    wide = parameter(70, 70).data
    parameters = [
        parameter(8192),
        parameter(63, 65),  # 4095
        nn.Parameter(wide.t()),
        parameter(64, 64, seed=1),
        parameter(2, 2, 32, 32, seed=2),
    ]
    optimizer = make("AdamW", parameters, state_dtype="int8")
    elementwise_steps(optimizer, parameters, range(1))
    kinds = [optimizer.state[p]["exp_avg"].dtype for p in parameters]
    assert kinds == [torch.bfloat16] * 3 + [torch.uint8] * 2
    assert all(
        ("exp_avg_scale" in optimizer.state[p]) == (kind == torch.uint8)
        for p, kind in zip(parameters, kinds, strict=True)
    )


@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_the_report_counts_the_bytes_that_there_are(form: str) -> None:
    model = nn.Sequential(nn.Linear(67, 65), nn.LayerNorm(65), nn.Linear(65, 130, bias=False)).bfloat16()
    options = mixed("AdamW") if form == "mixed" else FORMATS[form]
    optimizer = forge_dsl.fuse(model.to(testing.device()), forge_dsl.optim.AdamW, **options)
    foreseen = optimizer.report()
    model(torch.randn(5, 67, device=testing.device()).bfloat16()).float().square().mean().backward()
    optimizer.step()
    report = optimizer.report()
    assert [row.states for row in report.rows] == [row.states for row in foreseen.rows]
    named = dict(model.named_parameters())
    for row in report.rows:
        held = optimizer.state[named[row.name]]
        real = sum(value.nbytes for name, value in held.items() if name != "step")
        assert row.states == real, row.name


def test_a_late_weight_gets_the_format_that_was_asked_for() -> None:
    first, late = parameter(65, 67), parameter(65, 67, seed=1)
    late.requires_grad_(False)
    optimizer = make("AdamW", [first, late], state_dtype="int8", extra_bits=8)
    elementwise_steps(optimizer, [first], range(2))
    assert not optimizer.state.get(late)
    late.requires_grad_(True)
    linear_steps(optimizer, late, range(1))
    assert optimizer.state[late]["exp_avg"].dtype == torch.uint8 and optimizer.state[late]["step"] == 1
    assert optimizer.state[late]["weight_low"].dtype == torch.int8


def test_weights_keep_their_draws_when_groups_are_added() -> None:
    """A weight's place in `param_groups` is its number, whether it came with the constructor or later."""
    at_once = [parameter(65, 67), parameter(65, 67, seed=1)]
    together = make("AdamW", [{"params": [at_once[0]]}, {"params": [at_once[1]], "lr": 0.01}])
    later = [parameter(65, 67), parameter(65, 67, seed=1)]
    grown = make("AdamW", [later[0]])
    grown.add_param_group({"params": [later[1]], "lr": 0.01})
    elementwise_steps(together, at_once, range(2))
    elementwise_steps(grown, later, range(2))
    for got, want in zip(snapshot(grown), snapshot(together), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_block_that_is_not_finite_stays_visible_and_alone(form: str, bad: float) -> None:
    weight = parameter(33, 130)
    optimizer = make("AdamW", [weight], state_dtype=form, amsgrad=False)
    weight.grad = torch.ones_like(weight)
    weight.grad[3, 70] = bad
    optimizer.step()
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    state = optimizer.decoded_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        seen = ~state[name].isfinite()
        assert seen[3, 64:128].all() and int(seen.sum()) == 64, name
    assert not weight.detach()[3, 70].isfinite()
    assert weight.detach()[torch.arange(33, device=weight.device) != 3].isfinite().all()


def test_a_rule_that_leaves_its_domain_shows_it() -> None:
    assert not FourthPowers().decode(*FourthPowers().encode(torch.full((1, 64), -1.0))).isfinite().any()


def test_zero_size_parameters_are_passed_over() -> None:
    for shape in ((0, 3), (3, 0), (0,)):
        empty = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        optimizer = make("AdamW", [empty], state_dtype="int8", extra_bits=16)
        empty.grad = torch.empty(shape, dtype=torch.bfloat16)
        optimizer.step()
        assert optimizer.state[empty]["step"] == 1


def test_bytes_of_a_parameter_are_as_documented() -> None:
    weight = parameter(128, 128)
    for options, expected in (({}, 6), ({"state_dtype": "int8"}, 4 + 2 / 64), ({"extra_bits": 8}, 7)):
        optimizer = make("AdamW", [weight], amsgrad=False, **options)
        elementwise_steps(optimizer, [weight], range(1))
        held = tensors_of(optimizer, weight)
        assert sum(t.nbytes for name, t in held.items() if name != "step") / weight.numel() == expected
        assert registry.scale_shape(weight.shape) == (2, 128)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": "int4"}, ValueError, "Invalid state_dtype: .int4"),
        ({"state_dtype": torch.float64}, ValueError, "Invalid state_dtype: torch.float64"),
        ({"state_dtype": ["int8"]}, ValueError, "Invalid state_dtype"),
        (
            {"state_dtype": {"momentum": "int8"}},
            ValueError,
            "AdamW has no state 'momentum' .it has: exp_avg, exp_avg_sq",
        ),
        ({"state_dtype": {"exp_avg": "int3"}}, ValueError, "Invalid state_dtype..exp_avg..: .int3"),
        ({"stochastic_rounding": "yes"}, TypeError, "Invalid stochastic_rounding: 'yes'"),
        ({"extra_bits": 12}, ValueError, "Invalid extra_bits: 12 .expected 0, 8 or 16."),
        ({"gradient_bits": 8}, ValueError, "Invalid gradient_bits: 8 .expected 16, 20, 24 or 32."),
        ({"gradient_bits": None}, ValueError, "Invalid gradient_bits: None"),
        ({"seed": -1}, ValueError, "Invalid seed: -1"),
        ({"seed": True}, ValueError, "Invalid seed: True"),
        ({"seed": 0.5}, ValueError, "Invalid seed: 0.5"),
        ({"seed": 2**63}, ValueError, "Invalid seed"),
    ],
)
def test_wrong_arguments_are_refused(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make("AdamW", [parameter(4, 4)], **options)


def test_a_rule_without_states_refuses_a_format_by_name() -> None:
    with pytest.raises(ValueError, match=r"SGD has no state 'exp_avg' .it has: none"):
        make("SGD", [parameter(4, 4)], state_dtype={"exp_avg": "int8"})
    make("SGD", [parameter(4, 4)], state_dtype="int8")


def test_bits_beside_a_weight_that_is_not_bf16_are_refused_before_it_is_taken() -> None:
    weight = parameter(65, 67, dtype=torch.float32)
    with pytest.raises(ValueError, match="Invalid extra_bits: 8 bits beside bfloat16 weights, and no parameter is"):
        make("AdamW", [weight], extra_bits=8)
    make("AdamW", [weight])
    make("SGD", [parameter(65, 67, dtype=torch.float32), parameter(65, 67)], extra_bits=8)
