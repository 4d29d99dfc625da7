"""The tables and the picture of docs/performance.md are those of the results beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel
from benchmarks.systems import FUSED_PEER, HOPPER, PRODUCT

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS: dict[str, Any] = json.loads((DOCS / "assets" / "kernel-h200.json").read_text())
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "performance.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]


def rows(first: str, width: int) -> list[list[str]]:
    """Rows of so many cells that begin with `first`."""
    return [cells for cells in LINES if cells[0] == first and len(cells) == width]


@pytest.mark.parametrize("one", RESULTS["adamw"], ids=lambda one: f"{one['rows']}-{one['tokens']}")
def test_the_first_tables_are_the_results(one: dict[str, Any]) -> None:
    name, ms = f"{one['rows']} × {one['columns']}, {one['tokens']}", one["ms"]
    (burst,) = rows(name, 12)
    others = [time for system, time in ms.items() if not system.startswith("forge-dsl")]
    ours = [ms.get(f"forge-dsl {schedule}") for schedule in ("hopper", "portable", "banded")]
    assert burst[1:10] == ["–" if time is None else f"{time:.3f}" for time in (one["limit"], *others, *ours)]
    best = min(filter(None, ours))
    assert burst[10:] == [f"{ms[FUSED_PEER] / best:.2f}", f"{best / one['limit']:.2f}"]
    if HOPPER not in one["sustained"]:
        return
    (sustained,) = rows(name, 5)
    found = [one["sustained"][system] for system in (PRODUCT, FUSED_PEER, HOPPER)]
    assert sustained[1:4] == [f"{each['ms']:.3f}, {each['MHz']:.0f}, {each['W']:.0f}" for each in found]
    assert sustained[4] == f"{found[1]['ms'] / found[2]['ms']:.2f}"


@pytest.mark.parametrize("one", RESULTS["optimizers"], ids=lambda one: one["optimizer"])
def test_the_table_of_optimizers_is_the_results(one: dict[str, Any]) -> None:
    (found,) = rows(one["optimizer"], 5)
    times = one["ms"], one["portable"]
    assert found[1:] == [str(one["bytes"]), *(f"{time:.3f}" for time in times), f"{one['ms'] / one['limit']:.2f}"]


def test_the_readme_says_what_the_results_say() -> None:
    text = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"It is ([\d.]+) to ([\d.]+) times as fast .*?, ([\d.]+) to ([\d.]+) times .*? ([\d.]+) to", text)
    assert said is not None
    quick = [one for one in RESULTS["adamw"] if (one["rows"], one["columns"], one["tokens"]) in kernel.QUICK]
    bursts = [one["ms"][FUSED_PEER] / one["ms"][HOPPER] for one in quick]
    long = [one["sustained"][FUSED_PEER]["ms"] / one["sustained"][HOPPER]["ms"] for one in quick]
    optimi = [one["ms"]["cuBLAS + optimi AdamW(triton)"] / one["ms"][HOPPER] for one in quick]
    expected = [min(bursts), max(bursts), min(long), max(long), min(optimi)]
    assert list(said.groups()) == [f"{ratio:.2f}" for ratio in expected]


def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kernel.plot(RESULTS, tmp_path / "drawn.svg")
    curve = re.compile(r'<path d="(M[^"]+)" clip-path')
    drawn, shown = (
        [float(number) for path in curve.findall(file.read_text()) for number in re.findall(r"[\d.]+", path)]
        for file in (tmp_path / "drawn.svg", DOCS / "assets" / "time-over-limit.svg")
    )
    # Points of 1/72 inch; another release of matplotlib may place the axes a little otherwise.
    assert drawn and drawn == pytest.approx(shown, abs=1)
