"""Hazard: torch.sqrt of fp32 on a CPU is not correctly rounded where MKL computes it; the reference's roots are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_dsl.runtime import reference_math


def everywhere() -> torch.Tensor:
    """Every exponent, with random and with extreme significands; zeros, denormals, infinity, NaN, negatives."""
    exponents = torch.arange(0, 256, dtype=torch.int32) << 23
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**23, (256, 500), generator=generator, dtype=torch.int32)
    edges = torch.tensor([0, 1, 2, 2**22, 2**23 - 2, 2**23 - 1], dtype=torch.int32).expand(256, 6)
    bits = exponents[:, None] + torch.cat([random, edges], dim=1)
    positive = bits.reshape(-1).view(torch.float32)
    return torch.cat([positive, -positive])


def test_a_root_is_the_nearest_fp32_number() -> None:
    x = everywhere()
    with np.errstate(invalid="ignore"):
        # numpy's fp32 root is the processor's, which IEEE 754 requires to be correctly rounded.
        expected = np.sqrt(x.numpy())
        assert np.array_equal(expected, np.sqrt(x.numpy().astype(np.float64)).astype(np.float32), equal_nan=True)
    got = reference_math.sqrt(x).numpy()
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.int32), expected[~nan].view(np.int32))


def test_squares_of_24_bit_numbers_have_exact_roots() -> None:
    whole = torch.arange(1, 4097, dtype=torch.float32)
    assert torch.equal(reference_math.sqrt(whole * whole), whole)


def test_a_float64_root_stays_one() -> None:
    x = torch.rand(1000, dtype=torch.float64)
    assert torch.equal(reference_math.sqrt(x), torch.sqrt(x))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf")])
def test_special_roots(value: float) -> None:
    root = reference_math.sqrt(torch.tensor(value))
    assert root.item() == value and torch.signbit(root) == torch.signbit(torch.tensor(value))
    assert reference_math.sqrt(torch.tensor(-1.0)).isnan()
