"""The per-step table: maximal expressions without a coordinate, one entry each, under names that say what they are."""

from __future__ import annotations

import pytest

from forge_dsl.ir.names import Namer, distinct, phrase, switch_phrase
from forge_dsl.language.format import format_expr
from forge_dsl.language.parser import parse
from tests.ir.programs import compiled


def entries(update: str, declarations: str = "") -> dict[str, str]:
    return {slot.name: format_expr(slot.expr) for slot in compiled(update, declarations).layout.slots.values()}


TABLES = {
    "weight = weight - lr * grad": {"lr": "lr"},
    "weight = weight - lr * 2 * grad": {"lr_two": "lr * 2"},
    "weight = weight - lr * (2 * grad)": {"lr": "lr"},
    "weight = weight - lr * (grad * step)": {"lr": "lr", "step": "step"},
    "weight = weight * (1 - lr * step)": {"one_minus_lr_step": "1 - lr * step"},
    "weight = weight * (1 - lr) + (1 - lr) * grad": {"one_minus_lr": "1 - lr"},
    "weight = weight * lr - grad / lr": {"lr": "lr"},
    "weight = weight - sqrt(lr) * grad": {"sqrt_lr": "sqrt(lr)"},
    "x = lr * 2\nweight = weight - x * (x * grad)": {"lr_two": "lr * 2"},
    "weight = weight - grad if grad > lr / 2 else weight": {"lr_over_two": "lr / 2"},
    "weight = weight - max(lr, step, grad)": {"lr": "lr", "step": "step"},
    "weight = weight - max(max(lr, step), grad)": {"max_lr_step": "max(lr, step)"},
    "weight = weight - grad * (lr if step > 3 else 1)": {"lr_if_step_gt_3_else_one": "lr if step > 3 else 1"},
    "weight = weight - (grad if step > lr else 1)": {"step_gt_lr": "step > lr"},
    "weight = weight - grad ** lr": {"lr": "lr"},
    "weight = weight - grad * (2 + 3) * lr": {"lr": "lr"},
    "weight = weight - lr * (grad if true else step)": {"lr": "lr"},
}


@pytest.mark.parametrize(("update", "expected"), TABLES.items(), ids=TABLES.keys())
def test_an_entry_is_a_maximal_scalar_expression(update: str, expected: dict[str, str]) -> None:
    assert entries(update) == expected


def test_a_spec_without_scalars_has_one_entry_all_the_same() -> None:
    """A kernel takes its table apart as a tuple, and a tuple of nothing cannot be."""
    one = compiled(
        "one = grad\nweight = weight - one when f\nweight = weight - grad when not f", 'flag f\nrequire lr > 0, "m"'
    )
    assert {slot.name: slot.expr.value for slot in one.table} == {"one_2": 1.0}  # type: ignore[union-attr]


def test_fast_arithmetic_appends_its_own_entries() -> None:
    one = compiled("weight = weight - lr * (grad / step)")
    assert [slot.name for slot in one.table] == ["lr", "step", "lr_over_step"]
    assert [slot.name for slot in one.exact.slots] == ["lr", "step"]
    assert [slot.name for slot in one.fast.slots] == ["lr_over_step"]


def test_booleans_are_known_as_such() -> None:
    declarations = "flag f\nlet late = step > 3 and not f\nlet early = not late"
    one = compiled(
        "weight = weight - (lr if early and grad > 0 or late and grad < 0 or f and grad == 0 else 0)", declarations
    )
    assert {slot.name: slot.boolean for slot in one.layout.slots.values()} == {
        "early": True, "late": True, "is_f": True, "lr": False,
    }  # fmt: skip


def test_a_flag_is_a_switch_under_its_own_name_and_a_number_under_another() -> None:
    one = compiled("weight = weight - (lr if f and grad > 0 else 0)\nweight = -weight when f", "flag f")
    assert list(one.layout.switches.values()) == ["f"]
    assert entries("weight = weight - (lr if f and grad > 0 else 0)\nweight = -weight when f", "flag f")["is_f"] == "f"


PHRASES = {
    "a": "a",
    "a + b": "a_plus_b",
    "1 - a": "one_minus_a",
    "a * b": "a_b",
    "1 / a": "inv_a",
    "a / b": "a_over_b",
    "a % b": "a_mod_b",
    "a ** b": "a_to_b",
    "-a": "minus_a",
    "0.5 * a": "half_a",
    "1e-3 * a": "0p001_a",
    "sqrt(a)": "sqrt_a",
    "max(a, b)": "max_a_b",
    "a if b > 0 else 2": "a_if_b_gt_zero_else_two",
    "not a": "not_a",
    "a < b": "a_lt_b",
}


@pytest.mark.parametrize(("expression", "expected"), PHRASES.items(), ids=PHRASES.keys())
def test_a_phrase_says_what_an_expression_is(expression: str, expected: str) -> None:
    tree = parse(f"optimizer X\nupdate:\n  x = {expression}\n")
    assert phrase(tree.update[0].value) == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [("m != 0", "has_m"), ("m > 0", "has_m"), ("m < 1", "m_lt_one"), ("m > n", "m_gt_n"), ("f", "f")],
)
def test_a_switch_has_the_name_that_a_person_would_give_it(condition: str, expected: str) -> None:
    tree = parse(f"optimizer X\nupdate:\n  x = 1 when {condition}\n")
    assert switch_phrase(tree.update[0].when) == expected  # type: ignore[union-attr]


def test_names_are_distinct_short_and_no_keywords() -> None:
    namer = Namer({"a", "a_2"})
    assert [namer.fresh("a"), namer.fresh("a"), namer.fresh("b"), namer.fresh("b")] == ["a_3", "a_4", "b", "b_2"]
    assert namer.fresh("lambda") == "scalar"
    assert namer.fresh("x" * 45) == "scalar_2"
    assert namer.fresh("0p5_a") == "scalar_3"
    assert namer.fresh("x" * 45, "switch") == "switch"
    assert distinct("is", set()) == "is_2"
