"""Hazard: Triton's interpreter cuts fp32 to bf16 instead of rounding, and its bf16 dot returns garbage.

A store rounds once, to nearest even, on every route.
"""

from __future__ import annotations

import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import device_math
from forge_dsl.runtime.triton_support import tl, triton
from tests.hazards.kernels import SGD, assert_same, case_of, launched, make

pytestmark = launched
BLOCK = 8192


@triton.jit
def store_rounded(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, device_math.rounded(tl.load(x + at), out.dtype.element_ty))


@triton.jit
def store_one_rounded(x, out):
    tl.store(out, device_math.rounded(tl.load(x), out.dtype.element_ty))


def patterns(low: int) -> torch.Tensor:
    """All 2^16 upper halves of an fp32 number with this lower half: every sign, exponent, infinity and NaN."""
    upper = torch.arange(2**16, dtype=torch.int64)
    bits = upper * 2**16 + low
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


# Below, at and above the middle between two bf16 numbers, and next to their ends.
LOWER_HALVES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


@pytest.mark.parametrize("low", LOWER_HALVES, ids=hex)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_number_is_rounded_as_torch_rounds_it(low: int, dtype: torch.dtype) -> None:
    x = patterns(low).to(testing.device())
    out = torch.empty_like(x, dtype=dtype)
    store_rounded[(len(x) // BLOCK,)](x, out, BLOCK)
    testing.assert_same_bits(out, x.to(dtype), hex(low))


def test_ties_go_to_even() -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.3961775292304957e38], device=testing.device())
    out = torch.empty_like(x, dtype=torch.bfloat16)
    store_rounded[(1,)](x, out, 4)
    assert out.tolist() == [1.0, 1 + 2**-6, -1.0, float("inf")]


def test_a_single_number_is_rounded_too() -> None:
    x = torch.tensor([1 + 3 * 2**-8], device=testing.device())
    out = torch.empty(1, dtype=torch.bfloat16, device=x.device)
    store_one_rounded[(1,)](x, out)
    assert out.item() == 1 + 2**-6


@pytest.mark.parametrize("how", ["fused", "elementwise", "many", "banded"])
@pytest.mark.parametrize(
    ("weight", "state"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_each_tensor_is_rounded_by_its_own_type(weight: torch.dtype, state: torch.dtype, how: str) -> None:
    """An fp32 state beside a bf16 weight is not stored through bf16 (flashoptim#2), nor the reverse."""
    step = make(SGD, case_of(SGD), (17, 33, 65), torch.bfloat16, torch.bfloat16, weight, state)
    expected = step.expected()
    got = step.run(how)
    assert [tensor.dtype for tensor in got] == [weight, state]
    assert_same(got, expected)
    if state == torch.float32:
        assert not torch.equal(got[1], got[1].bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_16_bit_operands_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """257 = 16 * 16 + 1 has more digits than bf16 holds; only an fp32 sum of exact products gives it."""
    step = make(SGD, case_of(SGD), (2, 33, 65), dtype, dtype)
    step.x.copy_(torch.tensor([[16.0], [1.0]]).expand(2, 65))
    step.dy.copy_(torch.tensor([[16.0], [1.0]]).expand(2, 33))
    expected = step.expected()
    assert_same(step.run("fused"), expected)
