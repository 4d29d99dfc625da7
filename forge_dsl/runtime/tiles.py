"""Which tile sizes the portable kernel is launched with, from operand type, shape and what the device has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# From about this many tokens on, an H200 takes longer for the matrix product than for reading and writing the tensors.
_MATRIX_BOUND = 1024


@dataclass(frozen=True)
class Tiles:
    """A launch configuration: tile block_o x block_i, block_t tokens a step, epilogue in slices_o x slices_i parts."""

    block_o: int
    block_i: int
    block_t: int
    slices_o: int
    slices_i: int
    group: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def choose_tiles(
    rows: int, columns: int, tokens: int, operand: torch.dtype, roomy: bool, device: torch.device, simulated: bool
) -> Tiles:
    """The first of this device's tiles of which the weight has enough to occupy half of its multiprocessors.

    roomy: registers are wanted, for fp32 tensors to load or for exact division; the epilogue then takes smaller parts.
    Every choice compiles without a spilled register. Few tokens are bound by memory, where smaller tiles overlap more.
    """
    if simulated:
        return Tiles(32, 64, 32, 2, 2, 4, 4, 1)
    major, shared = capability(device)
    if operand == torch.float32:
        return Tiles(64, 64, 16, 1, 2, 8, 4, 3)
    small = [Tiles(64, 64, 64, 1, 2, 8, 4, 3)]
    if rows % 16 or columns % 16:
        # Rows that do not begin at multiples of 16 elements are read one by one, which takes registers for addresses.
        small = [Tiles(64, 64, 32, 1, 2, 8, 8, 3)]
        large = [] if roomy else [Tiles(128, 64, 32, 2, 2, 8, 8, 3)]
    elif major == 9 and shared >= 200 * 1024:
        if tokens < _MATRIX_BOUND:
            large = [Tiles(64, 256, 64, 2, 2, 8, 8, 4) if roomy else Tiles(64, 256, 64, 1, 2, 8, 8, 4)]
        elif roomy:
            large = [Tiles(128, 128, 64, 2, 2, 8, 8, 4)]
        else:
            large = [Tiles(128, 256, 64, 2, 4, 8, 8, 4), Tiles(128, 128, 64, 2, 2, 8, 8, 4)]
    elif shared >= 160 * 1024:
        large = [Tiles(128, 128, 64, 2, 2, 8, 8, 3)]
    else:
        large = [Tiles(128, 128, 32, 2, 2, 8, 8, 3)]
    wanted = multiprocessors(device) // 2
    for tiles in large + small:
        if -(-rows // tiles.block_o) * -(-columns // tiles.block_i) >= wanted:
            return tiles
    return small[0]


def per_multiprocessor(tiles: Tiles) -> int:
    return 1 if tiles.block_o * tiles.block_i > 64 * 64 else 4


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    # Not in torch's stubs, but there since 2.5.
    return int(properties.major), int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009
