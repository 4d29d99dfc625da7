"""Steps of the kernel for Hopper beside the reference, and where they can run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.runtime import hopper
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import Storage
from forge_dsl.testing import Case

_THERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not _THERE, reason="needs a GPU of compute capability 9.0")]
BF16 = torch.bfloat16


def padded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in rows that begin at multiples of 16 bytes, NaN between them; and all of that memory."""
    rows, columns = tensor.shape
    memory = torch.full((rows + 1, -(-columns // 8) * 8 + 8), torch.nan, device="cuda", dtype=tensor.dtype)
    view = memory[:rows, :columns]
    view.copy_(tensor)
    return view, memory


def check_one_step(
    rule: Rule, case: Case, shape: tuple[int, int, int], weight: torch.dtype, state: torch.dtype, bits: int = 24
) -> None:
    """Bitwise against the reference, with NaN around every tensor: none is read, none is overwritten."""
    tokens, rows, columns = shape
    start = testing.make_problem(rule, case, (rows, columns), weight, state, 0)
    x, dy = testing.integers((tokens, columns), 1, BF16), testing.integers((tokens, rows), 2, BF16)
    table = testing.next_table(rule, case, start)
    truth = start.clone()
    testing.reference_step(rule, case, truth, (dy.double().T @ x.double()).float(), table)
    kept = {name: padded(tensor) for name, tensor in start.tensors(rule)}
    states = [kept[name][0] if name in kept else None for name in rule.spec.state_names]
    ours = (rule, padded(x)[0], padded(dy)[0], kept["weight"][0], states, table, case.switches)
    hopper.linear_step_hopper(*ours, exact=True, gradient_bits=bits)
    for name, want in truth.tensors(rule):
        view, memory = kept[name]
        testing.assert_same_bits(view, want, f"{rule.spec.name} {case} {shape} {bits} bits: {name}")
        assert memory.isnan().sum() == memory.numel() - want.numel(), f"{shape}: wrote beyond the border of {name}"


def hopper_step(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: list[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool,
    storage: Storage,
) -> None:
    hopper.linear_step_hopper(rule, x, dy, weight, states, table, switches, exact, kept=storage)


# A border in both directions; several tiles for each program.
KEPT_SHAPES = [(65, 304, 520), (300, 2048, 4608)]
