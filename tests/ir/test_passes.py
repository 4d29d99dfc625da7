"""Specialising, dead code, and what only fast arithmetic may do."""

from __future__ import annotations

import numpy as np
import pytest

from forge_dsl.analysis.fold import fold_scalar
from forge_dsl.compile import compile_source
from forge_dsl.ir.names import Namer
from forge_dsl.ir.passes.dead import remove_dead
from forge_dsl.ir.passes.fast import hoist_factors, share_reciprocals
from forge_dsl.ir.passes.specialise import specialise
from forge_dsl.ir.program import Program
from forge_dsl.language.format import format_expr
from forge_dsl.loading import module_of
from forge_dsl.resources import optimizers_dir
from tests.ir.programs import build, compiled, run, show

# -- specialise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "expected"), [(True, "(mul grad 2)"), (False, "weight")])
def test_a_variant_takes_one_side_of_each_choice(f: bool, expected: str) -> None:
    program = build("weight = (choose:f (mul grad 2) weight)")
    assert show(specialise(program, {"f": f}, frozenset())) == expected


def test_a_variant_has_no_output_for_a_state_that_it_lacks() -> None:
    program = build("weight = grad", "m = (choose:f grad m)")
    assert [out.name for out in specialise(program, {"f": False}, frozenset({"m"})).outputs] == ["weight"]


def test_choices_within_choices() -> None:
    program = build("weight = (choose:f (choose:g 1 2) (choose:g 3 4))")
    shown = [show(specialise(program, {"f": f, "g": g}, frozenset())) for f in (True, False) for g in (True, False)]
    assert shown == ["1", "2", "3", "4"]


# -- dead code --------------------------------------------------------------------------------------------------------


def test_what_no_output_needs_is_gone() -> None:
    program = build("weight = (add grad $a)", "m = (exp (mul grad $b))")
    kept = remove_dead(Program(program.ops, program.outputs[:1], program.slots))
    assert {op.code for op in kept.ops} == {"input", "slot", "add"}
    assert [slot.name for slot in kept.slots] == ["a"]
    assert show(kept) == "(add grad $a)"


def test_a_state_that_only_keeps_its_value_is_not_written() -> None:
    kept = remove_dead(build("weight = (add grad m)", "m = m", "n = m"))
    assert [out.name for out in kept.outputs] == ["weight", "n"]
    assert show(kept, "n") == "m"


def test_a_state_without_which_nothing_changes_is_not_read() -> None:
    assert remove_dead(build("weight = (add weight grad)", "m = m")).inputs == ("weight", "grad")


def test_sgd_has_no_state_at_all() -> None:
    one = compile_source((optimizers_dir() / "sgd.opt").read_text(encoding="utf-8"), "sgd.opt")
    assert set(one.exact.inputs) == set(one.fast.inputs) == {"weight", "grad"}
    assert module_of(one).SPEC.states == ()
    arguments = module_of(one).RULE.linear_kernel.arg_names
    assert [name for name in arguments if name.endswith("_ptr")] == ["weight_ptr"]


# -- fast -------------------------------------------------------------------------------------------------------------


def hoisted(text: str) -> tuple[str, dict[str, str]]:
    """The program after hoisting, and the expressions of the table entries that it reads."""
    program = remove_dead(hoist_factors(build(f"weight = {text}"), Namer(set())))
    return show(program), {slot.name: format_expr(slot.expr) for slot in program.slots}


HOISTED = {
    "(mul $a (div grad $b))": ("(mul $a_over_b grad)", {"a_over_b": "a / b"}),
    "(div (mul $a grad) $b)": ("(mul $a_over_b grad)", {"a_over_b": "a / b"}),
    "(mul (mul $a grad) $b)": ("(mul $a_b grad)", {"a_b": "a * b"}),
    "(div grad $a)": ("(mul $inv_a grad)", {"inv_a": "1 / a"}),
    "(div $a $b)": ("$a_over_b", {"a_over_b": "a / b"}),
    "(div (mul $a grad) (mul $b weight))": ("(div (mul $a_over_b grad) weight)", {"a_over_b": "a / b"}),
    "(div grad (div weight $a))": ("(div (mul $a grad) weight)", {"a": "a"}),
    "(mul (div $a grad) (div $b weight))": ("(div $a_b (mul grad weight))", {"a_b": "a * b"}),
    "(mul $a grad)": ("(mul $a grad)", {"a": "a"}),
    "(mul grad $a)": ("(mul grad $a)", {"a": "a"}),
    "(mul grad weight)": ("(mul grad weight)", {}),
    "(div grad weight)": ("(div grad weight)", {}),
    "(mul (add grad $a) $b)": ("(mul (add grad $a) $b)", {"a": "a", "b": "b"}),
    "(mul $a (mul 2 grad))": ("(mul $a (mul 2 grad))", {"a": "a"}),
    "(sqrt (div grad $a))": ("(sqrt (mul $inv_a grad))", {"inv_a": "1 / a"}),
}


@pytest.mark.parametrize(("before", "after"), HOISTED.items(), ids=HOISTED.keys())
def test_scalar_factors_meet_in_one_table_entry(before: str, after: tuple[str, dict[str, str]]) -> None:
    assert hoisted(before) == after


def test_a_product_that_is_used_twice_keeps_its_value() -> None:
    program = hoist_factors(build("weight = (add (mul $a (mul $b grad)) (mul $b grad))"), Namer(set()))
    assert show(program) == "(add (mul $a (mul $b grad)) (mul $b grad))"


def test_a_product_that_is_stored_keeps_its_value() -> None:
    program = hoist_factors(build("m = (mul $b grad)", "weight = (mul $a (mul $b grad))"), Namer(set()))
    assert show(program, "m") == "(mul $b grad)"
    assert show(program) == "(mul $a (mul $b grad))"


def test_new_table_entries_have_new_names() -> None:
    program = hoist_factors(build("weight = (mul $a (div grad $b))"), Namer({"a_over_b"}))
    assert "$a_over_b_2" in show(program)


def test_quotients_with_one_divisor_share_its_reciprocal() -> None:
    program = share_reciprocals(build("weight = (add (div grad m) (div weight m))"))
    assert show(program) == "(add (mul grad (rcp m)) (mul weight (rcp m)))"
    assert program.count("rcp") == 1


def test_a_single_quotient_stays_one() -> None:
    text = "(add (div grad m) (div weight n))"
    assert show(share_reciprocals(build(f"weight = {text}"))) == text


@pytest.mark.parametrize("text", HOISTED)
def test_hoisting_keeps_the_value(text: str) -> None:
    """In float64, where re-association shows as a few units in the last place only."""
    rng = np.random.default_rng(0)
    inputs = {name: rng.uniform(0.5, 2, 100) for name in ("grad", "weight")}
    env = {"a": 0.3, "b": 1.7}
    before = build(f"weight = {text}")
    after = hoist_factors(before, Namer(set()))
    values = [
        run(one, inputs, {s.name: fold_scalar(s.expr, env) for s in one.slots})["weight"] for one in (before, after)
    ]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-15 * 8)


def test_exact_programs_are_never_re_associated() -> None:
    """Each of these has a faster form; the exact program has the operations as they were written."""
    one = compiled("m = grad / lr\nweight = weight - lr * (grad / step) / m - lr * (2 * grad) / m", "state m")
    assert show(one.exact) == (
        "(sub (sub weight (div (mul $lr (div grad $step)) (div grad $lr))) (div (mul $lr (mul 2 grad)) (div grad $lr)))"
    )
    assert one.fast.count("div") == 0 and one.fast.count("rcp") == 1
