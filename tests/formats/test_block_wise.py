"""The block-wise codecs: what they keep, what they round, and that a long decay neither sticks nor drifts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_dsl.formats import registry, rounding, scale
from forge_dsl.formats.block_wise import FourthPowers, SignedFloat, SignedSquares

CODECS = [SignedSquares(), FourthPowers(), SignedFloat(), SignedFloat(flush=False)]
codecs = pytest.mark.parametrize("codec", CODECS, ids=["int8 signed", "int8", "fp8 signed", "fp8 weight"])
SIGNED = [c for c in CODECS if not c.nonnegative]


def draws_for(shape: tuple[int, int], step: int = 1, stream: int = 1) -> torch.Tensor:
    return rounding.draws_of(rounding.key(rounding.base(5, 6), step, stream), *shape)


def every_code(codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of one block that hold every code under one scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    if isinstance(codec, SignedFloat):
        codes = torch.where((codes & 127) == 127, 0, codes)  # NaN of e4m3fn, which the codec does not use
    if isinstance(codec, SignedSquares):
        codes = torch.where(codes == 0, 128, codes)  # -128, likewise
    return codes.view(4, 64).clone(), torch.full((1, 4), 127, dtype=torch.uint8)


@codecs
def test_every_representable_number_round_trips(codec) -> None:
    codes, scales = every_code(codec)
    top = codec.decode(codes, scales).abs().max().item()
    codes[:, 63] = codes.view(-1)[codec.decode(codes, scales).abs().view(-1).argmax()]  # the largest in each block
    values = codec.decode(codes, scales)
    if isinstance(codec, SignedFloat) and codec.flush:
        values = torch.where(values.abs() < 2.0**-6, 0.0, values)
    assert values.abs().max() == top
    for draw in (0, 32768, 65535, None):
        draws = None if draw is None else torch.full_like(codes, draw, dtype=torch.int32)
        again = codec.encode(values, draws)
        assert torch.equal(codec.decode(*again), values)
        assert torch.equal(again.scales, scales)


@codecs
def test_a_block_of_zeros_is_zeros(codec) -> None:
    for zero in (0.0, -0.0):
        encoded = codec.encode(torch.full((3, 100), zero), torch.full((3, 100), 65535))
        assert torch.equal(codec.decode(*encoded), torch.zeros(3, 100))


@codecs
def test_one_huge_value_does_not_disturb_other_blocks_and_is_kept(codec) -> None:
    x = torch.full((1, 192), 1e-3)
    x[0, 70] = 3e38
    back = codec.decode(*codec.encode(x, draws_for((1, 192))))
    assert back[0, 70].item() == pytest.approx(3e38, rel=0.13)
    assert ((back[0, :64] - 1e-3).abs() < 1.3e-4).all() and ((back[0, 128:] - 1e-3).abs() < 1.3e-4).all()
    assert (back[0, 64:128][torch.arange(64) != 6] == 0).all()  # 41 decades below the largest of their block


@codecs
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(codec, bad: float) -> None:
    x = torch.ones(2, 130)
    x[1, 128] = bad
    back = codec.decode(*codec.encode(x, draws_for((2, 130))))
    assert not back[1, 128:].isfinite().any()
    assert back[0].isfinite().all() and back[1, :128].isfinite().all()
    again = codec.decode(*codec.encode(back, draws_for((2, 130))))
    assert not again[1, 128:].isfinite().any()


def test_a_negative_number_in_a_domain_without_them_is_visible() -> None:
    codec = FourthPowers()
    x = torch.ones(1, 128)
    x[0, 3] = -1e-30
    back = codec.decode(*codec.encode(x))
    assert not back[0, :64].isfinite().any() and back[0, 64:].isfinite().all()


@codecs
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 127, 129])
def test_a_tail_block_is_what_it_would_be_filled_with_zeros(codec, columns: int) -> None:
    x = torch.rand(3, columns) + 0.1
    encoded = codec.encode(x, draws_for((3, columns)))
    assert encoded.codes.shape == (3, columns) and encoded.scales.shape == (-(-columns // 64), 3)
    whole = torch.zeros(3, 192)
    whole[:, :columns] = x
    filled = codec.encode(whole, draws_for((3, 192)))
    assert torch.equal(encoded.codes, filled.codes[:, :columns])
    assert torch.equal(encoded.scales, filled.scales[: len(encoded.scales)])


@codecs
@settings(deadline=None, max_examples=60)
@given(exponent=st.integers(-90, 100), fraction=st.floats(1.0, 2.0, width=32), seed=st.integers(0, 1000))
def test_errors_are_bounded_by_the_neighbouring_codes(codec, exponent: int, fraction: float, seed: int) -> None:
    """Relative to the distance of codes at that magnitude: below 2 / k of the value, or the first code."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 64, generator=generator) ** 4 * fraction * 2.0**exponent
    if not codec.nonnegative:
        x = torch.where(torch.rand(1, 64, generator=generator) < 0.5, -x, x)
    draws = torch.randint(0, 65536, (1, 64), generator=generator, dtype=torch.int32)
    back = codec.decode(*codec.encode(x, draws))
    share = (x / x.abs().max()).abs()
    gap = {
        SignedSquares: 2 * (share * 2).sqrt() / 127 + 2 / 127**2,
        FourthPowers: 4 * share * (share * 2) ** -0.25 / 255 * 2 + 30 / 255**4,
        SignedFloat: share / 8 + 2.0**-14,
    }[type(codec)]
    assert ((back - x).abs() <= gap * x.abs().max() * 1.01).all()
    assert (back * x >= 0).all()


