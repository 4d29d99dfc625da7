"""Hazard: NaN in padding times 0 is NaN, and a masked lane that writes (TransformerEngine#3116).

All memory around the operands is NaN, or a pattern that must be found again.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.hazards.kernels import ADAMW, Step, assert_same, case_of, every_kernel, make

SHAPES = [(17, 33, 65), (1, 1, 1), (33, 31, 129), (5, 64, 64)]
CASE = case_of(ADAMW, amsgrad=True)


class Padded:
    """Puts tensors inside larger buffers, remembers the buffers, and sees whether anything around changed."""

    def __init__(self, fill: float, transposed: bool = False) -> None:
        self.fill, self.transposed = fill, transposed
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, value: Tensor) -> Tensor:
        rows, columns = value.T.shape if self.transposed else value.shape
        buffer = torch.full((rows + 6, columns + 70), self.fill, dtype=value.dtype, device=value.device)
        view = buffer[3 : 3 + rows, 5 : 5 + columns]
        view = view.T if self.transposed else view
        view.copy_(value)
        self.buffers.append((buffer, view))
        return view

    def assert_nothing_around_changed(self) -> None:
        for buffer, view in self.buffers:
            around = buffer.clone()
            inside = around[3 : 3 + (view.T if self.transposed else view).shape[0], 5 : buffer.shape[1] - 65]
            inside.fill_(self.fill)
            assert torch.equal(around.isnan(), torch.full_like(around, self.fill).isnan())
            assert self.fill != self.fill or (around == self.fill).all()


def placed(shape: tuple[int, int, int], dtype: torch.dtype, padded: Padded) -> tuple[Step, list[Tensor]]:
    step = make(ADAMW, CASE, shape, dtype, dtype, dtype, dtype)
    return step.placed(padded), step.expected()


@every_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_nan_around_the_operands_is_not_read(shape, dtype: torch.dtype, transposed: bool, how: str) -> None:
    padded = Padded(float("nan"), transposed)
    step, expected = placed(shape, dtype, padded)
    assert_same(step.run(how), expected)
    padded.assert_nothing_around_changed()


@every_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_nothing_around_the_weight_and_states_is_written(shape, transposed: bool, how: str) -> None:
    padded = Padded(-77.0, transposed)
    step, expected = placed(shape, torch.float32, padded)
    assert_same(step.run(how), expected)
    padded.assert_nothing_around_changed()


def test_the_test_sees_a_write_around() -> None:
    padded = Padded(-77.0)
    padded(torch.zeros(3, 4))
    padded.buffers[0][0][2, 5] = 0.0
    with pytest.raises(AssertionError):
        padded.assert_nothing_around_changed()


@pytest.fixture
def poisoned():
    """Every `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@every_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_freshly_allocated_memory_is_written_before_it_is_read(shape, how: str, poisoned: None) -> None:
    assert torch.empty(3).isnan().all()
    for dtype in (torch.float32, torch.bfloat16):
        step = make(ADAMW, CASE, shape, dtype, dtype, dtype, dtype)
        expected = step.expected()
        assert_same(step.run(how), expected)


@every_kernel
def test_a_nan_in_the_gradient_reaches_its_own_coordinates_only(how: str) -> None:
    step = make(ADAMW, CASE, (17, 33, 65))
    step.dy[4, 7] = float("nan")
    weight, *states = step.run(how)
    for tensor in (weight, *states):
        assert tensor[7].isnan().all() and tensor.isnan().sum() == 65
