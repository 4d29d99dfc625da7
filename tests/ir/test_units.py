"""Which scalars can take the scale of an 8-bit tensor instead of its numbers, and that no bit tells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from forge_dsl.ir.units import multipliers
from tests.ir.programs import build, run, same_bits
from tests.ir.test_properties import ANY
from tests.ir.test_specs import SPECS, every_variant, table, testing

UNIT = 2.0**-9


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        ("(sub weight (mul $a m))", {"m": ("a",)}),
        ("(sub weight (mul m $a))", {"m": ("a",)}),
        ("(add (mul $a m) (mul $b m))", {"m": ("a", "b")}),
        ("(mul (mul $a m) (mul $a m))", {"m": ("a",)}),
        ("(add (mul $a m) m)", {}),
        ("(add (mul $a m) (mul $a weight))", {}),
        ("(add (mul $a m) (mul $a grad))", {}),
        ("(add (mul $a m) $a)", {}),
        ("(mul m m)", {}),
        ("(div m $a)", {}),
        ("(mul 0.5 m)", {}),
        ("(choose:f m (mul $a m))", {}),
        ("(choose:f grad (mul $a m))", {"m": ("a",)}),
        ("m", {}),
        ("(mul $a grad)", {"grad": ("a",)}),
    ],
)
def test_a_scalar_takes_the_scale_of_what_it_alone_multiplies(weight: str, found: dict[str, tuple[str, ...]]) -> None:
    assert multipliers(build(f"weight = {weight}")) == found


def test_what_is_stored_as_it_was_read_keeps_its_own_scale() -> None:
    assert multipliers(build("weight = (mul $a m)", "m = m")) == {}


def test_a_scalar_that_is_stored_itself_is_nobodys() -> None:
    assert multipliers(build("weight = (mul $a m)", "m = $a")) == {}


@settings(max_examples=300, deadline=None)
@given(ANY, ANY)
def test_scaled_scalars_give_the_same_bits(weight: str, state: str) -> None:
    program = build(f"weight = (mul (mul $c {weight}) m)", f"m = {state}")
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=64).astype(np.float32) for name in ("grad", "weight", "m")}
    slots, switches = {"a": 0.1, "b": -3.0, "c": 0.7}, {"f": True, "g": False}
    assert_alike(program, inputs, slots, switches)


@every_variant
def test_scaled_scalars_give_the_same_bits_in_every_variant_of_every_spec(name: str, case: testing.Case) -> None:
    one = SPECS[name]
    rng = np.random.default_rng(0)
    inputs = {n: rng.uniform(0.1, 1.0, 300).astype(np.float32) for n in ("weight", "grad", *one.spec.state_names)}
    switches = dict(zip((switch.name for switch in one.spec.switches), case.switches, strict=True))
    assert_alike(one.fast, inputs, table(one, case), switches)


def assert_alike(program, inputs, slots, switches) -> None:  # type: ignore[no-untyped-def]
    found = multipliers(program)
    scaled = dict(slots)
    codes = {name: values * np.float32(UNIT) if name in found else values for name, values in inputs.items()}
    for slot in {slot for those in found.values() for slot in those}:
        scaled[slot] = float(np.float32(slots[slot])) / UNIT
    a, b = run(program, inputs, slots, switches), run(program, codes, scaled, switches)
    assert all(same_bits(a[name], b[name]) for name in a)


def test_of_the_eight() -> None:
    names = ["adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum"]
    assert {name: list(multipliers(SPECS[name].fast)) for name in names} == {
        "adamw": ["weight", "exp_avg", "exp_avg_sq"],
        "nadam": ["exp_avg", "exp_avg_sq"],
        "radam": ["exp_avg", "exp_avg_sq"],
        "lion": ["weight", "exp_avg"],
        "rmsprop": [],
        "adagrad": [],
        "sgd": [],
        "sgd_momentum": [],
    }
