"""The formats of the Hopper kernel, its own source on a CPU, are those of `forge_dsl.formats` bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.formats import registry, rounding
from forge_dsl.formats.block_wise import BlockWise
from forge_dsl.formats.extended import Extended
from tests.formats.gluon_on_cpu import FUNCTIONS, Block

CODES = [("int8", False), ("int8", True), ("fp8", False), ("fp8", True)]
# A state's codes, and a weight's, which keep small magnitudes.
WRITTEN = [*[(form, nonnegative, True) for form, nonnegative in CODES], ("fp8", False, False)]


def tensor(block: Block) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(block.values))


def words_of(codes: np.ndarray) -> Block:
    return Block(np.ascontiguousarray(codes).view(np.int32))


def codes_of(words: Block) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words.values).view(np.uint8))


def handed(drawn: Tensor, form: str, nonnegative: bool) -> Block:
    """Draws as `encode` takes them for a format: loose ones with other bits above their 16."""
    how = FUNCTIONS["form_of_draws"](form, nonnegative)
    if how == "raised":
        return Block((drawn.float() + 2.0**23).numpy())
    return Block((drawn | drawn.flip(0, 1) << 16).numpy())


def draws_of(rows: int, columns: int) -> Tensor:
    return rounding.draws_of(rounding.key(rounding.base(1, 2), 3, 1), rows, columns)


def codec_of(form: str, nonnegative: bool, flush: bool = True) -> BlockWise:
    codec = registry.of_state(form, nonnegative) if flush else registry.of_weight(form)
    assert isinstance(codec, BlockWise)
    return codec


def matrix(rows: int, nonnegative: bool) -> Tensor:
    """Rows of every size, with zeros of both signs; some with infinities, NaN, numbers outside the domain."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator) * torch.exp(3 * torch.randn(rows, 64, generator=generator))
    x *= torch.exp2(torch.randint(-140, 120, (rows, 1), generator=generator).float())
    x = x.abs() if nonnegative else x
    x[torch.rand(rows, 64, generator=generator) < 0.1] = 0.0
    x[torch.rand(rows, 64, generator=generator) < 0.1] = -0.0
    x[1::9] = 0.0
    for first, value in ((3, torch.inf), (4, -torch.inf), (5, torch.nan), (6, -1e-30), (7, 3.4e38), (8, 1e-44)):
        x[first::16, 17] = value
    return x


@pytest.mark.parametrize(("row", "column"), [(0, 0), (130, 64), (2**20 + 5, 2**18 + 192), (2**30 + 7, 2**30 + 64)])
def test_draws(row: int, column: int) -> None:
    key = rounding.key(rounding.base(-12345678901234, 7), 2**24 + 1, 2)
    like = Block(np.zeros((32, 64), np.float32))
    numbers = tuple(Block(np.uint32(number)) for number in key)
    want = rounding.draws(key, torch.arange(32) + row, torch.arange(64) + column)
    got = {form: tensor(FUNCTIONS["draws"](numbers, row, column, like, form)) for form in ("number", "loose", "raised")}
    testing.assert_same_bits(got["number"], want, "draws")
    testing.assert_same_bits(got["loose"] & 0xFFFF, want, "draws with anything above")
    testing.assert_same_bits(got["raised"].view(torch.float32), want.float() + 2.0**23, "draws as fp32 numbers")


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
@pytest.mark.parametrize("draw", [0, 1, 0x7FFF, 0x8000, 0xFFFF, None], ids=str)
def test_every_upper_half_of_a_number_is_rounded_alike(low: int, draw: int | None) -> None:
    bits = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)
    # NaN as arithmetic makes it.
    bits[np.isnan(bits.view(np.float32))] = 0x7FFFFFFF
    drawn = draws_of(1, 2**16) if draw is None else torch.full((1, 2**16), draw, dtype=torch.int32)
    dtype = FUNCTIONS["gl"].bfloat16
    got = FUNCTIONS["rounded_stochastic"](Block(bits.view(np.float32)[None]), dtype, Block(drawn.numpy()))
    want = rounding.rounded_stochastic(torch.from_numpy(bits.view(np.float32))[None], torch.bfloat16, drawn)
    testing.assert_same_bits(tensor(got).view(torch.bfloat16), want, "bf16")