def many_draws(codec, value: float, largest: float) -> torch.Tensor:
    """What `value` decodes to under each of the 65536 draws, beside a number `largest` in its block."""
    x = torch.full((1041, 64), value)
    x[:, 0] = largest
    draws = torch.zeros(1041, 64, dtype=torch.int32)
    flat = torch.arange(1041 * 63, dtype=torch.int32).view(1041, 63)
    draws[:, 1:] = flat
    keep = flat < 65536
    return codec.decode(*codec.encode(x, draws & 0xFFFF))[:, 1:][keep]


@settings(deadline=None, max_examples=40)
@given(share=st.floats(-9.0, 0.0), largest=st.floats(0.5, 2.0, width=32))
def test_the_mean_over_all_draws_of_the_fourth_root_is_right(share: float, largest: float) -> None:
    """Down to and below the first code, to 2^-15 of a step: the root has 2^-16 of one at the largest code."""
    value = torch.tensor(largest * 10**share).item()
    decoded = many_draws(FourthPowers(), value, largest).double()
    low, high = decoded.min().item(), decoded.max().item()
    assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6)
    step = max(high**0.25 - low**0.25, 2e-6 * value**0.25 * 2**15)
    assert abs((decoded**0.25).mean().item() - value**0.25) <= 2.0**-15 * step


@pytest.mark.parametrize("codec", SIGNED, ids=["int8", "fp8", "fp8 weight"])
@settings(deadline=None, max_examples=40)
@given(share=st.floats(-3.9, 0.0), largest=st.floats(0.5, 2.0, width=32), sign=st.sampled_from([1, -1]))
def test_the_mean_over_all_draws_of_a_signed_state_is_the_value(codec, share: float, largest: float, sign: int) -> None:
    value = torch.tensor(sign * largest * 10**share).item()
    decoded = many_draws(codec, value, largest).double()
    low, high = decoded.min().item(), decoded.max().item()
    assert abs(decoded.mean().item() - value) <= 2.0**-16 * (high - low) + 1e-6 * abs(value)


@pytest.mark.parametrize("codec", SIGNED[:2], ids=["int8", "fp8"])
def test_a_signed_state_below_the_first_code_is_zero_under_every_draw(codec) -> None:
    """An unbiased draw would let it jump up rarely, and the rule divides by a root mean square of its own size."""
    assert (many_draws(codec, 1e-5, 1.0) == 0).all()


def test_signed_codes_reach_less_far_than_roots_of_nonnegative_ones() -> None:
    for signed in (SignedSquares(), SignedFloat()):
        assert _least(signed) > 2 * math.sqrt(_least(FourthPowers()))


def _least(codec) -> float:
    """The smallest magnitude stored, over the largest, that does not become zero under any draw."""
    codes, scales = every_code(codec)
    values = codec.decode(codes, scales).abs()
    kept = values[values > 0]
    if isinstance(codec, SignedFloat):
        kept = kept[kept >= 2.0**-6]
    return (kept.min() / values.max()).item()


