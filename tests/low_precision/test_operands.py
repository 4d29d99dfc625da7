"""Operands in 8 bits: what an element is, and that every route computes with exactly that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_dsl import Scaled, testing
from forge_dsl.formats.operand import concatenated
from forge_dsl.runtime import banded, scaled
from tests.low_precision.common import ARGUMENTS, assert_same, optimizer_class
from tests.low_precision.operands import (
    BLOCKS,
    CODES,
    E4M3,
    E5M2,
    SCALES,
    columns_of,
    gradient,
    on_cpu,
    random_operand,
    steps,
    whole_operand,
)

launched = pytest.mark.skipif(
    not testing.can_launch(optimizer_class("AdamW").rule), reason="needs a GPU, or Triton's interpreter"
)
# Extreme scales overflow on purpose, and the interpreter computes with numpy.
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCHEDULES = [pytest.param("fused", marks=launched), "banded"]


def every_code(codes: torch.dtype) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(codes)


def meaning(code: int, codes: torch.dtype) -> float:
    """A float8 by its definition (OCP 8-bit floating point specification, revision 1.0)."""
    digits, bias = (3, 7) if codes == E4M3 else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code & 0x7F) >> digits, code & ((1 << digits) - 1)
    if codes == E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if codes == E5M2 and exponent == 31:
        return sign * math.inf if fraction == 0 else math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - digits)
    return sign * (1 + fraction / (1 << digits)) * 2.0 ** (exponent - bias)


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """By bits; of a NaN only that it is one."""
    assert got.dtype == want.dtype and got.shape == want.shape
    kind = torch.int32 if got.dtype == torch.float32 else torch.int16
    different = (got.contiguous().view(kind) != want.contiguous().view(kind)) & ~(got.isnan() & want.isnan())
    assert not different.any(), f"{int(different.sum())} differ: {got[different][:3]} for {want[different][:3]}"


# -- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_code_is_the_float8_that_it_is_called(codes: torch.dtype) -> None:
    numbers = Scaled(every_code(codes)[None], torch.ones(1, 1)).decode(torch.float32)[0].tolist()
    for code, number in enumerate(numbers):
        want = meaning(code, codes)
        assert number == want or (math.isnan(number) and math.isnan(want)), code
        assert math.copysign(1, number) == math.copysign(1, want) or math.isnan(want)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_a_scale_byte_is_a_power_of_two(kind: torch.dtype) -> None:
    ones = torch.ones(256, 1).to(E4M3)
    numbers = Scaled(ones, torch.arange(256).to(torch.uint8).view(kind)[:, None]).decode(torch.float32)[:, 0].tolist()
    assert numbers[:255] == [2.0 ** (b - 127) for b in range(255)] and math.isnan(numbers[255])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_an_element_is_its_code_times_the_scale_of_its_row_and_block(block: int, dtype: torch.dtype) -> None:
    one = on_cpu(random_operand(5, 150, 0, E5M2, torch.float32, block))
    assert isinstance(one, Scaled) and one.block == block
    want = torch.empty(5, 150)
    for t in range(5):
        for c in range(150):
            factor = one.scales[t, c // block if block else 0]
            want[t, c] = meaning(int(one.codes.view(torch.uint8)[t, c]), E5M2) * factor
    assert_same_numbers(one.decode(dtype), want.to(dtype))
    assert_same_numbers(one.decode(dtype, slice(70, 131)), want[:, 70:131].to(dtype))


def test_nothing_is_clamped() -> None:
    one = Scaled(torch.full((1, 2), 448.0).to(E4M3), torch.tensor([[254]], dtype=torch.uint8))
    assert one.decode().tolist() == [[math.inf, math.inf]]


@pytest.mark.parametrize(
    ("codes", "scales", "error", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.ones(2, 1),
            TypeError,
            "codes: expected float8_e4m3fn or float8_e5m2, got torch.float",
        ),
        (
            torch.zeros(2, 3).to(E4M3),
            torch.ones(2, 1).half(),
            TypeError,
            "scales: expected float32, .* got torch.float16",
        ),
        (torch.zeros(2, 3).to(E4M3), 1.0, TypeError, "scales: expected a tensor, got float"),
        (torch.zeros(2, 3, 4).to(E4M3), torch.ones(2, 1), ValueError, r"codes: expected two dimensions, .*\[2, 3, 4\]"),
        (torch.zeros(2, 3).to(E4M3), torch.ones(2), ValueError, r"scales: expected two dimensions, got shape \[2\]"),
        (
            torch.zeros(2, 3).to(E4M3),
            torch.ones(3, 1),
            ValueError,
            r"\[3, 1\] do not fit .*\[2, 3\]: expected \[2, 1\]",
        ),
        (
            torch.zeros(2, 300).to(E4M3),
            torch.ones(2, 4),
            ValueError,
            r"expected \[2, 1\] \(a row a scale\), \[2, 5\] \(64 columns a scale\) or \[2, 3\] \(128 columns a scale\)",
        ),
        (torch.zeros(2, 3, device="meta").to(E4M3), torch.ones(2, 1), ValueError, "codes are on meta, scales on cpu"),
    ],
)
def test_what_is_no_operand_is_refused(codes: Any, scales: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scaled(codes, scales)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        Scaled(torch.zeros(1, 1).to(E4M3), torch.ones(1, 1)).decode(torch.float64)


@pytest.mark.parametrize("features", [0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 300, 4096])
def test_the_width_of_a_block_follows_from_the_shapes(features: int) -> None:
    for block in BLOCKS:
        one = Scaled(torch.zeros(2, features).to(E4M3), torch.ones(2, columns_of(features, block)))
        whole = features <= block
        assert one.block == block or whole, "a block of the whole row is the row"


def test_operands_of_one_kind_are_joined_as_they_are() -> None:
    for kind in SCALES:
        parts = [random_operand(n, 150, n, E4M3, kind, 64) for n in (3, 4)]
        joined = concatenated(list(parts))
        assert isinstance(joined, Scaled) and joined.scales.dtype == kind
        assert_same_numbers(joined.decode(), torch.cat([part.decode() for part in parts]))
    assert concatenated([random_operand(3, 150, 0, E4M3), random_operand(3, 150, 0, E5M2)]) is None
    assert concatenated([random_operand(3, 150, 0), torch.zeros(3, 150)]) is None


# -- kernels ----------------------------------------------------------------------------------------------------------


@launched
@quiet
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code_under_every_scale_has_the_bits_of_its_definition(codes: torch.dtype, dtype: torch.dtype) -> None:
    where = testing.device()
    all_codes = every_code(codes).expand(256, 256).contiguous().to(where)
    for kind in SCALES:
        scales = torch.arange(256).to(torch.uint8)[:, None]
        if kind == torch.float32:
            spread = torch.randn(256, 1, generator=torch.Generator().manual_seed(0)) * 60
            scales = torch.cat([torch.exp2(spread)[:-4], torch.tensor([[0.0], [-3.7], [math.inf], [math.nan]])])
        one = Scaled(all_codes, (scales if kind == torch.float32 else scales.view(kind)).to(where))
        assert_same_numbers(scaled.decoded_by_kernel(one, dtype).cpu(), on_cpu(one).decode(dtype))


@launched
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(0, 40),
    features=st.integers(1, 290),
    block=st.sampled_from(BLOCKS),
    codes=st.sampled_from(CODES),
    kind=st.sampled_from(SCALES),
    cut=st.tuples(st.integers(0, 290), st.integers(0, 290)),
    strided=st.booleans(),
)
def test_any_range_of_columns_has_them_too(tokens, features, block, codes, kind, cut, strided) -> None:
    one = random_operand(tokens, features, 7, codes, kind, block)
    if strided:
        one = Scaled(_strided(one.codes), _strided(one.scales))
    part = slice(*sorted(min(c, features) for c in cut))
    assert_same_numbers(scaled.decoded_by_kernel(one, torch.bfloat16, part).cpu(), on_cpu(one).decode(columns=part))


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers in every other place of a transposed matrix, with NaN in between."""
    rows, columns = tensor.shape
    size = tensor.element_size()
    raw = torch.full((columns + 1, 2 * rows + 1), -1, dtype={1: torch.int8, 4: torch.int32}[size], device=tensor.device)
    view = raw.view(tensor.dtype)[:columns, : 2 * rows : 2].t()
    view.view(raw.dtype).copy_(tensor.contiguous().view(raw.dtype))
    return view


