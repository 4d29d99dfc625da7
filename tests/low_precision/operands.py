"""Operands in 8 bits for tests: all their layouts, random and of whole numbers, and one step on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_dsl import Scaled, testing
from forge_dsl.formats.operand import Operand
from tests.low_precision.common import make, parameter, snapshot

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODES = (E4M3, E5M2)
SCALES = (torch.uint8, torch.float8_e8m0fnu, torch.float32)
BLOCKS = (0, 64, 128)


def columns_of(features: int, block: int) -> int:
    return 1 if block == 0 else -(-features // block)


def random_operand(
    tokens: int, features: int, seed: int, codes: torch.dtype = E4M3, scales: torch.dtype = torch.uint8, block: int = 0
) -> Scaled:
    """Finite codes of every size, the subnormal ones too, under scales of a few decades."""
    generator = torch.Generator().manual_seed(seed)
    limit = 0x7F if codes == E4M3 else 0x7C
    found = torch.randint(0, limit, (tokens, features), generator=generator)
    found = found + 128 * torch.randint(0, 2, (tokens, features), generator=generator)
    shape = tokens, columns_of(features, block)
    if scales == torch.float32:
        factors = torch.exp(torch.randn(shape, generator=generator))
    else:
        factors = torch.randint(120, 134, shape, generator=generator).to(torch.uint8).view(scales)
    where = testing.device()
    return Scaled(found.to(torch.uint8).view(codes).to(where), factors.to(where))


def whole_operand(
    tokens: int, features: int, seed: int, codes: torch.dtype = E4M3, scales: torch.dtype = torch.uint8, block: int = 0
) -> Scaled:
    """Whole numbers up to 32 in size, whose products are summed exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(-4, 5, (tokens, features), generator=generator).float()
    exponents = torch.randint(0, 4, (tokens, columns_of(features, block)), generator=generator)
    factors = (
        torch.exp2(exponents.float()) if scales == torch.float32 else (127 + exponents).to(torch.uint8).view(scales)
    )
    where = testing.device()
    return Scaled(small.to(codes).to(where), factors.to(where))


def on_cpu(operand: Operand) -> Operand:
    return operand.cpu() if isinstance(operand, Tensor) else Scaled(operand.codes.cpu(), operand.scales.cpu())


def gradient(x: Operand, dy: Operand, schedule: str) -> Tensor:
    """`dy^T x` in fp32, as a step of SGD with a rate of 1 subtracts it from a weight of zeros."""
    weight = torch.nn.Parameter(torch.zeros(dy.shape[1], x.shape[1], device=x.device))
    optimizer = make("SGD", [weight], lr=1.0, weight_decay=0.0, schedule=schedule)
    with torch.no_grad():
        optimizer.update_linear(weight, x, dy)
    return -weight.detach()


def steps(name: str, schedule: str, operands: list[tuple[Operand, Operand]], **options: Any) -> dict[str, Tensor]:
    """The weight and its states after a step on each pair of operands."""
    x, dy = operands[0]
    weight = parameter(dy.shape[1], x.shape[1], device=x.device)
    optimizer = make(name, [weight], schedule=schedule, **options)
    for x, dy in operands:
        with torch.no_grad():
            optimizer.update_linear(weight, x, dy)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(optimizer)[0]
