"""Weights in fp8: every route stores the bits of the reference, decoding is exact, and small updates arrive."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from forge_dsl import fp8, testing
from forge_dsl.formats import registry
from forge_dsl.runtime import banded, coded, launch
from forge_dsl.runtime.linear import fused_linear
from forge_dsl.runtime.optimizer import FusedOptimizer
from forge_dsl.runtime.tiles import Tiles
from forge_dsl.runtime.triton_support import AVAILABLE
from tests.low_precision.common import ARGUMENTS, SPECS, assert_same, device_of, make, optimizer_class, tensors_of

launched = pytest.mark.skipif(
    not testing.can_launch(optimizer_class("AdamW").rule), reason="needs a GPU, or Triton's interpreter"
)
EVERY = [*ARGUMENTS, *SPECS]
STATES = {"own": {}, "fp32": {"state_dtype": "fp32"}, "int8": {"state_dtype": "int8"}, "fp8": {"state_dtype": "fp8"}}
ODD = (33, 125)  # two blocks in a row, the second a part of one; rows and columns that end within a tile
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Rows and columns of different sizes, so that a block reaches into the small codes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(shape, generator=generator))
    return torch.randn(shape, generator=generator) * spread * torch.exp2(-torch.arange(shape[0]) / 4)[:, None]


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device=None) -> nn.Parameter:
    return fp8.parameter(numbers(*shape, seed=seed).to(device or testing.device(), dtype))


def steps_of(optimizer: FusedOptimizer, weight: Tensor, steps: range, tokens: int = 9) -> None:
    """Steps on whole numbers, whose products are summed exactly in any order."""
    dtype = coded.compute_dtype(weight)
    for step in steps:
        x = testing.integers((tokens, weight.shape[1]), 2 * step + 1, dtype).to(weight.device)
        y = fused_linear(x, weight, None, type(optimizer))
        y.backward(testing.integers(tuple(y.shape), 2 * step + 2, dtype).to(weight.device))
        optimizer.step()
        optimizer.zero_grad()


def snapshot(optimizer: FusedOptimizer, weight: Tensor) -> dict[str, Tensor]:
    held = {**tensors_of(optimizer, weight), "scales": fp8.scales(weight)}
    return {name: value.detach().clone() for name, value in held.items()}


def run(name: str, schedule: str, steps: int = 2, shape: tuple[int, int] = ODD, dtype=torch.bfloat16, **options):
    weight = parameter(*shape, dtype=dtype, device=device_of(schedule))
    optimizer = make(name, [weight], schedule=schedule, **options)
    steps_of(optimizer, weight, range(steps))
    return snapshot(optimizer, weight)


@launched
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("name", EVERY)
def test_the_fused_kernel_stores_the_bits_of_the_reference(name: str, states: str) -> None:
    options = STATES[states]
    assert_same(run(name, "fused", **options), run(name, "banded", **options), f"{name} {states}")


@launched
@pytest.mark.parametrize("shape", [(1, 129), (130, 1), (70, 64), (67, 129), (3, 63), (2, 2)])
def test_it_does_so_for_every_shape(shape: tuple[int, int]) -> None:
    assert_same(run("AdamW", "fused", 1, shape), run("AdamW", "banded", 1, shape), str(shape))


@launched
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_does_so_in_every_type_of_computation_and_to_nearest(dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "stochastic_rounding": False}
    assert_same(run("AdamW", "fused", **options), run("AdamW", "banded", **options), str(dtype))


@launched
def test_the_result_does_not_depend_on_the_tile(monkeypatch) -> None:
    want = run("AdamW", "fused", steps=1)
    monkeypatch.setattr(launch, "choose_tiles", lambda *_: Tiles(16, 128, 16, 1, 1, 1, 4, 1))
    assert_same(run("AdamW", "fused", steps=1), want)


@pytest.mark.parametrize("band", [150, 1000])
def test_the_result_does_not_depend_on_the_band(band: int, monkeypatch) -> None:
    want = run("AdamW", "banded", state_dtype="int8")
    monkeypatch.setattr(banded, "CPU_BAND", band)
    assert_same(run("AdamW", "banded", state_dtype="int8"), want)


@launched
@pytest.mark.parametrize("states", ["own", "int8"])
def test_the_kernel_of_a_band_stores_the_bits_of_the_reference(states: str) -> None:
    """The banded schedule of a GPU: a part of the rows, whose scales lie in memory as those of the whole."""
    runs = []
    for by_kernel in (False, True):
        weight = parameter(40, 120, device=testing.device() if by_kernel else torch.device("cpu"))
        optimizer = make("AdamW", [weight], schedule="banded", **STATES[states])
        steps_of(optimizer, weight, range(1))
        binding = optimizer.binding_of(weight)
        binding.table.begin(optimizer.state)
        held = [optimizer.state[weight][n] for n in optimizer.rule.spec.state_names if n in optimizer.state[weight]]
        assert binding.kept is not None
        kept, table = binding.kept.storage, binding.table.row(0).clone()
        gradient = testing.integers((40, 120), 5, torch.float32).to(weight.device)
        switches = binding.table.arguments.select().switches
        for part in (slice(0, 17), slice(17, 40)):
            pieces = coded.stored(weight)[part], gradient[part], [state[part] for state in held]
            if by_kernel:
                rows = kept.rows(part)
                launch.elementwise_step(optimizer.rule, *pieces, table, switches, True, rows, part.start)
            else:
                where = torch.arange(part.start, part.stop)[:, None], torch.arange(120)[None, :]
                banded._apply(optimizer.rule, *pieces, table, switches, kept.rows(part), where)
        runs.append(snapshot(optimizer, weight))
    assert_same(runs[1], runs[0])


# ---------------------------------------------------------------------------------------------------------- decoding


def every_code(columns: int, rows: int = 240) -> tuple[Tensor, Tensor]:
    """Every code but NaN's under every scale that is written, that of blocks that are not finite too."""
    codes = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns) * 7 % 256
    codes[codes % 128 == 127] = 3
    scales = torch.arange(8, 248, dtype=torch.int64).repeat(2, 1)[:, :rows]
    scales[1, 5] = 255
    return codes.to(torch.uint8).view(coded.CODES), scales.to(torch.uint8).view(coded.SCALES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [125, 128])
