"""Hazard: sizes that are no multiple of a tile, one, prime, or zero (triton#10427, Liger-Kernel#177)."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import launch
from forge_dsl.runtime.tiles import Tiles
from tests.hazards.kernels import SGD, assert_same, case_of, every_kernel, launched, make

SIZES = [1, 2, 3, 15, 17, 31, 127, 129, 511]
# A Latin square: every pair of sizes meets in every pair of dimensions.
SQUARE = [(SIZES[i], SIZES[j], SIZES[(i + j) % len(SIZES)]) for i, j in itertools.product(range(len(SIZES)), repeat=2)]
# 1000 in one dimension, every size in each other.
LONG = [
    shape
    for i, size in enumerate(SIZES)
    for shape in ((1000, size, SIZES[i - 3]), (size, 1000, SIZES[i - 2]), (SIZES[i - 4], size, 1000))
]
EMPTY = [shape for shape in itertools.product((0, 3), repeat=3) if 0 in shape]
CASE = case_of(SGD)


def tiles_for(rows: int, columns: int) -> Tiles:
    """Small tiles, so that there are several, and large ones where the interpreter would take too long."""
    if rows * columns < 5000:
        return Tiles(16, 32, 16, 1, 1, 4, 4, 1)
    return Tiles(128, 256, 128, 1, 1, 4, 4, 1) if rows * columns > 40_000 else Tiles(64, 64, 64, 2, 2, 4, 4, 1)


@launched
@pytest.mark.parametrize("shape", [*SQUARE, *LONG], ids=str)
def test_tokens_rows_and_columns_of_any_size(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "choose_tiles", lambda rows, columns, *_: tiles_for(rows, columns))
    step = make(SGD, CASE, shape)
    expected = step.expected()
    assert_same(step.run("fused"), expected, str(shape))


def test_the_shapes_pair_every_size_with_every_other() -> None:
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(shape[first], shape[second]) for shape in [*SQUARE, *LONG]}
        assert pairs >= set(itertools.product(SIZES, repeat=2))
        assert pairs >= {(1000, size) for size in SIZES} | {(size, 1000) for size in SIZES}


@every_kernel
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_dimension_of_size_zero(shape: tuple[int, int, int], how: str) -> None:
    """No tokens: the gradient is exactly 0, and moments and decay still move, as in torch."""
    step = make(SGD, CASE, shape)
    before, expected = step.problem.clone(), step.expected()
    assert_same(step.run(how), expected, str(shape))
    if step.problem.weight.numel():
        assert not torch.equal(step.problem.weight, before.weight)


@pytest.mark.parametrize("how", [pytest.param(k, marks=launched) for k in ("elementwise", "many")] + ["banded"])
@pytest.mark.parametrize("size", [*SIZES, 1000, 1023, 1024, 1025])
def test_vectors_of_any_size(size: int, how: str) -> None:
    for shape in ((1, 1, size), (2, size, 1)):
        step = make(SGD, CASE, shape)
        expected = step.expected()
        assert_same(step.run(how), expected, str(shape))


@launched
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 5), (2, 1, 3, 2), (0, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("order", ["dense", "reversed", "gaps"])
def test_parameters_of_any_number_of_dimensions(shape: tuple[int, ...], order: str) -> None:
    def placed(value: torch.Tensor) -> torch.Tensor:
        if order == "reversed":
            backwards = tuple(reversed(range(len(shape))))
            return value.permute(backwards).contiguous().permute(backwards)
        if order == "gaps" and shape:
            return torch.full((*shape[:-1], 2 * shape[-1]), float("nan"), device=value.device)[..., ::2].copy_(value)
        return value.clone()

    problem = testing.make_problem(SGD, CASE, shape, torch.float32, torch.float32, seed=1)
    grad = testing.integers(shape, 5, torch.float32)
    table = testing.next_table(SGD, CASE, problem)
    ours = testing.Problem(placed(problem.weight), [placed(state) for state in problem.states], {})
    testing.reference_step(SGD, CASE, problem, grad, table)
    launch.elementwise_step(SGD, ours.weight, placed(grad), ours.states, table, CASE.switches, True)
    for (name, got), (_, want) in zip(ours.tensors(SGD), problem.tensors(SGD), strict=True):
        testing.assert_same_bits(got, want, name)