@launched
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(0, 70),
    rows=st.integers(1, 80),
    columns=st.integers(1, 140),
    blocks=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    codes=st.tuples(st.sampled_from(CODES), st.sampled_from(CODES)),
    kind=st.sampled_from(SCALES),
    strided=st.booleans(),
)
def test_the_gradient_of_a_kernel_is_that_of_the_decoded_operands(
    tokens, rows, columns, blocks, codes, kind, strided
) -> None:
    """NaN in whatever lies between and behind the operands' elements must not get into it."""
    x = whole_operand(tokens, columns, 1, codes[0], kind, blocks[0])
    dy = whole_operand(tokens, rows, 2, codes[1], kind, blocks[1])
    want = on_cpu(dy).decode().double().T @ on_cpu(x).decode().double()
    if strided:
        x, dy = (Scaled(_strided(one.codes), _strided(one.scales)) for one in (x, dy))
    assert torch.equal(gradient(x, dy, "fused").cpu().double(), want)
    assert torch.equal(gradient(on_cpu(x), on_cpu(dy), "banded").double(), want)


PAIRS = {
    "both, rows": lambda: (whole_operand(35, 67, 1), whole_operand(35, 20, 2, E5M2)),
    "both, blocks": lambda: (
        whole_operand(35, 133, 1, E4M3, torch.float32, 128),
        whole_operand(35, 70, 2, E4M3, torch.float32, 64),
    ),
    "x": lambda: (whole_operand(35, 67, 1), testing.integers((35, 20), 2, torch.bfloat16)),
    "x, dy fp32": lambda: (whole_operand(35, 67, 1), testing.integers((35, 20), 2, torch.float32)),
    "x, dy fp16": lambda: (whole_operand(35, 67, 1), testing.integers((35, 20), 2, torch.float16)),
    "dy": lambda: (testing.integers((35, 67), 1, torch.bfloat16), whole_operand(35, 20, 2, E5M2, torch.uint8, 64)),
    "dy, x fp32": lambda: (testing.integers((35, 67), 1, torch.float32), whole_operand(35, 20, 2, E5M2)),
}