def test_decoding_is_that_of_the_format(columns: int, dtype: torch.dtype) -> None:
    codes, scales = every_code(columns)
    exact = coded.CODEC.decode(codes.view(torch.uint8), scales.view(torch.uint8))
    assert exact[:200, :64].isfinite().all() and not exact[5, 64:].isfinite().any()
    got = coded.decode(codes, scales, dtype)
    testing.assert_same_bits(got.nan_to_num(0.0), exact.to(dtype).nan_to_num(0.0), str(dtype))
    assert torch.equal(got.isnan(), exact.isnan())
    if dtype == torch.bfloat16:
        # Exact, infinities of the uppermost scale aside, which fp32 has too.
        testing.assert_same_bits(got.float().nan_to_num(0.0), exact.nan_to_num(0.0), "bf16 holds every number")


@pytest.mark.skipif(not AVAILABLE, reason="needs Triton, on a GPU or in its interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(240, 128), (240, 125), (1, 1), (17, 257), (16, 256), (0, 5)])
def test_the_kernel_decodes_the_same_bits(rows: int, columns: int, dtype: torch.dtype) -> None:
    from forge_dsl.runtime import device_coded

    codes, scales = every_code(columns, rows) if columns in (125, 128) else coded.encode(numbers(rows, columns))
    device = testing.device()
    raw = codes.view(torch.uint8).to(device), scales.view(torch.uint8).to(device)
    got, want = device_coded.decode(*raw, dtype).cpu(), coded.decode(codes, scales, dtype)
    assert torch.equal(got.isnan(), want.isnan())
    testing.assert_same_bits(got.nan_to_num(0.0), want.nan_to_num(0.0), f"{rows} {columns} {dtype}")


def test_the_ends_of_the_format() -> None:
    """Subnormal numbers of bf16 are numbers; a largest number rounded up is infinite, as rounding to bf16 makes it."""
    small, large = 2.0**-126, torch.finfo(torch.float32).max
    weight = torch.zeros(2, 64)
    weight[0, :3] = torch.tensor([small, small / 4, -small / 2])
    weight[1, :2] = torch.tensor([large, 1.5 * 2.0**127])
    codes, scales = coded.encode(weight)
    numbers = coded.decode(codes, scales, torch.bfloat16)
    assert torch.equal(numbers[0].float(), weight[0])
    assert numbers[1, :2].tolist() == [torch.inf, 1.5 * 2.0**127] and torch.tensor(large).bfloat16() == torch.inf


def test_what_is_not_finite_shows_in_its_block_and_nowhere_else() -> None:
    weight = torch.ones(2, 130)
    weight[0, 70] = torch.inf
    numbers = coded.decode(*coded.encode(weight), torch.bfloat16)
    assert numbers[0, 64:128].isnan().all()
    assert numbers[0, :64].eq(1).all() and numbers[0, 128:].eq(1).all() and numbers[1].eq(1).all()


def test_a_weight_on_the_grid_is_encoded_as_itself() -> None:
    values = coded.decode(*coded.encode(numbers(40, 200)), torch.float32)
    again = coded.decode(*coded.encode(values), torch.float32)
    assert torch.equal(again, values)  # -0 becomes 0, which is no other number
    assert (numbers(40, 200) - values).abs().max() < numbers(40, 200).abs().max() / 16


# ------------------------------------------------------------------------------------------------------ the dead zone


def test_small_updates_arrive_in_the_mean_and_are_lost_without_draws() -> None:
    """Codes at 1 are 2^-3 apart: steps of a 64th of that, 200 times. To nearest, nothing moves at all."""
    step, steps = 2.0**-9, 200
    moved = {}
    for stochastic in (None, False):
        weight = fp8.parameter(torch.ones(64, 64))
        optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0, stochastic_rounding=stochastic, schedule="banded")
        for _ in range(steps):
            # y = x W^T with x = 1 and dy = -step: the gradient is -step in every coordinate.
            fused_linear(torch.ones(1, 64), weight, None, type(optimizer)).backward(torch.full((1, 64), -step))
            optimizer.step()
            optimizer.zero_grad()
        moved[stochastic] = fp8.decode(weight, torch.float32).double() - 1
    assert (moved[False] == 0).all()
    share = step / 2**-3
    # Independent roundings of 4096 coordinates: five standard errors of their mean.
    deviation = math.sqrt(steps * share * (1 - share)) * 2**-3
    assert abs(moved[None].mean().item() - steps * step) < 5 * deviation / 64
    assert moved[None].std().item() < 1.5 * deviation