def test_a_long_decay_neither_sticks_nor_drifts() -> None:
    """4000 steps of 0.999, whole blocks at once and single coordinates beside one that stays: the rate within 1 %."""
    codec, shape = FourthPowers(), (64, 64)
    # What draws that are hashed anew in each step leave of deviation after each thousand, measured.
    independent = ((0.128, 0.167), (0.185, 0.256), (0.227, 0.339), (0.264, 0.419))
    v = torch.ones(shape)
    lone = 0.3 * torch.ones(shape)
    for step in range(1, 4001):
        v = codec.decode(*codec.encode(v * 0.999, draws_for(shape, step)))
        lone = lone * 0.999
        lone[:, 0] = 1.0
        lone = codec.decode(*codec.encode(lone, draws_for(shape, step, 2)))
        if step % 1000 == 0:
            of_block, of_lone = independent[step // 1000 - 1]
            for got, start, spread in ((v, 1.0, of_block), (lone[:, 1:], 0.3, of_lone)):
                rate = math.log(start / got.double().mean().item()) / -math.log(0.999) / step
                assert abs(rate - 1) < 0.01
                assert got.double().log().std().item() < 0.7 * spread
    to_nearest = torch.ones(1, 64)
    for _ in range(1000):
        to_nearest = codec.decode(*codec.encode(to_nearest * 0.999))
    assert to_nearest[0, 0] > 0.95  # what rounding to nearest would have done


@pytest.mark.parametrize("beta, steps", [(0.95, 200), (0.99, 600), (0.999, 2000)])
def test_the_mean_of_the_inverse_root_of_a_second_moment_is_right(beta: float, steps: int) -> None:
    """By it a rule scales its step. Roundings that keep the mean of the moment itself put it up by 0.3 % and more."""
    codec, shape = FourthPowers(), (128, 128)
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(0.5 * torch.randn(shape, generator=generator))
    stored = exact = torch.zeros(shape)
    ratios = []
    for step in range(steps):
        square = (torch.randn(shape, generator=generator) * scales) ** 2
        stored, exact = (beta * moment + (1 - beta) * square for moment in (stored, exact))
        ratios.append((exact / stored).sqrt().double().mean().item())
        stored = codec.decode(*codec.encode(stored, draws_for(shape, step)))
    assert abs(sum(ratios[steps // 2 :]) / (steps - steps // 2) - 1) < 1e-3


@pytest.mark.parametrize("codec", SIGNED[:2], ids=["int8", "fp8"])
def test_a_momentum_without_gradient_decays_to_zero(codec) -> None:
    m = torch.linspace(-1, 1, 64 * 32).view(32, 64)
    m[:, 0] = 1.0
    for step in range(1, 200):
        m = m * 0.9
        m[:, 0] = 1.0
        m = codec.decode(*codec.encode(m, draws_for((32, 64), step)))
    assert (m[:, 1:] == 0).all()


def test_scales_never_move_a_value_that_did_not_change() -> None:
    """The grid is a power of two: while the largest of a block decays, the other numbers keep theirs exactly."""
    codec = FourthPowers()
    x = torch.rand(8, 64) ** 2 + 1e-4
    x[:, 0] = 1.7
    x = codec.decode(*codec.encode(x, draws_for((8, 64))))
    for step, largest in enumerate((1.6, 1.4, 1.1), 1):
        x[:, 0] = largest
        again = codec.decode(*codec.encode(x, draws_for((8, 64), step)))
        assert torch.equal(again[:, 1:], x[:, 1:])


def test_scale_bytes_are_the_least_that_fit() -> None:
    top = FourthPowers.top
    largest = torch.tensor([top - 1, top, top + 1, 0, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], dtype=torch.int32)
    assert scale.scale_of(largest, top, 1).tolist() == [127, 127, 128, 1, 224, 255, 255]


def test_float8_codes_are_those_of_torch() -> None:
    codes, scales = every_code(SignedFloat())
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(SignedFloat().decode(codes, scales), expected)


@pytest.mark.parametrize("shape", [(), (5,), (3, 70), (4, 3, 3, 3), (0, 5), (5, 0)], ids=str)
def test_any_shape_is_a_matrix(shape: tuple[int, ...]) -> None:
    rows, columns = registry.matrix_shape(shape)
    assert rows * columns == math.prod(shape)
    for name in ("int8", "fp8", "bf16", "fp32", "fp16"):
        for nonnegative in (False, True):
            codec = registry.of_state(name, nonnegative)
            encoded = codec.encode(torch.rand(shape).reshape(rows, columns))
            held = encoded.codes.nbytes + (0 if encoded.scales is None else encoded.scales.nbytes)
            assert held == registry.bytes_of(codec, shape)
            if encoded.scales is not None:
                assert encoded.scales.shape == registry.scale_shape(shape)
            assert codec.decode(*encoded).shape == (rows, columns)


def test_unknown_formats_are_named() -> None:
    with pytest.raises(ValueError, match="no format 'int4'; there are fp32, bf16"):
        registry.of_state("int4", False)
    with pytest.raises(ValueError, match="a weight has no format 'int8'"):
        registry.of_weight("int8")
