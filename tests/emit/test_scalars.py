"""What has no coordinate: float64 by IEEE 754, the same on the host and on the device, whatever the numbers.

Without a GPU the device's kernel runs in Triton's interpreter, with numpy in the place of libdevice.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from forge_dsl import testing
from forge_dsl.formats import rounding
from forge_dsl.loading import load, module_of
from forge_dsl.runtime import device_math, launch
from forge_dsl.runtime.ieee import Real
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.triton_support import interpreted, tl
from tests.fuzz.fuzz_generator import valid_spec

SEED = 5
SPEC = """
optimizer Scalars
hyper lr = 1 in [0, inf)
hyper pair = (0.9, 0.96)
flag f
scalar count = 0
state seen = START
let a, b = pair
let c = 0.3
let zero = 0
let nine = 9
let x = EXPRESSION
count = count + nine
require CONDITION, "message"

update:
  seen   = seen + (1 if first(seen) or f else 0)
  weight = weight - max(x, grad) - (lr * a * b * c * zero * nine * count) * seen
"""


def module(expression: str = "lr", condition: str = "lr >= 0", start: str = "0") -> ModuleType:
    return load(SPEC.replace("EXPRESSION", expression).replace("CONDITION", condition).replace("START", start))


# Literals, and choices between them, are Python's own numbers: with no Real near, each would raise there or never end.
IEEE = {
    "1 % (0 if f else 0)": math.nan,
    "3 % zero": math.nan,
    "nine / zero": math.inf,
    "-nine / zero": -math.inf,
    "zero / zero": math.nan,
    "1 / lr": math.inf,
    "lr / zero": math.nan,
    "nine ** nine ** nine ** nine": math.inf,
    "(-nine) ** 0.5": math.nan,
    "zero ** -1": math.inf,
    "(1 if f else 2) ** 5000": math.inf,
    "2 ** (3000 if f else 4000)": math.inf,
    "2 % (1 if lr > 1 else 0)": math.nan,
    "(2 if f else 3) - (4 if f else 5)": -2.0,
    "sqrt(zero - 1)": math.nan,
    "log(zero)": -math.inf,
    "exp(nine * 1000)": math.inf,
    "expm1(nine * 1000)": math.inf,
    "log1p(zero - 1)": -math.inf,
    "rsqrt(zero)": math.inf,
    "1e308 * 10": math.inf,
    "min(nine, zero / zero)": math.nan,
    "max(zero / zero, nine)": math.nan,
    "clamp(nine, 0, zero / zero)": math.nan,
    "sign(zero / zero)": 0.0,
    "7 % -3": -2.0,
    "7 % (zero - 3)": -2.0,
    "lerp(1, 3, nine)": 19.0,
    "c + b": 0.3 + 0.96,
    "0.96 ** step": 0.96,
    "where(first(seen), 0.1, 0.7) * nine": 0.1 * 9,
    "tanh(0.1 if f else 0.7)": math.tanh(0.7),
    "sqrt(2 if f else 3) / (5 if f else 7)": math.sqrt(3) / 7,
}
every_expression = pytest.mark.parametrize(("expression", "expected"), IEEE.items(), ids=IEEE.keys())


def same(found: float, expected: float, ulps: float = 0.0) -> bool:
    if math.isnan(expected) or math.isinf(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return abs(found - expected) <= ulps * math.ulp(expected)


@every_expression
def test_scalars_on_the_host_follow_ieee_and_never_raise(expression: str, expected: float) -> None:
    made = module(expression)
    hypers = {"lr": Real(0.0), "pair": (Real(0.9), Real(0.96))}
    table, counts = made.step_scalars(step=Real(1.0), count=Real(0.0), first_seen=True, f=False, **hypers)
    assert same(table[made.SPEC.table.index("x")], expected)
    assert counts == (9.0,)


class Libdevice:
    """numpy's float64 functions in the place of CUDA's, for the interpreter."""

    def __getattr__(self, name: str) -> Any:
        function = {"pow": np.power}.get(name) or getattr(np, name)

        def call(*arguments: Any) -> Any:
            from triton.runtime.interpreter import TensorHandle

            data = function(*(argument.handle.data for argument in arguments))
            return tl.core.tensor(TensorHandle(data, tl.float64), tl.float64)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    rule = module().RULE
    if not testing.can_launch(rule):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    if interpreted(rule.scalars_kernel):
        monkeypatch.setattr(device_math, "libdevice", Libdevice())
    return testing.device()


def filled(rule: Rule, hypers: dict[str, Any], flags: dict[str, bool], counters: list[float]) -> tuple[Any, Any]:
    """The table and the pending counters that the device computes for one row."""
    where = testing.device()
    numbers = [number for value in hypers.values() for number in (value if isinstance(value, tuple) else (value,))]
    before = torch.tensor([counters], dtype=torch.float64, device=where)
    width, streams = len(rule.spec.table), 1 + len(rule.spec.states)
    tables, pending = torch.zeros(1, width + 1 + streams, device=where), torch.zeros_like(before)
    base = rounding.base(SEED, 3)
    bases = torch.tensor([rounding.signed32(base)], dtype=torch.int32, device=where)
    with np.errstate(all="ignore"):
        launch.fill_tables(
            rule, torch.tensor(numbers, dtype=torch.float64, device=where), before, tables, pending, bases, flags
        )
    count = int(pending[0, 0 if rule.spec.uses_step else -1])
    words = [rounding.signed32(word) for word in rounding.words(base, count, streams)]
    assert tables[0, width:].cpu().view(torch.int32).tolist() == words
    return tables[0, :width].cpu(), pending[0].cpu()


@every_expression
def test_scalars_on_the_device_are_the_same(expression: str, expected: float, device: torch.device) -> None:
    rule = module(expression).RULE
    hypers = {"lr": 0.0, "pair": (0.9, 0.96)}
    table, pending = filled(rule, hypers, {"f": False}, [0.0, 0.0, 0.0])
    found = table[rule.spec.table.index("x")].item()
    assert same(found, float(np.float32(expected)), ulps=2.0**29)  # one fp32 place, for the functions of libdevice
    assert pending.tolist() == [1.0, 9.0, 1.0]


@pytest.mark.parametrize("seed", range(70_000, 70_060))
def test_device_and_host_agree_on_random_specs(seed: int, device: torch.device) -> None:
    rule = module_of(valid_spec(seed)).RULE
    for case in testing.cases(rule)[:2]:
        problem = testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0, warm=False)
        for _ in range(2):
            counters = [problem.counters[name] for name in rule.counter_names]
            table, pending = filled(rule, case.hypers, case.flags, counters)
            host = testing.next_table(rule, case, problem).cpu()
            finite = host.isfinite()
            assert torch.equal(table.isnan(), host.isnan()) and torch.equal(table[~finite].sign(), host[~finite].sign())
            # Functions of float64 may differ in their last place, and so a number rounded to fp32 in one.
            torch.testing.assert_close(table[finite], host[finite], rtol=2.0**-23, atol=0)
            expected = torch.tensor([problem.counters[name] for name in rule.counter_names], dtype=torch.float64)
            torch.testing.assert_close(pending, expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("1 / lr > 0.5", True),
        ("1 % lr < 3", False),
        ("lr ** -1 > 0.5", True),
        ("log(lr) <= 0", True),
        ("sqrt(lr - 1) >= 0", False),
        ("not f or lr > 0", True),
    ],
)
def test_conditions_on_arguments_follow_ieee_too(condition: str, holds: bool) -> None:
    check = module(condition=condition).check_arguments
    arguments = {"lr": 0.0, "pair": (0.9, 0.96), "f": False}
    if holds:
        check(**arguments)
    else:
        with pytest.raises(ValueError, match=r"^message$"):
            check(**arguments)


STARTS = {
    "0": 0.0,
    "weight": -2.0,
    "lr": 0.5,
    "1 / lr": 2.0,
    "1e60": math.inf,
    "-1e-50": -0.0,
    "2 * weight + lr": -3.5,
    "weight * weight_": None,
    "abs(weight)": 2.0,
    "max(weight, 0, lr)": 0.5,
    "clamp(weight, -1, lr)": -1.0,
    "sqrt(abs(weight))": math.sqrt(2),
    "weight ** 2": 4.0,
    "(weight + 1) ** 3": -1.0,
    "1 if weight > 0 else 3": 3.0,
    "lr if weight < 0 and lr > 0 else 7": 0.5,
    "weight if lr > 1 else -weight": 2.0,
    "weight if true else 0": -2.0,
    "lerp(weight, lr, 0.5)": -0.75,
    "1 / weight": -0.5,
    "sign(weight) * exp(lr - lr)": -1.0,
}


@pytest.mark.parametrize(("start", "expected"), STARTS.items(), ids=STARTS.keys())
def test_first_values_of_states(start: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(Exception, match="E0201"):
            module(start=start)
        return
    made = module(start=start)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.full((2, 3), -2.0, dtype=dtype)
        found = made.initial_state("seen", weight, lr=0.5, pair=(0.9, 0.96))
        assert found.dtype == torch.float32 and found.shape == (2, 3)
        assert torch.equal(found, torch.full((2, 3), expected))
