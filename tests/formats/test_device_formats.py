"""The Triton functions and the PyTorch codecs agree bit for bit: draws, rounding, codes, scales, split weights."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import testing
from forge_dsl.formats import registry, rounding
from forge_dsl.formats.block_wise import SignedFloat
from forge_dsl.formats.extended import Extended
from tests.formats import kernels

pytestmark = kernels.launched
SHAPES = [(1, 1), (3, 63), (17, 65), (5, 130), (2, 200), (33, 256)]
HALVES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def patterns(low: int) -> torch.Tensor:
    """All 2^16 upper halves of an fp32 number with this lower half: every sign, exponent, infinity and NaN."""
    bits = torch.arange(2**16, dtype=torch.int64) * 2**16 + low
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32).to(testing.device())


def matrix(shape: tuple[int, int], spread: float = 3.0) -> torch.Tensor:
    """Magnitudes over many orders, some zeros, some rows of zeros."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[1::7] = 0.0
    return x.to(testing.device())


def draws_for(shape: tuple[int, int], step: int = 3) -> torch.Tensor:
    return rounding.draws_of(rounding.key(rounding.base(1, 2), step, 1), *shape, device=testing.device())


@pytest.mark.parametrize("flat", [False, True], ids=["tile", "flat"])
@pytest.mark.parametrize("step", [1, 15, 16, 17, 2**24 + 1, 2**40 + 5])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_draws(step: int, stream: int, flat: bool) -> None:
    key = rounding.key(rounding.base(-12345678901234, 7), step, stream)
    ours = kernels.drawn(-12345678901234, 7, step, stream, (19, 140), 0, 0, flat)
    testing.assert_same_bits(ours, rounding.draws_of(key, 19, 140, testing.device()), "draws")


@pytest.mark.parametrize("flat", [False, True], ids=["tile", "flat"])
@pytest.mark.parametrize(("row0", "column0"), [(5, 64), (2**31 + 3, 128), (7, 2**32 + 64), (2**32 - 40, 2**33 - 256)])
def test_draws_of_a_shard_far_out(row0: int, column0: int, flat: bool) -> None:
    key = rounding.key(rounding.base(0, 0), 9, 1)
    rows = torch.arange(19, device=testing.device()) + row0
    columns = torch.arange(140, device=testing.device()) + column0
    ours = kernels.drawn(0, 0, 9, 1, (19, 140), row0, column0, flat)
    testing.assert_same_bits(ours, rounding.draws(key, rows, columns), "draws")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("low", HALVES, ids=hex)
def test_every_number_is_rounded_alike(low: int, dtype: torch.dtype) -> None:
    x = patterns(low)
    draws = draws_for((1, 2**16)).view(-1)
    out = torch.empty_like(x, dtype=dtype)
    kernels.round_numbers[(8,)](x, draws, out, 8192)
    testing.assert_same_bits(out, rounding.rounded_stochastic(x, dtype, draws), hex(low))


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("nonnegative", [False, True], ids=["signed", "nonnegative"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales(shape: tuple[int, int], name: str, nonnegative: bool, stochastic: bool) -> None:
    x = matrix(shape).abs() if nonnegative else matrix(shape)
    draws = draws_for(shape) if stochastic else None
    codec = registry.of_state(name, nonnegative)
    expected = codec.encode(x, draws)
    codes, scales = kernels.encoded(x, draws, name, nonnegative)
    testing.assert_same_bits(codes, expected.codes, "codes")
    testing.assert_same_bits(scales, expected.scales, "scales")
    back = kernels.decoded(codes, scales, name, nonnegative)
    testing.assert_same_bits(back, codec.decode(*expected), "values")


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
def test_a_weight_in_fp8_keeps_its_small_magnitudes(stochastic: bool) -> None:
    x = matrix((17, 200))
    draws = draws_for((17, 200)) if stochastic else None
    expected = SignedFloat(flush=False).encode(x, draws)
    codes, scales = kernels.encoded(x, draws, "fp8", False, flush=False)
    testing.assert_same_bits(codes, expected.codes, "codes")
    testing.assert_same_bits(scales, expected.scales, "scales")
    assert not torch.equal(codes, SignedFloat().encode(x, draws).codes)


@pytest.mark.parametrize("nonnegative", [False, True], ids=["signed", "nonnegative"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_exponent_and_what_is_not_finite(name: str, nonnegative: bool) -> None:
    """A block for each upper half of a pattern, beside a number 2^10 smaller; infinities and NaN among them."""
    x = torch.zeros(4096, 64, device=testing.device())
    x[:, 5] = patterns(0x1234)[::16]
    x[:, 6] = x[:, 5] / 1024
    draws = draws_for((4096, 64))
    codec = registry.of_state(name, nonnegative)
    expected = codec.encode(x, draws)
    codes, scales = kernels.encoded(x, draws, name, nonnegative)
    testing.assert_same_bits(codes, expected.codes, "codes")
    testing.assert_same_bits(scales, expected.scales, "scales")
    back = kernels.decoded(codes, scales, name, nonnegative)
    reference = codec.decode(*expected)
    testing.assert_same_bits(back.nan_to_num(1.5, 2.5), reference.nan_to_num(1.5, 2.5), "values")
    assert torch.equal(back.isnan(), reference.isnan())


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("low", HALVES, ids=hex)
def test_split_weights(low: int, bits: int, stochastic: bool) -> None:
    x = patterns(low)
    draws = draws_for((1, 2**16)).view(-1)
    codec = Extended(bits)
    expected = codec.encode(x, draws if stochastic else None)
    high, rest, back = torch.empty_like(expected.high), torch.empty_like(expected.low), torch.empty_like(x)
    kernels.split_numbers[(8,)](x, draws, high, rest, back, bits, stochastic, 8192)
    testing.assert_same_bits(high.view(torch.int16), expected.high.view(torch.int16), "high")
    testing.assert_same_bits(rest, expected.low, "low")
    testing.assert_same_bits(back.view(torch.int32), codec.decode(*expected).view(torch.int32), "joined")
