"""Definedness in every variant."""

from __future__ import annotations

from tests.specs import codes, diagnose, rule

END = "weight = weight - lr * u"


def said(text: str) -> list[tuple[str, int, str]]:
    return [(d.code, d.span.line, d.message) for d in diagnose(text)]


def test_a_local_is_assigned_before_it_is_read() -> None:
    assert codes(rule("u = grad", END)) == []
    assert codes(rule(END, "u = grad")) == ["E0701"]
    assert codes(rule("u = u + grad", END)) == ["E0701"]


def test_a_local_of_some_variants_is_read_in_those_only() -> None:
    declare = "flag f"
    assert codes(rule("u = grad  when f", "weight = weight - lr * (u if f else grad)", declare=declare)) == []
    assert codes(rule("u = grad  when f", "weight = weight - lr * (grad if not f else u)", declare=declare)) == []
    assert codes(rule("u = grad  when f", "weight = weight - u  when f", "weight = weight * lr", declare=declare)) == []
    assert codes(rule("u = grad  when f", "u = lr  when not f", END, declare=declare)) == []
    found = said(rule("u = grad  when f", END, declare=declare))
    assert found == [("E0701", 6, "`u` has no value here when `f` is false")]


def test_a_select_reads_both_branches() -> None:
    text = rule("u = grad  when f", "weight = weight - lr * (u if f and lr > 1 else grad)", declare="flag f")
    assert codes(text) == ["E0701"]
    assert codes(rule("u = grad  when f", "weight = weight - lr * where(f, u, grad)", declare="flag f")) == ["E0701"]


def test_a_comparison_that_some_when_uses_is_pruned_too() -> None:
    declare = "hyper mu = 0\nstate m when mu != 0"
    lines = ("m = mu * m + grad  when mu != 0", "weight = weight - lr * (m if mu != 0 else grad)")
    assert codes(rule(*lines, declare=declare)) == []
    assert codes(rule(lines[0], "weight = weight - lr * (grad if not mu != 0 else m)", declare=declare)) == []
    (found,) = diagnose(rule(lines[0], "weight = weight - lr * (m if mu > 0 else grad)", declare=declare))
    assert found.code == "E0702"


def test_a_state_is_touched_only_where_it_exists() -> None:
    declare = "flag f\nstate m when f"
    found = diagnose(rule("m = m + grad", "weight = weight - lr * grad", declare=declare))
    assert [d.code for d in found] == ["E0702"]
    found = diagnose(rule("m = grad", "weight = weight - lr * (m if f else 1)", declare=declare))
    assert [(d.code, d.help) for d in found] == [("E0702", "add the state's own `when` to this statement")]


def test_what_is_overwritten_unread_is_an_error_on_that_path() -> None:
    assert said(rule("u = grad", "u = 2 * grad", END)) == [("E0703", 5, "this value of `u` is never read")]
    found = said(rule("u = grad", "u = 2 * grad  when f", END, declare="flag f"))
    assert found == [("E0703", 5, "this value of `u` is never read when `f` is true")]
    assert codes(rule("u = grad", "u = u * 2  when f", END, declare="flag f")) == []
    assert codes(rule("m = m + grad", "m = grad", "weight = weight - lr * m", declare="state m")) == ["E0703"]
    assert codes(rule("weight = grad", "weight = lr * grad")) == ["E0703"]


def test_a_local_that_nothing_reads_is_an_error() -> None:
    assert codes(rule("u = grad", "weight = weight - lr * grad")) == ["E0703"]


def test_a_local_that_one_variant_reads_is_fine() -> None:
    assert codes(rule("u = grad * 2", "weight = weight - lr * (u if f else grad)", declare="flag f")) == []


def test_the_weight_is_assigned_in_every_variant() -> None:
    assert codes(rule("m = m + lr * grad", declare="state m")) == ["E0704"]
    found = said(rule("weight = weight - lr * grad  when f", declare="flag f"))
    assert found == [("E0704", 1, "`weight` is never assigned when `f` is false")]
    found = said(rule("weight = weight - lr * grad  when f or g", declare="flag f\nflag g"))
    assert found[0][2].endswith("when `f` is false and `g` is false")
    found = said(rule("weight = weight - lr * grad  when f and g", declare="flag f\nflag g"))
    assert found[0][2].endswith("for instance when `f` is false")


def test_a_constant_state_or_scalar_is_an_error_and_an_anchor_is_not() -> None:
    line = "weight = weight - lr * (grad + m)"
    assert codes(rule(line, declare="state m")) == ["E0705"]
    assert codes(rule(line, declare="state m = 2")) == ["E0705"]
    assert codes(rule(line, declare="scalar m = 2")) == ["E0705"]
    assert codes(rule(line, declare="state m = weight")) == []
    assert codes(rule(line, declare="hyper h = 1\nstate m = h * 2")) == []


def test_first_looks_at_a_state_without_reading_it() -> None:
    declare = "hyper mu = 0\nstate m when mu != 0\nlet damp = 0 if first(m) else 1"
    lines = ("m = m + damp * grad  when mu != 0", "weight = weight - lr * (m if mu != 0 else grad)")
    assert codes(rule(*lines, declare=declare)) == []
    assert codes(rule("m = grad", "weight = weight - lr * (1 if first(m) else 2)", declare="state m")) == ["E0206"]


def test_scalars_may_be_assigned_more_than_once_and_conditionally() -> None:
    declare = "flag f\nscalar c = 1\nc = c * 2\nlet old = c\nc = c + old  when f"
    assert codes(rule("weight = weight - lr * c * grad", declare=declare)) == []


def test_a_refused_block_is_not_followed_by_guesses() -> None:
    assert codes(rule("if lr > 1:", "  u = grad", "else:", "  u = lr", END)) == ["E0601", "E0601"]


def test_first_is_asked_only_where_the_state_exists() -> None:
    update = ("m = grad  when f", "weight = weight - lr * (0 if first(m) else m if f else grad)")
    (found,) = diagnose(rule(*update, declare="flag f\nstate m when f"))
    assert found.code == "E0702" and "asked about here also when `f` is false" in found.message
    update = ("m = (grad if first(m) else m + grad)  when f", "weight = weight - lr * (m if f else grad)")
    assert codes(rule(*update, declare="flag f\nstate m when f")) == []


def test_a_misspelt_assignment_to_a_state_is_told_of_the_state() -> None:
    found = diagnose(rule("exp_avgg = 0.9 * exp_avg + grad", "weight = weight - lr * exp_avg", declare="state exp_avg"))
    assert [(d.code, d.help) for d in found] == [
        ("E0705", "assign it in `update:`: `exp_avg = ...`"),
        ("E0703", "did you mean the state `exp_avg`?"),
    ]


def test_an_element_of_a_tuple_in_a_condition_of_variants_is_told_the_way_out() -> None:
    declare = 'hyper betas = (0.9, 0.99)\nlet a, b = betas\nrequire a < b, "order"\nstate m when a > 0'
    found = diagnose(rule("m = m + grad", "weight = weight - lr * m * b", declare=declare))
    told = [d.help for d in found if d.code in ("E0310", "E0312")]
    assert len(told) == 3 and all("declare a hyper of its own" in (help_ or "") for help_ in told)
