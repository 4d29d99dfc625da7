"""Operands in 8 bits on a GPU: every route has the exact gradient, and the portable kernel needs no memory for them.

The tests of `tests/low_precision/test_operands.py` and `test_update_linear.py` run on the GPU as well where there is
one; here is what only a GPU has: its kernels' real tiles, the kernel for Hopper, and memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import Scaled, optim
from forge_dsl.formats.operand import Operand
from forge_dsl.runtime import launch, scaled
from forge_dsl.runtime.linear import fused_linear
from tests.low_precision.operands import BLOCKS, E4M3, E5M2, on_cpu, random_operand, whole_operand

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ON_LOAD, DECODED = (lambda schedule, asked: schedule != "banded"), (lambda schedule, asked: False)
# Whole tiles of the kernel for Hopper; borders everywhere; rows that no vector load can take.
SHAPES = [(2304, 2048, 512), (1032, 1048, 1000), (513, 129, 77)]


def gradient(x: Operand, dy: Operand, schedule: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dy^T x` as a step of SGD in fast arithmetic subtracts it from a weight of zeros."""
    weight = torch.nn.Parameter(torch.zeros(dy.shape[1], x.shape[1], device="cuda", dtype=dtype))
    optimizer = optim.SGD([weight], lr=1.0, schedule=schedule, stochastic_rounding=False)
    with torch.no_grad():
        optimizer.update_linear(weight, x, dy)
    return -weight.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("route", ["on load", "decoded", "banded"])
def test_every_route_has_the_exact_gradient(route: str, block: int, shape: tuple[int, int, int], monkeypatch) -> None:
    rows, columns, tokens = shape
    monkeypatch.setattr(scaled, "dequantises_on_load", ON_LOAD if route == "on load" else DECODED)
    schedule = "banded" if route == "banded" else "fused"
    for kind in (torch.uint8, torch.float32):
        x = whole_operand(tokens, columns, 1, E4M3, kind, block)
        dy = whole_operand(tokens, rows, 2, E5M2, kind, block)
        want = on_cpu(dy).decode().double().T @ on_cpu(x).decode().double()
        assert want.abs().max() <= 65536, "whole numbers that the kernel for Hopper hands over exactly"
        assert torch.equal(gradient(x, dy, schedule).double().cpu(), want)
        plain = x.decode()
        assert torch.equal(gradient(plain, dy, schedule).double().cpu(), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_random_operands_have_the_bits_of_decoding_first(block: int, shape: tuple[int, int, int], monkeypatch) -> None:
    """The tiles differ, the order in which a coordinate's tokens are summed does not."""
    rows, columns, tokens = shape
    x, dy = random_operand(tokens, columns, 1, E4M3, block=block), random_operand(tokens, rows, 2, E5M2, block=block)
    rule, found = optim.SGD.rule, []
    for operands in ((x, dy), (scaled.decoded(x, torch.bfloat16), scaled.decoded(dy, torch.bfloat16))):
        weight = torch.zeros(rows, columns, device="cuda")
        table = torch.ones(16, device="cuda")
        switches = tuple(False for _ in rule.spec.switches)
        launch.linear_step_portable(rule, *operands, weight, [], table, switches, True)
        found.append(weight)
    assert found[0].abs().max() > 0 and torch.equal(*found)


def test_the_decoding_kernel_agrees_with_its_definition_on_random_operands() -> None:
    for block in BLOCKS:
        for kind in (torch.uint8, torch.float32):
            one = random_operand(1000, 1048, 3, E4M3, kind, block)
            for part in (None, slice(200, 777)):
                assert torch.equal(scaled.decoded(one, torch.bfloat16, part).cpu(), on_cpu(one).decode(columns=part))


def test_the_portable_kernel_takes_no_memory_for_its_operands(monkeypatch) -> None:
    monkeypatch.setattr(scaled, "dequantises_on_load", ON_LOAD)
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16))
    optimizer = optim.SGD([weight], lr=1e-3, schedule="fused")
    x, dy = whole_operand(4096, 1024, 1), whole_operand(4096, 1024, 2)
    peaks = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            optimizer.update_linear(weight, x, dy)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2**20, "x alone takes 4 MiB in 8 bits and 8 MiB in 16"


@pytest.mark.parametrize("schedule", ["auto", "fused", "banded"])
def test_a_layers_codes_have_the_bits_of_decoding_first(schedule: str, monkeypatch) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(2304, 2048, device="cuda", dtype=torch.bfloat16))
        optimizer = optim.AdamW([weight], saved_activations="fp8", schedule=schedule)
        for _ in range(2):
            x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
            fused_linear(x, weight, None, optim.AdamW).backward(
                torch.randn(512, 2304, device="cuda", dtype=torch.bfloat16)
            )
            optimizer.step()
            optimizer.zero_grad()
        state: dict[str, Any] = optimizer.state[weight]
        return [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]

    ours = train()
    monkeypatch.setattr(scaled, "dequantises_on_load", DECODED)
    for got, want in zip(ours, train(), strict=True):
        assert torch.equal(got, want)


def test_strided_codes_and_scales_are_read_where_they_lie() -> None:
    x, dy = whole_operand(300, 1048, 1, block=64), whole_operand(300, 513, 2, block=128)
    want = gradient(x, dy, "fused")

    def turned(one: Scaled) -> Scaled:
        codes = one.codes.view(torch.uint8).t().contiguous().t().view(one.codes.dtype)
        return Scaled(codes, one.scales.t().contiguous().t())

    assert torch.equal(gradient(turned(x), turned(dy), "fused"), want)
