"""The kernel for Hopper in every configuration that a plan may have, bit for bit: tiles, shares, loads, hand-over."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import gradient_bits, hopper, hopper_plan
from tests.gpu import hopper_only, kept
from tests.gpu.hopper_only import KEPT_SHAPES, check_one_step, hopper_step

pytestmark = [*hopper_only.MARKS, pytest.mark.usefixtures("no_test_hangs")]

ADAMW = importlib.import_module("generated.adamw").RULE
BF16 = torch.bfloat16


def planned(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """From here on every kernel has the configuration that is chosen for it, but for some changes."""
    choose = hopper.plan

    def plan(*given: Any) -> hopper_plan.Plan:
        chosen = replace(choose(*given), **changes)
        block_t, stages = (hopper_plan.NARROW_STAGES if chosen.narrow else hopper_plan.WIDE_STAGES)[given[-1]]
        return replace(chosen, block_t=block_t, stages=stages)

    monkeypatch.setattr(hopper, "plan", plan)
    monkeypatch.setattr(hopper, "_FOUND", {})


@pytest.mark.parametrize("state", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("share", [(8, 8, 2), (6, 4, 2), (5, 2, 3), (0, 0, 4), (0, 8, 1)], ids=str)
def test_rounding_and_blocks_whatever_the_main_loop_takes_of_a_tile(
    share: tuple[int, int, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """share: eighths that the epilogue keeps, of ordinary tiles and of last ones, and slices taken together."""
    every, last, together = share
    planned(monkeypatch, every=every, last=last, together=together, eager=every > 0)
    for shape in ((1, 136, 264), *KEPT_SHAPES):
        kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, shape, state=state)


# Exact arithmetic, which has bits to compare, takes the first of these by itself; fast arithmetic takes all.
PLANS: dict[str, dict[str, Any]] = {
    "wide": {},
    "wide, in pairs": {"every": 8, "last": 4, "together": 1, "pairs": True, "eager": True, "ahead": 0},
    "wide, in pairs, a warp that loads": {
        "every": 8,
        "last": 4,
        "together": 1,
        "pairs": True,
        "eager": True,
        "loader": True,
    },
    "wide, a warp that loads": {"loader": True, "eager": False},
    "wide, slices of 64 rows": {"rows": 64, "every": 8, "last": 4, "together": 2, "eager": True, "ahead": 2},
    "narrow": {"narrow": True, "rows": 64, "every": 8, "last": 8, "together": 1, "eager": True, "ahead": 0},
    "narrow, a warp that loads": {
        "narrow": True,
        "rows": 64,
        "every": 8,
        "last": 6,
        "together": 2,
        "eager": True,
        "ahead": 0,
        "loader": True,
    },
    "narrow, in pairs": {
        "narrow": True,
        "rows": 64,
        "every": 8,
        "last": 4,
        "together": 1,
        "eager": True,
        "pairs": True,
        "ahead": 1,
    },
    "narrow, shared": {"narrow": True, "rows": 64, "every": 4, "last": 2, "together": 2, "eager": False, "ahead": 3},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("state", ["bf16", "int8", "fp8"])
def test_rounding_and_blocks_in_every_configuration(plan: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than stages, as many, and many; borders and none; one tile a program and several."""
    planned(monkeypatch, **PLANS[plan])
    for shape in ((1, 136, 264), (96, 128, 256), (160, 256, 512), (1100, 2048, 4608), *KEPT_SHAPES):
        kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, shape, state=state)


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "wide"])
@pytest.mark.parametrize("bits", gradient_bits.CHOICES)
def test_every_hand_over_in_every_configuration(plan: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, **PLANS[plan])
    for tokens, rows, columns in ((1, 17, 257), (15, 256, 512), (15, 2048, 4608), (15, 1000, 1000)):
        check_one_step(ADAMW, testing.cases(ADAMW)[0], (tokens, rows, columns), BF16, BF16, bits)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("beside", ["fp32", "bf16+8", "bf16+16", "fp16"])
def test_other_formats_in_every_configuration(plan: str, beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, **PLANS[plan])
    how = {"state": beside} if beside == "fp32" else {"weight": beside}
    for shape in ((65, 304, 520), (300, 2048, 4608)):
        kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, shape, **how)
