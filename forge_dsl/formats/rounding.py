"""Stochastic rounding from a counter, so that it depends on nothing but (seed, step, weight, stream, row, column).

One 32-bit word serves two neighbouring columns of a row: the even column takes the low half, the odd column the high
half. A word is `mix(mix(word of the step + row * GOLDEN) ^ (column >> 1))`, with `mix` the two-multiply mixer
`lowbias32` (C. Wellons, "Prospecting for hash functions", 2018); the inner `mix` is one per row, the outer one per pair
of columns. The tensors of a weight differ in nothing but the last multiplier of the outer `mix`, an odd word that is
drawn anew for each state in each step: what comes before it is computed once for all of them. All of it is 32-bit
multiply, add, xor and shift, wrapping, so `forge_dsl.runtime.device_formats` repeats it bit for bit; here 32-bit words
are int64 tensors in [0, 2^32).

Rows below 2^32 and columns below 2^33 have words of their own, which is more than fits into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
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
    """What the draws of one tensor in one step begin with."""

    word: int  # the same for all tensors of a weight
    multiplier: int  # the last one of the outer `mix`


def words(base: int, step: int, streams: int) -> list[int]:
    """The table of a step: the word of the weight, then the multiplier of each of its states, in spec order."""
    word = mix(base ^ (step & _WORD))
    word = mix(word ^ (step >> 32 & _WORD))
    first, *others = (mix(word + stream * GOLDEN & _WORD) for stream in range(streams))
    return [first, *(other | 1 for other in others)]


def key_in(words: Sequence[int], stream: int) -> Key:
    """The key of a tensor in the table of a step. `stream`: 0 for the weight, 1, 2, ... for its states."""
    return Key(words[0], words[stream] if stream else MULTIPLIERS[1])


def key(base: int, step: int, stream: int) -> Key:
    """The same from what the table is made of."""
    return key_in(words(base, step, stream + 1), stream)


def signed32(word: int) -> int:
    """The word as an int32 holds it, for a table of 32-bit numbers on the device."""
    return word - 2**32 if word >= 2**31 else word


def mixed(words: Tensor, multiplier: int = MULTIPLIERS[1]) -> Tensor:
    """`mix` of every word of an int64 tensor, with any last multiplier."""
    words = words ^ (words >> 16)
    words = words * MULTIPLIERS[0] & _WORD
    words = words ^ (words >> 15)
    words = words * multiplier & _WORD
    return words ^ (words >> 16)


def draws(key: Key, rows: Tensor, columns: Tensor) -> Tensor:
    """16-bit draws, int32 in [0, 65536), of the given global rows x columns; both are one-dimensional, of any integer.

    The part of a tensor that a tile or a shard holds gets the same draws there as in the whole tensor.
    """
    return draws_at(key, rows[:, None], columns[None, :])


def draws_at(key: Key, rows: Tensor, columns: Tensor) -> Tensor:
    """The draws of single coordinates: `rows` and `columns` are integers that broadcast against each other."""
    rows, columns = rows.to(torch.int64), columns.to(torch.int64)
    of_row = mixed(key.word + (rows & _WORD) * GOLDEN & _WORD)
    words = mixed(of_row ^ (columns >> 1 & _WORD), key.multiplier)
    return (words >> 16 * (columns & 1) & 0xFFFF).to(torch.int32)


def draws_of(key: Key, rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """The draws of a whole matrix."""
    return draws(key, torch.arange(rows, device=device), torch.arange(columns, device=device))


def rounded_stochastic(values: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    """fp32 `values` in bf16 or fp16: up or down with the probability that makes the mean the value; fp32 as it is.

    `draws`: int32 in [0, 65536), of the same shape. The mean is exact in bf16 and among the normal fp16 numbers. Below
    2^-14, where fp16 is spaced 2^-24 and more than 16 bits are dropped, the probability is rounded to a multiple of
    2^-16: the mean is within 2^-41 of the value. From the largest finite number upward the result is that of rounding
    to nearest, so that a finite number becomes infinite only where that would. The sign of zero is kept; NaN is quiet.
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
    # From the top on, adding half a step is rounding to nearest: the largest finite number is odd, infinity ends in 0.
    moved = bits + torch.where(top, 0x8000, draws.to(torch.int32))
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
