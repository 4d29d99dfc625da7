"""In every format the kernels store the bits that the PyTorch reference stores, draws of the rounding included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_dsl import testing
from forge_dsl.runtime import banded, launch
from forge_dsl.runtime.tiles import Tiles
from tests.low_precision.common import (
    ARGUMENTS,
    FORMATS,
    SPECS,
    assert_same,
    device_of,
    elementwise_steps,
    linear_steps,
    make,
    mixed,
    optimizer_class,
    parameter,
    snapshot,
)

launched = pytest.mark.skipif(
    not testing.can_launch(optimizer_class("AdamW").rule), reason="needs a GPU, or Triton's interpreter"
)
EVERY = [*ARGUMENTS, *SPECS]
# 8-bit states with bits beside the weight: both formats meet in one kernel.
COMBINED = {
    "bf16": {},
    "int8, extra 16": {"state_dtype": "int8", "extra_bits": 16},
    "fp8, extra 8": {"state_dtype": "fp8", "extra_bits": 8},
    "mixed": None,
}
ODD = (33, 125)  # two blocks in a row, the second a part of one; rows and columns that end within a tile


def options_of(name: str, combined: str) -> dict:
    options = COMBINED[combined]
    return mixed(name) if options is None else options


def linear_run(name: str, schedule: str, steps: int = 2, shape: tuple[int, int] = ODD, **options):
    weight = parameter(*shape, device=device_of(schedule))
    optimizer = make(name, [weight], schedule=schedule, **options)
    linear_steps(optimizer, weight, range(steps))
    return snapshot(optimizer)[0]


@launched
@pytest.mark.parametrize("combined", COMBINED)
@pytest.mark.parametrize("name", EVERY)
def test_the_fused_kernel_stores_the_bits_of_the_reference(name: str, combined: str) -> None:
    options = options_of(name, combined)
    want = linear_run(name, "banded", **options)
    assert_same(linear_run(name, "fused", **options), want, f"{name} {combined}")


@launched
@pytest.mark.parametrize("form", FORMATS)
def test_the_fused_kernel_does_so_without_stochastic_rounding(form: str) -> None:
    options = {**FORMATS[form], "stochastic_rounding": False}
    assert_same(linear_run("AdamW", "fused", **options), linear_run("AdamW", "banded", **options), form)


@launched
def test_fp16_is_rounded_stochastically_when_asked_for() -> None:
    runs = []
    for schedule in ("banded", "fused"):
        weight = parameter(*ODD, dtype=torch.float16, device=device_of(schedule))
        optimizer = make("AdamW", [weight], schedule=schedule, stochastic_rounding=True)
        linear_steps(optimizer, weight, range(2))
        runs.append(snapshot(optimizer)[0])
    assert_same(runs[1], runs[0])


def shapes(device: torch.device) -> list[nn.Parameter]:
    """Every way in which a parameter of step() can lie in memory."""
    images = parameter(2, 3, 23, 31, seed=3, device=device).data
    wide = parameter(40, 130, seed=4, device=device).data
    return [
        parameter(131, device=device),
        parameter(*ODD, seed=1, device=device),
        parameter(2, 3, 23, 31, seed=2, device=device),
        nn.Parameter(images.to(memory_format=torch.channels_last)),
        nn.Parameter(wide.t()),
        nn.Parameter(wide.clone()[1:36, 2:128:2]),  # not dense
        parameter(1, 4500, seed=5, device=device),
        parameter(device=device),
        nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16, device=device)),
    ]


def elementwise_run(name: str, schedule: str, steps: int = 1, **options):
    parameters = shapes(device_of(schedule))
    optimizer = make(name, parameters, schedule=schedule, **options)
    elementwise_steps(optimizer, parameters, range(steps))
    return snapshot(optimizer)


@launched
@pytest.mark.parametrize("combined", COMBINED)
def test_the_element_wise_kernels_store_the_bits_of_the_reference(combined: str) -> None:
    options = options_of("NAdam", combined)
    for number, (got, want) in enumerate(
        zip(elementwise_run("NAdam", "fused", **options), elementwise_run("NAdam", "banded", **options), strict=True)
    ):
        assert_same(got, want, f"{combined}, parameter {number}")


@pytest.mark.parametrize("combined", COMBINED)
@pytest.mark.parametrize("band", [150, 1000])
def test_the_result_does_not_depend_on_the_band(combined: str, band: int, monkeypatch) -> None:
    options = options_of("AdamW", combined)
    linear = linear_run("AdamW", "banded", **options)
    elementwise = elementwise_run("AdamW", "banded", **options)
    monkeypatch.setattr(banded, "CPU_BAND", band)
    monkeypatch.setattr(banded.bands, "__kwdefaults__", {"elements": band})
    monkeypatch.setattr(banded.row_bands, "__defaults__", (band,))
    assert_same(linear_run("AdamW", "banded", **options), linear, f"{combined}, bands of {band}")
    for number, (got, want) in enumerate(zip(elementwise_run("AdamW", "banded", **options), elementwise, strict=True)):
        assert_same(got, want, f"{combined}, bands of {band}, parameter {number}")


@launched
@pytest.mark.parametrize("combined", ["bf16", "int8, extra 16", "fp8, extra 8"])
def test_the_result_does_not_depend_on_the_tile(combined: str, monkeypatch) -> None:
    options = options_of("AdamW", combined)
    want = linear_run("AdamW", "fused", steps=1, **options)
    tiles = Tiles(16, 128, 16, 1, 1, 1, 4, 1) if combined != "bf16" else Tiles(64, 32, 16, 1, 1, 8, 4, 1)
    monkeypatch.setattr(launch, "choose_tiles", lambda *_: tiles)
    assert_same(linear_run("AdamW", "fused", steps=1, **options), want, combined)


def test_draws_differ_between_weights_steps_and_seeds() -> None:
    """The same numbers, stored anew: where rounding falls tells the draws apart."""
    runs = {}
    for seed in (0, 1):
        first, second = parameter(*ODD), parameter(*ODD)
        optimizer = make("SGD", [first, second], lr=1e-4, weight_decay=0.0, seed=seed)
        gradient = torch.ones_like(first)
        start = first.detach().clone()
        for step in range(2):
            with torch.no_grad():
                first.copy_(start), second.copy_(start)
            first.grad, second.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            runs[seed, step, 0], runs[seed, step, 1] = first.detach().clone(), second.detach().clone()
    found = list(runs.values())
    differences = [int((a != b).sum()) for i, a in enumerate(found) for b in found[:i]]
    assert min(differences) > 20, differences


def test_the_same_seed_gives_the_same_bits() -> None:
    for options in COMBINED.values():
        runs = [linear_run("AdamW", "banded", seed=7, **(options or mixed("AdamW"))) for _ in range(2)]
        assert_same(runs[0], runs[1])


@launched
@pytest.mark.parametrize("options", [{"extra_bits": 8}, {"extra_bits": 16, "stochastic_rounding": False}])
def test_bits_beside_a_weight_lie_as_it_does(options: dict) -> None:
    """Transposed, and with gaps in memory that the kernels must not touch."""
    runs = []
    for schedule in ("banded", "fused"):
        memory = parameter(40, 130, device=device_of(schedule)).data
        gaps = torch.ones(40, 130, dtype=torch.bool, device=memory.device)
        gaps[1:36, 2:128:2] = False
        untouched = memory[gaps].clone()
        weights = [nn.Parameter(memory[1:36, 2:128:2]), nn.Parameter(memory.clone().t())]
        optimizer = make("AdamW", weights, schedule=schedule, **options)
        for weight in weights:
            linear_steps(optimizer, weight, range(2))
        assert torch.equal(memory[gaps], untouched)
        assert [optimizer.state[w]["weight_low"].stride() for w in weights] == [w.stride() for w in weights]
        runs.append(snapshot(optimizer))
    for got, want in zip(runs[1], runs[0], strict=True):
        assert_same(got, want)
