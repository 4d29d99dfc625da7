"""Stochastic rounding from a counter, so that it depends on nothing but (seed, step, weight, stream, row, column).

The draws of one coordinate turn from step to step: a hash of (seed, weight, stream, row, column), plus for each step
another multiple of a 64th, modulo 1. In 64 successive steps it takes every one of the 64 places, in an order of which
any part is spread out: where draws from a hash of the step would gather and leave gaps by chance, these are uniform
over every stretch of steps. From 64 steps to the next all are moved by a little, so that the places of the next fall
between those before (the multiples of an irrational number, H. Weyl, 1916), and the order begins elsewhere, as a hash
says: else what changes once in so many steps that the order comes back to where it was would always be rounded in the
same direction. What successive roundings add to a coordinate then largely cancels instead of walking away: the noise
that a weight or a slow average collects is a fraction of what independent draws leave, at no cost.

Each rounding is unbiased over all coordinates, and so is the sum of changes that do not depend on what they change.
Where they do, the draw is not independent of the number, which draws before it have made: while a slow decay passes k
numbers of a format it takes up to one too many, half a percent in bf16 and 5 to 8 % in float8; and what is pulled
towards one value between two numbers, without noise, stays off it by up to 0.15 of their distance. And what changes in
every 10th step, and in no other, meets draws of one stretch that lie together: it collects 2.5 times the deviation that
independent draws would leave (other intervals and the states: up to 2.4, most 1).

One 32-bit word serves two neighbouring columns of a row. What is hashed is `mix(base of the weight + row * GOLDEN) ^
(column >> 1)`, by the two-multiply mixer `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018): `mix` is one
per row, the rest one per pair of columns. To the product of the second multiplication the rotation is added; the upper
half of that is the odd column's draw, and the even column's is it xor the lower half of the other factor, which never
changes (an xor with a constant permutes dyadic intervals, so it is uniform over steps as well). The two are independent
because the multiplier is odd. The tensors of a weight differ in nothing but that multiplier and the rotation: what
comes before is computed once for all of them. All of it is 32-bit multiply, add, xor and shift, wrapping, so
`forge_dsl.runtime.device_formats` repeats it bit for bit; here 32-bit words are int64 tensors in [0, 2^32).

Rows below 2^32 and columns below 2^33 are told apart. Words are of 32 bits, so that some places have the same: in a
weight of 16384 x 4096 about 131,000 pairs of 67 million.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
# From step to step, in 64ths. Odd, so that 64 steps take every place, and such that few steps seldom come back to about
# the same place (10, 19, 15 and 14 do, to within 2 of 64). Different ones, so that a weight and its first three states
# do not keep their distance.
TURNS = (45, 27, 47, 23)
_WORD = 0xFFFFFFFF


def mix(word: int) -> int:
    """A bijection of 32-bit words in which each input bit changes each output bit with probability about 1/2."""
    word ^= word >> 16
    word = word * MULTIPLIERS[0] & _WORD
    word ^= word >> 15
    word = word * MULTIPLIERS[1] & _WORD
    return word ^ (word >> 16)


def base(seed: int, weight_id: int) -> int:
    """What never changes for a weight, as a 32-bit word: one number per weight, computed when it is bound."""
    word = mix(seed & _WORD)
    word = mix(word ^ (seed >> 32 & _WORD))
    return mix(word + weight_id * GOLDEN & _WORD)


class Key(NamedTuple):
    """What the draws of one tensor in one step are made of."""

    base: int  # of the weight
    multiplier: int  # the second one
    turned: int  # how far the draws have rotated


def multiplier(stream: int) -> int:
    """The second multiplier of a tensor's hash, an odd word: `mix`'s own for the weight."""
    return mix(stream * GOLDEN & _WORD) | 1 if stream else MULTIPLIERS[1]


def words(base: int, step: int, streams: int) -> list[int]:
    """The table of a step: the base of the weight, then how far its draws and those of its states have turned."""
    return [base, *(turned(step, stream) for stream in range(streams))]


def turned(step: int, stream: int) -> int:
    """How far the draws of a tensor have turned, as a 32-bit word: the same for all weights.

    The upper 6 bits say which 64th, the lower 26 move all 64 of them: by the fraction of the golden ratio.
    """
    stretch = step >> 6
    begun = mix(stretch * GOLDEN + stream & _WORD)
    place = begun + step * TURNS[stream % len(TURNS)] & 63
    return place << 26 | (stretch * GOLDEN & _WORD) >> 6


def key_in(words: Sequence[int], stream: int) -> Key:
    """The key of a tensor in the table of a step. `stream`: 0 for the weight, 1, 2, ... for its states."""
    return Key(words[0], multiplier(stream), words[1 + stream])


def key(base: int, step: int, stream: int) -> Key:
    """The same from what the table is made of."""
    return key_in(words(base, step, stream + 1), stream)


def signed32(word: int) -> int:
    """The word as an int32 holds it, for a table of 32-bit numbers on the device."""
    return word - 2**32 if word >= 2**31 else word


def half_mixed(words: Tensor) -> Tensor:
    """`mix` of every word of an int64 tensor up to its last multiplication."""
    words = words ^ (words >> 16)
    words = words * MULTIPLIERS[0] & _WORD
    return words ^ (words >> 15)


def mixed(words: Tensor) -> Tensor:
    """`mix` of every word of an int64 tensor."""
    words = half_mixed(words) * MULTIPLIERS[1] & _WORD
    return words ^ (words >> 16)


def draws(key: Key, rows: Tensor, columns: Tensor) -> Tensor:
    """16-bit draws, int32 in [0, 65536), of the given global rows x columns; both are one-dimensional, of any integer.

    The part of a tensor that a tile or a shard holds gets the same draws there as in the whole tensor.
    """
    return draws_at(key, rows[:, None], columns[None, :])


def draws_at(key: Key, rows: Tensor, columns: Tensor) -> Tensor:
    """The draws of single coordinates: `rows` and `columns` are integers that broadcast against each other."""
    rows, columns = rows.to(torch.int64), columns.to(torch.int64)
    of_row = mixed(key.base + (rows & _WORD) * GOLDEN & _WORD)
    place = half_mixed(of_row ^ (columns >> 1 & _WORD))
    upper = (place * key.multiplier + key.turned & _WORD) >> 16
    return torch.where(columns & 1 == 1, upper, (upper ^ place) & 0xFFFF).to(torch.int32)


def draws_of(key: Key, rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """The draws of a whole matrix."""
    return draws(key, torch.arange(rows, device=device), torch.arange(columns, device=device))


def rounded_stochastic(values: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    """fp32 `values` in bf16 or fp16: up or down with the probability that makes the mean the value; fp32 as it is.

    `draws`: int32 in [0, 65536), of the same shape. The mean is exact in bf16 and among the normal fp16 numbers. Below
    2^-14, where fp16 is spaced 2^-24 and more than 16 bits are dropped, the probability is rounded to a multiple of
    2^-16: the mean is within 2^-41 of the value. No finite number becomes infinite in bf16; in fp16, from the largest
    finite number upward, the result is that of rounding to nearest. The sign of zero is kept; NaN is quiet.
    """
    if dtype == torch.float32:
        return values
    if dtype == torch.bfloat16:
        return _bfloat16(values, draws)
    if dtype == torch.float16:
        return _float16(values, draws)
    raise TypeError(f"stochastic rounding is to bfloat16 or float16, not {dtype}")


def _bfloat16(values: Tensor, draws: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    top = (bits & 0x7FFFFFFF) >= 0x7F7F0000
    # What is no less than the largest finite number becomes it, but for infinity, which ends in zeros.
    moved = bits + torch.where(top, 0, draws.to(torch.int32))
    bits = torch.where(values == values, moved, bits | 0x400000)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _float16(values: Tensor, draws: Tensor) -> Tensor:
    draws = draws.to(torch.int32)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    absolute = values.abs()
    normal = ((magnitude + (draws >> 3)) & ~0x1FFF).view(torch.float32)
    steps = absolute * 2.0**24
    whole = torch.floor(steps)
    up = draws + 0.5 < (steps - whole) * 65536.0
    small = (whole + up.to(torch.float32)) * 2.0**-24
    rounded = torch.where(magnitude < 0x38800000, small, normal)
    # 65504 is 0x477FE000; from there on to nearest, infinities and NaN with it.
    rounded = torch.where(magnitude < 0x477FE000, rounded, absolute)
    half = rounded.to(torch.float16).view(torch.int16)
    return (half | (bits >> 16 & 0x8000).to(torch.int16)).view(torch.float16)
