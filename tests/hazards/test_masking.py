"""Hazard: NaN in padding times 0 is NaN, and a masked lane that writes (TransformerEngine#3116).

All memory around the operands is NaN, or a pattern that must be found again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge_dsl.compile import compile_source
from forge_dsl.emit.module import render_module
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


ROOT = Path(__file__).parents[2]
# Masked loads of something else than 0, by file and what is loaded, and why.
OTHERS = {
    # A byte that is the exponent of 2^0; its codes are 0 there, and what is made of them is not stored.
    ("device_coded.py", "scales + block.to(tl.int64)[None, :] * rows + row[:, None]"): "127",
}


def masked_loads(source: str) -> Iterator[tuple[str, str | None]]:
    """What every masked `tl.load` or `gl.load` of a file loads, and its `other`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("tl.load", "gl.load"):
            continue
        given = dict(zip(("pointer", "mask", "other"), node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        if "mask" in given:
            yield ast.unparse(given["pointer"]), ast.unparse(given["other"]) if "other" in given else None


def assert_zeros(name: str, source: str) -> None:
    """Every masked load of the file has `other=0`, or what `OTHERS` says; and there are some."""
    loads = list(masked_loads(source))
    assert loads, f"{name} has no masked load"
    for pointer, other in loads:
        assert other in ("0", "0.0") or other == OTHERS.get((name, pointer), "0"), f"{name}: {pointer}, other={other}"


DEVICE = [path for path in (ROOT / "forge_dsl").rglob("*.py") if any(masked_loads(path.read_text()))]
SPECS = sorted((ROOT / "optimizers").glob("*.opt"))


@pytest.mark.parametrize("path", DEVICE, ids=lambda path: path.name)
def test_masked_loads_of_the_runtime_give_zero(path: Path) -> None:
    """The interpreter gives 0 for a lane without `other`, and a GPU whatever the register held: read it in the source.

    A masked lane of an operand is a summand of the gradient.
    """
    assert_zeros(path.name, path.read_text())


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_masked_loads_of_generated_modules_give_zero(path: Path) -> None:
    assert_zeros(path.name, render_module(compile_source(path.read_text(), str(path))))


def test_the_sources_that_load_are_all_known() -> None:
    names = {path.name for path in DEVICE}
    assert names == {"device_coded.py", "device_operands.py", "device_slices.py", "device_storage.py"}
    assert {name for name, _ in OTHERS} <= names and len(SPECS) == 8


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("tl.load(p, mask=m)", None),
        ("gl.load(p, m)", None),
        ("tl.load(p, m, 1)", "1"),
        ("tl.load(p, other=0, mask=m)", "0"),
    ],
)
def test_the_test_sees_masks(line: str, other: str | None) -> None:
    assert list(masked_loads(line)) == [("p", other)] and not list(masked_loads("tl.load(p)"))
