"""Hazard: a grid whose y or z is above 65535 does nothing (triton#7260). Grids here have one dimension."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim
from forge_dsl.runtime import launch
from tests.hazards.kernels import SGD, assert_same, case_of, launched, make, recorded

CASE = case_of(SGD)


@launched
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 65), (0, 70, 130)], ids=str)
@pytest.mark.parametrize("how", ["fused", "elementwise", "many"])
def test_a_grid_is_one_number_of_programs(shape: tuple[int, int, int], how: str) -> None:
    rule, recorders = recorded(SGD)
    step = make(rule, CASE, shape)
    expected = step.expected()
    assert_same(step.run(how), expected)
    launches = [launch for recorder in recorders.values() for launch in recorder.launches]
    assert launches
    for grid, _, _ in launches:
        assert len(grid) == 1 and 1 <= grid[0] < 2**31


@pytest.mark.parametrize("rows", [1, 65_536 * 40, 2**31 - 600])
def test_no_number_of_rows_needs_a_second_dimension(rows: int) -> None:
    rule, recorders = recorded(SGD, dry=True)
    weight, state = (torch.empty_strided((rows, 3), (3, 1), device="meta") for _ in range(2))
    x, dy, table = (torch.empty(shape, device="meta") for shape in ((2, 3), (2, rows), (8,)))
    launch.linear_step_portable(rule, x, dy, weight, [state], table, CASE.switches, True)
    launch.elementwise_step(rule, weight, weight, [state], table, CASE.switches, True)
    grids = [grid for recorder in recorders.values() for grid, _, _ in recorder.launches]
    assert grids and all(len(grid) == 1 and grid[0] < 2**31 for grid in grids)


@pytest.mark.parametrize("shape", [(2, 3, 70_000, 1), (70_000, 2, 3)])
def test_parameters_of_many_dimensions_too(shape: tuple[int, ...]) -> None:
    rule, recorders = recorded(SGD, dry=True)
    weight, grad, state = (torch.empty(shape, device="meta") for _ in range(3))
    launch.elementwise_step(rule, weight, grad, [state], torch.empty(8, device="meta"), CASE.switches, True)
    assert [len(grid) for grid, _, _ in recorders["elementwise_kernel"].launches] == [1]


def test_tables_are_filled_by_one_program_a_row() -> None:
    rule, recorders = recorded(optim.AdamW.rule, dry=True)
    rows = 100_000
    counters = torch.zeros(rows, 1, dtype=torch.float64)
    tables = torch.zeros(rows, 12)
    launch.fill_tables(
        rule,
        torch.zeros(5, dtype=torch.float64),
        counters,
        tables,
        counters,
        torch.zeros(rows, dtype=torch.int32),
        {"amsgrad": False, "maximize": True},
    )
    ((grid, arguments, _),) = recorders["scalars_kernel"].launches
    assert grid == (rows,)
    assert arguments[-2:] == (False, True), "flags in the order of the spec"