def test_the_largest_numbers_do_not_become_infinite() -> None:
    bits = np.arange(0x7F7EFF00, 0x7F800001, dtype=np.uint32)
    x = torch.from_numpy(np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32))[None]
    drawn = draws_of(1, x.shape[1])
    got = FUNCTIONS["rounded_stochastic"](Block(x.numpy()), FUNCTIONS["gl"].bfloat16, Block(drawn.numpy()))
    want = rounding.rounded_stochastic(x, torch.bfloat16, drawn)
    testing.assert_same_bits(tensor(got).view(torch.bfloat16), want, "bf16")
    assert torch.equal(want.isinf(), x.isinf())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_widened_out_of_its_word(dtype: torch.dtype) -> None:
    kind = FUNCTIONS["gl"].bfloat16 if dtype == torch.bfloat16 else FUNCTIONS["gl"].float16
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)
    got = tensor(FUNCTIONS["widened"](words_of(bits), kind, None))
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float()
    testing.assert_same_bits(got.nan_to_num(1.5), want.nan_to_num(1.5), "widened")
    assert torch.equal(got.isnan(), want.isnan())


def test_fp32_is_its_own_word() -> None:
    fp32 = Block(np.arange(64, dtype=np.float32)[None])
    assert np.array_equal(FUNCTIONS["widened"](fp32, np.float32, None).values, fp32.values)


@pytest.mark.parametrize("bits", [8, 16])
def test_bits_beside_a_weight_are_joined_to_it(bits: int) -> None:
    """Any bits to any weight, those of another weight included."""
    generator = torch.Generator().manual_seed(bits)
    high = torch.randn(96, 64, generator=generator).bfloat16()
    high[::7] = 0.0
    kind = torch.int8 if bits == 8 else torch.int16
    low = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, (96, 64), generator=generator).to(kind)
    want = Extended(bits).decode(high, low)
    got = FUNCTIONS["joined"](Block(high.float().numpy()), words_of(low.numpy()), bits)
    testing.assert_same_bits(tensor(got), want, f"{bits} bits")


@pytest.mark.parametrize(("form", "nonnegative"), CODES)
@pytest.mark.parametrize("scale", [0, 1, 20, 127, 200, 254, 255])
def test_every_code_is_read_alike(form: str, nonnegative: bool, scale: int) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    if form == "fp8" and not nonnegative:
        # Beyond the largest number, 448, float8 has NaN, which is never written.
        codes[codes % 128 == 127] = 126
        # The least scale that is.
        scale = max(scale, 8)
    scales = np.full(4, scale, np.int32)
    got = FUNCTIONS["decode"](words_of(codes), Block(scales), form, nonnegative, None)
    want = codec_of(form, nonnegative).decode(torch.from_numpy(codes), torch.from_numpy(scales.astype(np.uint8))[None])
    testing.assert_same_bits(tensor(got), want, f"{form} {nonnegative}")


@pytest.mark.parametrize(("form", "nonnegative", "flush"), WRITTEN)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_blocks_are_written_alike(form: str, nonnegative: bool, flush: bool, stochastic: bool, exact: bool) -> None:
    """The approximate root of this machine is the exact one, so both kinds of arithmetic have the same bits here."""
    x = matrix(640, nonnegative)
    drawn = draws_of(*x.shape)
    arguments = Block(x.numpy()), handed(drawn, form, nonnegative), form, nonnegative, stochastic, exact, flush
    words, scales = FUNCTIONS["encode"](*arguments)
    want = codec_of(form, nonnegative, flush).encode(x, drawn if stochastic else None)
    assert want.scales is not None
    testing.assert_same_bits(tensor(scales)[None], want.scales, f"{form} {nonnegative}: scales")
    testing.assert_same_bits(codes_of(words), want.codes, f"{form} {nonnegative}: codes")


@pytest.mark.parametrize(("form", "nonnegative", "flush"), WRITTEN)
def test_numbers_on_the_grid_stay_there(form: str, nonnegative: bool, flush: bool) -> None:
    """What was decoded is encoded again as it was, whatever is drawn; the largest code of a block as well."""
    codec = codec_of(form, nonnegative, flush)
    start = codec.encode(matrix(640, nonnegative).nan_to_num(0.0, 1.0, 1.0).abs())
    assert start.scales is not None
    x = codec.decode(start.codes, start.scales)
    # A number beyond the format's largest has become infinite.
    x = x[x.isfinite().all(1)]
    assert len(x) > 500
    for draw in (0, 0xFFFF):
        drawn = handed(torch.full(x.shape, draw, dtype=torch.int32), form, nonnegative)
        words, scales = FUNCTIONS["encode"](Block(x.numpy()), drawn, form, nonnegative, True, False, flush)
        again = codec.decode(codes_of(words), tensor(scales)[None])
        testing.assert_same_bits(again, x, f"{form} {nonnegative}")