def test_draws_differ_between_weights_steps_and_seeds_and_repeat_with_them() -> None:
    base = run("SGD", "banded", steps=1)
    assert_same(run("SGD", "banded", steps=1), base)
    other = run("SGD", "banded", steps=1, seed=1)
    assert int((other["weight"].view(torch.uint8) != base["weight"].view(torch.uint8)).sum()) > 100


# ------------------------------------------------------------------------------------------------------------- states


def test_states_are_bf16_by_default_and_begin_from_the_numbers() -> None:
    weight = parameter(65, 67)
    start = fp8.decode(weight, torch.float32)
    optimizer = make("ScheduleFreeAdamW", [weight], lr=0.0, schedule="banded")
    steps_of(optimizer, weight, range(1))
    held = {name: value for name, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in held.items() if value.shape == weight.shape}
    assert tensors and all(value.dtype == torch.bfloat16 for value in tensors.values())
    copies = [s.name for s in optimizer.rule.spec.states if not s.zero and s.name in tensors]
    assert copies and all(torch.equal(tensors[name].float(), start.to(torch.bfloat16).float()) for name in copies)


def test_bytes_of_a_parameter() -> None:
    weight = parameter(128, 256)
    optimizer = make("AdamW", [weight], amsgrad=False, state_dtype="int8", schedule="banded")
    steps_of(optimizer, weight, range(1))
    stored = [weight, fp8.scales(weight)]
    stored += [t for t in optimizer.state[weight].values() if isinstance(t, Tensor) and t.numel() > 1]
    total = sum(tensor.nbytes for tensor in stored) / weight.numel()
    assert total == 3 * (1 + 1 / 64)
    of_format = registry.bytes_of(registry.of_weight("fp8"), weight.shape)
    assert of_format == weight.nbytes + fp8.scales(weight).nbytes
    assert optimizer.report().bytes_per_parameter == pytest.approx(total)
