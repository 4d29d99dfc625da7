"""Hazard: tensors that span 2^31 elements or more, silently never updated (DeepSpeed#7640, bitsandbytes#1784).

What counts is where the last element lies, so that a few elements far apart in a large empty buffer are enough: memory
that nothing touches costs nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_dsl.runtime import launch, views
from forge_dsl.runtime.tiles import Tiles
from tests.hazards.kernels import SGD, Step, assert_same, case_of, launched, make, recorded

FAR = 2**30 + 40
CASE = case_of(SGD)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor without memory."""
    return torch.empty_strided(shape, strides, device="meta")


# Masked lanes compute offsets up to 512 elements beyond the edge, in each direction; those must not wrap either.
LAST = 2**31 - 1 - 512
BORDERS = {
    "a small matrix": (strided((4, 5), (5, 1)), False),
    "the largest row": (strided((1, LAST), (LAST, 1)), True),
    "a flat row just below": (strided((1, LAST - 1), (1, 1)), False),
    "a flat row just above": (strided((1, LAST + 1), (1, 1)), True),
    "a dense matrix below": (strided((2**15, 2**15), (2**15, 1)), False),
    "a dense matrix of 2^31 elements": (strided((2**16, 2**15), (2**15, 1)), True),
    "2^31 elements across": (strided((2**15, 2**16), (1, 2**15)), True),
    "few elements far apart": (strided((3, 4), (FAR, 1)), True),
    "few columns far apart": (strided((3, 4), (1, FAR)), True),
    "a stride that a tile would carry over": (strided((2, 4), (2**23, 1)), True),
    "a stride that it would not": (strided((2, 4), (2**22 - 2**14, 1)), False),
    "an empty tensor": (strided((0, 4), (4, 1)), False),
    "a single element": (strided((), ()), False),
    "an expanded operand": (strided((2**20, 2**20), (0, 0)), False),
}


@pytest.mark.parametrize(("tensor", "wide"), BORDERS.values(), ids=BORDERS.keys())
def test_offsets_are_64_bits_wide_where_32_could_wrap(tensor: Tensor, wide: bool) -> None:
    assert views.is_wide(tensor) == wide
    largest = views.span(tensor) - 1 + 512 * max(tensor.stride(), default=0)
    assert wide or largest < 2**31


@pytest.mark.parametrize("which", ["x", "dy", "weight", "state"])
def test_one_far_tensor_makes_a_fused_launch_wide(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is launched, and these tensors are on no device that could be asked.
    monkeypatch.setattr(launch, "choose_tiles", lambda *_: Tiles(32, 64, 32, 1, 1, 4, 4, 1))
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 1)
    rule, recorders = recorded(SGD, dry=True)
    near = {name: strided((3, 4), (4, 1)) for name in ("x", "dy", "weight", "state")}
    for tensors, wide in ((near, False), (near | {which: strided((3, 4), (FAR, 1))}, True)):
        launch.linear_step_portable(
            rule,
            tensors["x"],
            tensors["dy"][:, :3],
            tensors["weight"],
            [tensors["state"]],
            near["x"][0],
            CASE.switches,
            True,
        )
        assert recorders["linear_kernel"].launches[-1][2]["wide"] is wide


@pytest.mark.parametrize("which", ["grad", "weight", "state"])
def test_one_far_tensor_makes_an_elementwise_launch_wide(which: str) -> None:
    rule, recorders = recorded(SGD, dry=True)
    tensors = {name: strided((3, 4), (8, 1)) for name in ("grad", "weight", "state")}
    tensors[which] = strided((3, 4), (FAR, 1))
    launch.elementwise_step(
        rule, tensors["weight"], tensors["grad"], [tensors["state"]], strided((8,), (1,)), CASE.switches, True
    )
    assert recorders["elementwise_kernel"].launches[-1][2]["wide"] is True


class Far:
    """Puts each tensor at the two ends of a buffer of more than 2^31 elements, most of which is never touched."""

    def __init__(self, across: bool) -> None:
        self.across = across

    def __call__(self, value: Tensor) -> Tensor:
        rows, columns = value.shape
        strides = (1, FAR) if self.across else (FAR, 1)
        span = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1
        try:
            buffer = torch.empty(span, dtype=value.dtype, device=value.device)
        except RuntimeError as error:
            pytest.skip(f"no address space for {span} elements: {error}")
        return buffer.as_strided(value.shape, strides).copy_(value)


def far_step(shape: tuple[int, int, int], across: bool, which: set[str]) -> tuple[Step, list[Tensor]]:
    half = torch.bfloat16
    step = make(SGD, CASE, shape, half, half, half, half)
    expected, place = step.expected(), Far(across)
    step.x = place(step.x) if "x" in which else step.x
    step.dy = place(step.dy) if "dy" in which else step.dy
    if "weight" in which:
        step.problem.weight = place(step.problem.weight)
    if "states" in which:
        step.problem.states = [place(state) for state in step.problem.states if state is not None]
    return step, expected


@launched
@pytest.mark.parametrize("across", [False, True], ids=["rows apart", "columns apart"])
@pytest.mark.parametrize("which", ["x", "dy", "weight", "states"])
def test_the_fused_kernel_reaches_elements_beyond_2_31(which: str, across: bool) -> None:
    step, expected = far_step((4, 4, 4), across, {which})
    assert_same(step.run("fused"), expected)


@launched
@pytest.mark.parametrize("which", ["x", "dy"])
def test_tokens_of_a_block_may_lie_further_apart_than_32_bits_reach(which: str) -> None:
    step = make(SGD, CASE, (70, 4, 4), *[torch.bfloat16] * 4)
    expected = step.expected()
    value, stride = getattr(step, which), 2**26 + 8
    buffer = torch.empty(69 * stride + 4, dtype=value.dtype, device=value.device)
    setattr(step, which, buffer.as_strided(value.shape, (stride, 1)).copy_(value))
    assert_same(step.run("fused"), expected)


@launched
@pytest.mark.parametrize("across", [False, True], ids=["rows apart", "columns apart"])
@pytest.mark.parametrize("which", ["weight", "states"])
def test_the_elementwise_kernel_reaches_elements_beyond_2_31(which: str, across: bool) -> None:
    for how in ("elementwise", "many"):
        step, expected = far_step((4, 4, 4), across, {which})
        assert_same(step.run(how), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="touches gigabytes")
def test_a_dense_weight_of_more_than_2_31_elements_is_updated_to_its_end() -> None:
    rows, columns = 2**16 + 1, 2**15
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    table = make(SGD, CASE, (1, 2, 2)).table
    x, dy = torch.ones(1, columns, **options), torch.ones(1, rows, **options)
    for kernel in ("fused", "elementwise"):
        weight, state = torch.zeros(rows, columns, **options), torch.zeros(rows, columns, **options)
        if kernel == "fused":
            launch.linear_step_portable(SGD, x, dy, weight, [state], table, CASE.switches, True)
        else:
            launch.elementwise_step(SGD, weight, torch.ones_like(weight), [state], table, CASE.switches, True)
        assert weight[-1, -1] != 0 and bool((weight == weight[0, 0]).all()), kernel
