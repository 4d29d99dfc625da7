"""States that never reach the weight, and states that hold nothing from one step to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge_dsl
from tests.specs import diagnose, diagnose_file, rule

ROOT = Path(forge_dsl.__file__).parent.parent
STEP = "weight = weight - lr * grad"
AVERAGE = "m = 0.9 * m + grad"


def useless(*update: str, declare: str = "state m") -> list[str]:
    """The states that the only warnings of a rule are about."""
    found = diagnose(rule(*update, declare=declare))
    assert {d.code for d in found} <= {"W0706"}, found
    return [d.message.split("`")[1] for d in found]


def test_a_state_that_only_it_reads_is_warned_about_where_it_is_declared() -> None:
    (found,) = diagnose(rule(AVERAGE, STEP, declare="state m"))
    assert (found.code, found.severity, found.span.line, found.span.column) == ("W0706", "warning", 3, 7)


@pytest.mark.parametrize(
    "update",
    [
        (AVERAGE, "weight = weight - lr * m"),
        ("weight = weight - lr * m", AVERAGE),
        (AVERAGE, "u = 2 * m", "v = u + grad", "weight = weight - lr * v"),
        (AVERAGE, "weight = weight - lr * (grad if m > 0 else 2 * grad)"),
        (AVERAGE, "weight = weight - lr * where(m > 0, grad, 1)"),
        (AVERAGE, "c = m * grad > 0", "weight = weight - lr * (grad if c else 1)"),
    ],
)
def test_a_state_reaches_the_weight_through_locals_conditions_and_later_steps(update: tuple[str, ...]) -> None:
    assert useless(*update) == []


def test_a_state_reaches_the_weight_through_other_states_in_any_order() -> None:
    chain = ("weight = weight - lr * a", "a = a + b", "b = b + c", "c = c + grad")
    for update in (chain, chain[::-1]):
        assert useless(*update, declare="state a\nstate b\nstate c") == []


def test_states_that_read_each_other_and_nothing_else_reads_are_all_warned_about() -> None:
    assert useless("a = a + b", "b = b + a * grad", STEP, declare="state a\nstate b") == ["a", "b"]
    declare = "state a\nstate b\nstate m"
    assert useless("a = a + b", "b = b + a", AVERAGE, "weight = weight - lr * m", declare=declare) == ["a", "b"]


def test_what_is_overwritten_or_reaches_nothing_needed_does_not_count() -> None:
    update = (AVERAGE, "u = m", "a = a + u", "u = grad", "weight = weight - lr * u")
    assert useless(*update, declare="state m\nstate a") == ["m", "a"]


@pytest.mark.parametrize(
    "update",
    [
        ("m = m + grad  when f", "weight = weight - lr * (m if f else grad)"),
        ("m = m + grad  when f", "u = grad  when not f", "u = m  when f", "weight = weight - lr * u"),
        ("m = m + grad  when f", STEP, "weight = weight - m  when f"),
    ],
)
def test_a_state_that_one_variant_needs_is_needed(update: tuple[str, ...]) -> None:
    assert useless(*update, declare="flag f\nstate m when f") == []


def test_a_branch_that_is_not_taken_where_its_value_is_needed_reads_nothing() -> None:
    update = ("u = m if f else grad", "weight = weight - lr * (grad if f else u)")
    assert useless(AVERAGE, *update, declare="flag f\nstate m") == ["m"]


def test_between_steps_a_group_may_cross_a_switch() -> None:
    """What is stored while `mu` is 0 is read once it is not."""
    update = ("m = m + n  when mu == 0", "n = n + grad", "weight = weight - lr * (m if mu != 0 else grad)")
    assert useless(*update, declare="hyper mu = 0\nstate m\nstate n") == []


def test_to_ask_for_the_first_update_is_not_to_read_the_state() -> None:
    assert useless(AVERAGE, "weight = weight - lr * (0 if first(m) else grad)") == ["m"]


def test_an_average_or_a_copy_of_the_weight_is_kept_for_others_and_so_is_what_it_reads() -> None:
    declare = "state average = weight\nstate count"
    update = (STEP, "count = count + 1", "average = average + (weight - average) / (1 + abs(count))")
    assert useless(*update, declare=declare) == []
    assert useless(STEP, "m = m + weight") == ["m"]


@pytest.mark.parametrize(
    "path", [*ROOT.glob("optimizers/*.opt"), *ROOT.glob("examples/specs/*.opt")], ids=lambda path: path.stem
)
def test_no_spec_of_the_project_has_such_a_state(path: Path) -> None:
    assert not {"W0706", "W0707"} & {d.code for d in diagnose_file(path)[1]}


@pytest.mark.parametrize(
    ("update", "declare"),
    [
        (("m = grad", "weight = weight - lr * m"), "state m"),
        (("m = grad", "m = 0.9 * m + grad", "weight = weight - lr * m"), "state m"),
        (("m = grad  when f", "m = -grad  when not f", "weight = weight - lr * m"), "flag f\nstate m"),
        (("m = grad  when f", "weight = weight - lr * (m if f else grad)"), "flag f\nstate m when f"),
        (("m = grad", "weight = weight - lr * m  when f", f"{STEP}  when not f"), "flag f\nstate m"),
    ],
)
def test_a_state_that_every_step_assigns_before_it_is_read_is_warned_about(
    update: tuple[str, ...], declare: str
) -> None:
    assert [d.code for d in diagnose(rule(*update, declare=declare))] == ["W0707"]


def test_the_warning_is_where_the_state_is_declared() -> None:
    (found,) = diagnose(rule("m = grad", "weight = weight - lr * m", declare="state m"))
    assert (found.code, found.severity, found.span.line, found.span.column) == ("W0707", "warning", 3, 7)


@pytest.mark.parametrize(
    ("update", "declare"),
    [
        # The gradient of the step before.
        (("d = grad - before", "before = grad", "weight = weight - lr * d"), "state before"),
        # In one variant only.
        (("m = grad  when f", "m = m + grad  when not f", "weight = weight - lr * m"), "flag f\nstate m"),
        (("m = grad  when f", "weight = weight - lr * m"), "flag f\nstate m"),
        # In a branch, in a condition.
        (("m = grad if grad > 0 else m", "weight = weight - lr * m"), "state m"),
        (("u = grad if m > 0 else 1", "m = grad", "weight = weight - lr * u"), "state m"),
        # Asked whether it was ever written.
        (("f = 1 if first(m) else 0.5", "m = grad", "weight = weight - lr * m * f"), "state m"),
        # Kept for those who read it from outside.
        (("before = weight", "weight = weight - lr * grad * sign(before)"), "state before = weight"),
    ],
)
def test_a_state_that_some_step_reads_first_is_not(update: tuple[str, ...], declare: str) -> None:
    assert "W0707" not in {d.code for d in diagnose(rule(*update, declare=declare))}


@pytest.mark.parametrize(
    "update", [("weight = weight + 0 * lr",), ("weight = weight * (1 - lr)",), ("weight = sign(weight) * lr",)]
)
def test_a_rule_that_does_not_use_the_gradient_is_warned_about(update: tuple[str, ...]) -> None:
    found = [d for d in diagnose(rule(*update)) if d.code == "W0708"]
    assert len(found) == 1 and (found[0].severity, found[0].span.line) == ("warning", 1)


@pytest.mark.parametrize(
    ("update", "declare"),
    [
        ((STEP,), ""),
        (("u = sign(grad)", "weight = weight - lr * u"), ""),
        (("weight = weight - lr * m", "m = grad"), "state m"),
        (("weight = weight - lr * (1 if grad > 0 else -1)",), ""),
        ((STEP + "  when f", "weight = weight * (1 - lr)  when not f"), "flag f"),
    ],
)
def test_a_rule_that_uses_it_somewhere_is_not(update: tuple[str, ...], declare: str) -> None:
    assert "W0708" not in {d.code for d in diagnose(rule(*update, declare=declare))}
