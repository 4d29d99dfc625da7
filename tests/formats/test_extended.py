"""A bf16 weight and the bits beside it: exact both ways, and told from a weight that something else wrote."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_dsl.formats import registry, rounding
from forge_dsl.formats.extended import Extended, fingerprint

patterns = st.integers(-(2**31), 2**31 - 1)


@settings(deadline=None)
@given(st.lists(patterns, min_size=1, max_size=50))
def test_sixteen_bits_reconstruct_every_number(bits: list[int]) -> None:
    w = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    high, low = Extended(16).encode(w)
    back = Extended(16).decode(high, low)
    number = ~w.isnan()
    assert torch.equal(back[number].view(torch.int32), w[number].view(torch.int32))
    assert back[~number].isnan().all() and high[~number].isnan().all()
    tie = (w.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[number & ~tie], w[number & ~tie].bfloat16())


@settings(deadline=None)
@given(st.lists(patterns, min_size=1, max_size=50), st.integers(0, 65535))
def test_eight_bits_reconstruct_24_rounded_ones(bits: list[int], draw: int) -> None:
    w = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for draws in (None, torch.full_like(w, draw, dtype=torch.int32)):
        high, low = Extended(8).encode(w, draws)
        back = Extended(8).decode(high, low)
        assert ((back.view(torch.int32) & 0xFF) == 0).all()
        fine = w.isfinite() & (w.abs() < 3.3e38)
        step = torch.ldexp(torch.ones_like(w), torch.frexp(w).exponent.clamp(min=-125) - 16)
        assert ((back - w).abs()[fine] <= step[fine]).all()
        again = Extended(8).encode(back, draws)
        number = ~w.isnan()
        assert torch.equal(Extended(8).decode(*again)[number], back[number])
        assert back[~number].isnan().all()


def test_stochastic_rounding_to_24_bits_is_unbiased_and_keeps_finite_finite() -> None:
    draws = torch.arange(65536, dtype=torch.int32)
    for x in (1.2345678, -3.1e-20, 1e-42, 7.7e30):
        w = torch.full((65536,), x)
        mean = Extended(8).decode(*Extended(8).encode(w, draws)).double().mean().item()
        assert mean == pytest.approx(w[0].item(), rel=1e-9)
    # The last 256 numbers before infinity: those above the middle round to it, as to nearest; the others never do.
    bits = torch.tensor([0x7F7FFF01, 0x7F7FFF7F, 0x7F7FFF80, 0x7F7FFFFF], dtype=torch.int32)
    for draw in (0, 65535):
        back = Extended(8).decode(*Extended(8).encode(bits.view(torch.float32), torch.full((4,), draw)))
        assert back.isinf().tolist() == [False, False, True, True]


def test_small_updates_are_kept() -> None:
    """An update of 2^-20 of the weight: to nearest it is lost in bf16 and in 24 bits, kept in 32 and in 24 by draws."""
    w, update = torch.ones(64, 64), 2.0**-20
    for codec, stochastic, moves in ((Extended(16), False, 1), (Extended(8), True, 1), (Extended(8), False, 0)):
        high, low = codec.encode(w)
        for step in range(1, 257):
            k = rounding.key(rounding.base(0, 0), step, 0)
            draws = rounding.draws_of(k, 64, 64) if stochastic else None
            high, low = codec.encode(codec.decode(high, low) + update, draws)
        moved = (codec.decode(high, low).double() - 1).mean().item()
        spread = 4 * 2.0**-15 * math.sqrt(256 * update * 2**15 / 4096) if stochastic else 0
        assert abs(moved - moves * 256 * update) <= spread


def test_bytes() -> None:
    for bits in (8, 16):
        codec = registry.of_weight(f"bf16+{bits}")
        split = codec.encode(torch.randn(3, 5))
        assert split.high.nbytes + split.low.nbytes == registry.bytes_of(codec, (3, 5)) == 15 * (2 + bits // 8)


def test_a_fingerprint_tells_a_changed_weight() -> None:
    w = torch.randn(33, 65).bfloat16()
    first = fingerprint(w)
    assert first == fingerprint(w.clone()) and 0 <= first < 2**63
    changed = w.clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(9.0, dtype=torch.bfloat16))
    swapped = w.flip(1)
    assert len({first, fingerprint(changed), fingerprint(swapped), fingerprint(w.T.contiguous())}) == 4