def plain(operand: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return operand.decode(dtype) if isinstance(operand, Scaled) else operand


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*ARGUMENTS, "Adan"])
def test_a_step_of_every_rule_has_the_bits_of_a_step_on_decoded_operands(name: str, schedule: str) -> None:
    pairs = [PAIRS[which]() for which in ("both, rows", "dy")]
    want = steps(name, "banded", [(plain(on_cpu(x)), plain(on_cpu(dy))) for x, dy in pairs])
    assert_same(steps(name, schedule, pairs), want, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", PAIRS)
def test_it_does_with_any_pair_of_operands(which: str, schedule: str) -> None:
    x, dy = PAIRS[which]()
    want = steps("AdamW", "banded", [(plain(on_cpu(x)), plain(on_cpu(dy)))])
    assert_same(steps("AdamW", schedule, [(x, dy)]), want, which)


@launched
@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"state_dtype": "fp8", "extra_bits": 8}], ids=str)
def test_it_does_with_states_in_8_bits(options: dict[str, Any]) -> None:
    pairs = [PAIRS["both, blocks"]()] * 2
    want = steps("AdamW", "banded", [(on_cpu(x), on_cpu(dy)) for x, dy in pairs], **options)
    assert_same(steps("AdamW", "fused", pairs, **options), want)


@launched
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", SCALES, ids=str)
def test_random_operands_have_the_bits_of_decoding_first_in_the_interpreter(kind: torch.dtype, block: int) -> None:
    """Of one tile size; on a GPU tile sizes may differ, and sums with them."""
    if testing.device().type == "cuda":
        pytest.skip("compared with whole numbers there")
    x, dy = random_operand(45, 133, 1, E4M3, kind, block), random_operand(45, 70, 2, E5M2, kind, block)
    assert torch.equal(gradient(x, dy, "fused"), gradient(x.decode(), dy.decode(), "fused"))
    assert torch.equal(gradient(x, dy, "banded"), gradient(x.decode(), dy.decode(), "banded"))


