"""The gradient's way through shared memory, the kernel's own source on a CPU: whole tiles, every class of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.runtime import gradient_bits
from tests.formats.gluon_on_cpu import HANDOVER, Block

HEIGHT, WIDTH, COLUMNS = 128, 256, 64
# Of the relative error, see `device_handover`; the product by which 20 and 24 bits are rounded is rounded itself.
BOUNDS = {16: 2.0**-8, 20: 2.5 * 2.0**-13 + 2.0**-24, 24: 2.5 * 2.0**-17 + 2.0**-24, 32: 0.0}
every_choice = pytest.mark.parametrize("bits", gradient_bits.CHOICES)


def through_shared_memory(tile: Tensor, bits: int, rows: int) -> Tensor:
    """A tile [128, 256] put whole and taken slice by slice, [rows, 64] each."""
    tall = HANDOVER["allocate_planes"](HEIGHT, WIDTH, COLUMNS, 1, bits)
    HANDOVER["put_gradient"](Block(tile.numpy().copy()), tall, 0, bits)
    return taken(tall, bits, rows)


def taken(tall: Any, bits: int, rows: int) -> Tensor:
    """What the planes hold, a tile [128, 256] or two of half its width, slice by slice."""
    planes = HANDOVER["in_slices"](tall, rows, bits)
    found = torch.empty(HEIGHT, WIDTH)
    down = HEIGHT // rows
    for index in range(WIDTH // COLUMNS * down):
        # A number of the device, as in the kernel, for what is computed from it.
        grad = HANDOVER["take_gradient"](planes, Index(index), None, HEIGHT, 4, bits)
        row, column = index % down * rows, index // down * COLUMNS
        found[row : row + rows, column : column + COLUMNS] = torch.from_numpy(np.ascontiguousarray(grad.values))
    return found


class Index(Block):
    """A whole number in a register."""

    def __mod__(self, other: int) -> Index:
        return Index(self.values % other)

    def __floordiv__(self, other: int) -> Index:
        return Index(self.values // other)

    def __mul__(self, other: int) -> Index:
        return Index(self.values * other)

    def __add__(self, other: Any) -> Index:
        return Index(self.values + other.values)

    def __eq__(self, other: object) -> Any:
        return Index(self.values == other)

    __hash__ = None  # type: ignore[assignment]


def tiles_of(words: np.ndarray) -> list[Tensor]:
    """fp32 numbers by their bits, in tiles, the last one filled up with zeros."""
    size = HEIGHT * WIDTH
    words = np.concatenate([words, np.zeros(-len(words) % size, np.uint32)]).astype(np.uint32)
    return list(torch.from_numpy(words.view(np.float32)).view(-1, HEIGHT, WIDTH))


def all_classes() -> np.ndarray:
    """Every sign and exponent, with mantissas at both ends, around each place where one is cut, and in between."""
    ends = {m for place in (0, 7, 8, 11, 12, 15, 16, 22) for m in ((1 << place) - 1, 1 << place, (1 << place) + 1)}
    mantissas = sorted({m & 0x7FFFFF for e in ends for m in (e, ~e, e | 0x555555, e ^ 0x2AAAAA)} | {0, 0x7FFFFF})
    upper = np.arange(512, dtype=np.uint32) << np.uint32(23)
    return (upper[:, None] | np.array(mantissas, np.uint32)[None, :]).reshape(-1)


def random_words(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, count, np.uint32)


@every_choice
@pytest.mark.parametrize("together", [1, 2])
def test_a_tile_in_parts_and_two_narrow_tiles_arrive_as_one_put_whole(bits: int, together: int) -> None:
    """Each part, of as many column groups as share a low plane or of twice as many, is put at its first group."""
    tile = tiles_of(random_words(HEIGHT * WIDTH))[0]
    tall = HANDOVER["allocate_planes"](HEIGHT, WIDTH // 2, COLUMNS, 2, bits)
    groups = together * HANDOVER["sharing"](bits)
    for first in reversed(range(0, WIDTH // COLUMNS, groups)):
        part = tile[:, first * COLUMNS : (first + groups) * COLUMNS]
        HANDOVER["put_gradient"](Block(np.ascontiguousarray(part.numpy())), tall, first, bits)
    testing.assert_same_bits(taken(tall, bits, 32), through_shared_memory(tile, bits, 64), f"{bits} bits")


@every_choice
@pytest.mark.parametrize("rows", [32, 64])
def test_every_class_of_numbers_arrives_as_the_reference_says(bits: int, rows: int) -> None:
    for tile in tiles_of(np.concatenate([all_classes(), random_words(HEIGHT * WIDTH)])):
        got = through_shared_memory(tile, bits, rows)
        want = gradient_bits.handed_over(tile, bits)
        nan = tile.isnan()
        if bits == 32:
            assert torch.equal(got.view(torch.int32), tile.view(torch.int32))
        assert got[nan].isnan().all() and want[nan].isnan().all()
        testing.assert_same_bits(got[~nan], want[~nan], f"{bits} bits")


@every_choice
def test_the_error_is_within_its_bound_and_comes_near_it(bits: int) -> None:
    words = np.concatenate([all_classes(), random_words(2**20)])
    x = torch.from_numpy(words.view(np.float32))
    # Beyond it lie numbers that become infinite; below 2^-126 the error is an absolute one.
    x = x[(x.abs() >= 2.0**-126) & (x.abs() < 3.4e38 * (1 - 2.0**-7))]
    error = ((gradient_bits.handed_over(x, bits).double() - x.double()) / x.double()).abs().max().item()
    assert error <= BOUNDS[bits]
    assert bits == 32 or error > 0.98 * BOUNDS[bits]


@every_choice
def test_subnormal_numbers_lose_at_most_the_bits_that_are_cut_off(bits: int) -> None:
    words = random_words(2**20) & np.uint32(0x807FFFFF)
    x = torch.from_numpy(words.view(np.float32))
    error = (gradient_bits.handed_over(x, bits).double() - x.double()).abs().max().item()
    assert error < 2.0 ** -(117 + bits) if bits < 32 else error == 0


@every_choice
def test_whole_numbers_pass_up_to_as_many_bits_as_are_kept(bits: int) -> None:
    largest = 2 ** min(bits - 8, 24)
    whole = torch.arange(-largest, largest + 1).float()
    passed = torch.equal(gradient_bits.handed_over(whole, bits), whole)
    assert passed
    if bits < 32:
        beyond = torch.tensor([largest + 1.0])
        assert not torch.equal(gradient_bits.handed_over(beyond, bits), beyond)


@every_choice
def test_numbers_that_have_no_more_bits_than_are_kept_pass_at_every_exponent(bits: int) -> None:
    words = all_classes() & np.uint32(0xFFFFFFFF << (32 - bits) & 0xFFFFFFFF)
    x = torch.from_numpy(words.view(np.float32))
    x = x[~x.isnan()]
    # The product may push the largest ones over the edge; they are within a few units of infinity.
    small = x[(x.abs() < 3.4e38 * (1 - 2.0 ** -(bits - 10))) | x.isinf()]
    assert torch.equal(gradient_bits.handed_over(small, bits).view(torch.int32), small.view(torch.int32))


@every_choice
def test_planes_have_the_size_that_the_plan_counts_with(bits: int) -> None:
    tall = HANDOVER["allocate_planes"](HEIGHT, WIDTH, COLUMNS, 1, bits)
    planes = HANDOVER["in_slices"](tall, 32, bits)
    memory = {id(plane.values): plane.values.nbytes for plane in tall}
    assert sum(memory.values()) == HEIGHT * WIDTH * bits // 8
    for plane, other in zip(planes, tall, strict=True):
        assert np.shares_memory(plane.values, other.values)


def test_a_choice_that_does_not_exist_is_refused() -> None:
    for value in (0, 8, 25, 24.0, "24", None, True):
        with pytest.raises(ValueError, match=r"Invalid gradient_bits: .* \(expected 16, 20, 24 or 32\)"):
            gradient_bits.check_choice(value)
    for value in gradient_bits.CHOICES:
        gradient_bits.check_choice(value)