@quiet
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("codes", "code", "bad"),
    [(E4M3, 0x7F, math.nan), (E5M2, 0x7E, math.nan), (E5M2, 0x7C, math.inf), (E5M2, 0xFC, -math.inf)],
)
def test_what_is_not_finite_shows_and_stays_where_it_is(schedule: str, codes, code: int, bad: float) -> None:
    x, dy = whole_operand(9, 67, 1, codes), torch.ones(9, 33, device=testing.device(), dtype=torch.bfloat16)
    clean = gradient(x, dy, schedule)
    x.codes.view(torch.uint8)[4, 60] = code
    got = gradient(x, dy, schedule)
    column = torch.full_like(got[:, 60], bad)
    assert torch.equal(got[:, 60].nan_to_num(), column.nan_to_num())
    got[:, 60] = clean[:, 60]
    assert torch.equal(got, clean)


@quiet
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scale_that_is_not_finite_spoils_its_block_and_no_other(schedule: str) -> None:
    x = whole_operand(9, 150, 1, E4M3, torch.uint8, 64)
    dy = torch.ones(9, 33, device=testing.device(), dtype=torch.bfloat16)
    clean = gradient(x, dy, schedule)
    x.scales[4, 1] = 255
    got = gradient(x, dy, schedule)
    assert got[:, 64:128].isnan().all()
    got[:, 64:128] = clean[:, 64:128]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_tokens_are_a_gradient_of_zero(schedule: str) -> None:
    none = [(whole_operand(0, 67, 1), whole_operand(0, 65, 2))]
    want = steps("AdamW", schedule, [(plain(x), plain(dy)) for x, dy in none])
    assert_same(steps("AdamW", schedule, none), want)


# -- who decodes ------------------------------------------------------------------------------------------------------


def test_the_banded_schedule_decodes_dy_band_by_band_and_x_once(monkeypatch) -> None:
    x, dy = whole_operand(9, 40, 1, E4M3, torch.uint8, 64), whole_operand(9, 150, 2, E4M3, torch.uint8, 64)
    x, dy = on_cpu(x), on_cpu(dy)
    want = gradient(x, dy, "banded")
    seen: list[tuple[int, int]] = []
    decode = Scaled.decode

    def watched(self: Scaled, dtype: torch.dtype = torch.bfloat16, columns: slice | None = None) -> Tensor:
        found = decode(self, dtype, columns)
        seen.append(tuple(found.shape))
        return found

    monkeypatch.setattr(Scaled, "decode", watched)
    monkeypatch.setattr(banded, "CPU_BAND", 40 * 50)
    assert torch.equal(gradient(x, dy, "banded"), want)
    assert seen == [(9, 40), (9, 50), (9, 50), (9, 50)]


@launched
def test_the_portable_kernel_decodes_as_it_loads_and_can_be_told_not_to(monkeypatch) -> None:
    x, dy = PAIRS["both, blocks"]()
    seen: list[Any] = []
    decoded = scaled.decoded
    monkeypatch.setattr(scaled, "decoded", lambda *a: seen.append(a[0]) or decoded(*a))
    want = gradient(x, dy, "fused")
    assert not seen
    monkeypatch.setattr(scaled, "dequantises_on_load", lambda schedule, asked: False)
    assert torch.equal(gradient(x, dy, "fused"), want)
    assert len(seen) == 2


@pytest.mark.parametrize("which", PAIRS)
def test_the_kernel_for_hopper_gets_what_was_chosen_for(which: str) -> None:
    x, dy = PAIRS[which]()
    shown = scaled.stand_ins(x, dy)
    schedule, *taken = scaled.prepared("hopper", "auto", x, dy)
    assert schedule == "hopper"
    for like, found, whole in zip(shown, taken, (x, dy), strict=True):
        assert (like.dtype, like.shape, like.stride()) == (found.dtype, found.shape, found.stride())
        assert_same_numbers(found, plain(whole, found.dtype))
