"""Names: declared once, readable where they are, read by somebody."""

from __future__ import annotations

import keyword

import pytest

from forge_dsl.analysis import builtins
from forge_dsl.analysis.builtins import BUILTINS, KEYWORDS, REFUSED, RESERVED, SPELLED_OTHERWISE
from tests.specs import codes, diagnose, rule

USE = "weight = weight - lr * grad"


@pytest.mark.parametrize("name", ["sum", "max", "first", "mean", "x", "norm", "out", "bias", "dy", "abs", "id"])
@pytest.mark.parametrize("kind", ["hyper", "state", "local"])
def test_a_function_may_lend_its_name_to_a_variable(name: str, kind: str) -> None:
    texts = {
        "hyper": rule(f"weight = weight - lr * {name} * grad", declare=f"hyper {name} = 1"),
        "state": rule(f"{name} = max({name}, grad)", f"weight = weight - lr * {name}", declare=f"state {name}"),
        "local": rule(f"{name} = abs(grad)", f"weight = weight - lr * {name}"),
    }
    assert codes(texts[kind]) == []


@pytest.mark.parametrize("name", sorted(set(RESERVED) - KEYWORDS - {"step", "grad", "weight"}))
def test_a_reserved_name_is_refused_once(name: str) -> None:
    assert codes(rule(f"weight = weight - lr * {name}", declare=f"hyper {name} = 1")) == ["E0203"]
    assert set(codes(rule(f"{name} = grad", f"weight = weight - lr * {name}"))) <= {"E0203", "E0208"}


def test_every_python_keyword_is_reserved() -> None:
    assert set(keyword.kwlist) <= set(RESERVED)


@pytest.mark.parametrize("name", ["step", "grad", "weight"])
@pytest.mark.parametrize("kind", ["hyper", "flag", "state", "scalar"])
def test_what_is_given_cannot_be_declared(name: str, kind: str) -> None:
    assert "E0203" in codes(rule(USE, declare=f"{kind} {name} = 1" if kind != "flag" else f"flag {name}"))


@pytest.mark.parametrize(
    "name", ["Tensor", "FusedOptimizer", "Rule", "SPEC", "RULE", "None", "self", "torch", "x", "bias"]
)
def test_the_class_needs_a_name_of_its_own(name: str) -> None:
    assert codes(f"optimizer {name}\nhyper lr = 1\nupdate:\n  {USE}\n") == ["E0203"]


def test_counters_of_states_are_taken() -> None:
    declare = "state m\nhyper first_m = 1\nhyper written_m = 1"
    assert (
        codes(rule("m = m + grad * first_m", "weight = weight - m * lr * written_m", declare=declare)) == ["E0203"] * 2
    )


def test_a_misspelling_is_answered_with_the_nearest_name() -> None:
    found = diagnose(rule("exp_avg = exp_agv + grad", "weight = weight - lr * exp_avg", declare="state exp_avg"))
    assert [(d.code, d.help) for d in found] == [("E0201", "did you mean `exp_avg`?")]


def test_a_misspelled_hyper_is_not_also_unused() -> None:
    found = diagnose(rule("weight = weight - weight_deacy * grad * lr", declare="hyper weight_decay = 0"))
    assert [d.code for d in found] == ["E0201"]


def test_a_let_sees_those_above_and_hypers_anywhere() -> None:
    assert codes(rule("weight = weight - b * grad", declare="let a = late * lr\nlet b = a\nhyper late = 1")) == []
    assert codes(rule("weight = weight - b * grad", declare="let b = a\nlet a = lr")) == ["E0701"]
    assert codes(rule("weight = weight - a * grad", declare="let a = a * lr")) == ["E0701"]


@pytest.mark.parametrize(
    ("declare", "update"),
    [
        ("hyper a = 1\nstate m = a", "m"),
        ("hyper a = 1\nstate m when a != 0", "(m if a != 0 else 1)"),
        ('hyper a = 1\nrequire a > 0, "a"\nstate m', "m"),
    ],
)
def test_a_read_outside_the_body_is_a_use(declare: str, update: str) -> None:
    when = "  when a != 0" if "when" in declare else ""
    assert codes(rule(f"m = m + grad{when}", f"weight = weight - lr * {update}", declare=declare)) == []


def test_a_state_that_only_its_own_update_reads_counts_as_read_and_gets_the_warning_about_it() -> None:
    assert codes(rule("m = m + grad", USE, declare="state m")) == ["W0706"]


def test_a_scalar_is_not_declared_again_to_be_assigned() -> None:
    (found,) = diagnose(rule(USE, declare="scalar d = 1\nlet d = max(d, 2)"))
    assert (found.code, found.help) == ("E0202", "write `d = ...` without `let`: a scalar is assigned")


@pytest.mark.parametrize("twice", ["state d\nlet d = lr", "hyper d = 1\nhyper d = 2", "let d = lr\nscalar d = 1"])
def test_of_a_name_that_is_declared_twice_nothing_else_is_said(twice: str) -> None:
    (found,) = diagnose(rule(USE, declare=twice))
    assert (found.code, found.help) == ("E0202", None)


def test_names_of_other_tensors_do_not_exist() -> None:
    (found,) = diagnose(rule("weight = weight - lr * grad * other_weight"))
    assert found.code == "E0201" and "other parameters" in found.notes[0]


def test_an_index_is_refused_and_not_also_undefined() -> None:
    assert codes(rule("weight = weight - lr * grad[i - 1]")) == ["E0503"]


def test_python_and_torch_spellings() -> None:
    assert codes(rule("weight = weight - lr * math.pi * grad")) == ["E0208"]
    assert codes(rule("weight = weight - self.lr * grad")) == ["E0208"]
    assert codes(rule("weight = weight - lr * (grad if True else 0)")) == ["E0208"]


def test_word_lists_do_not_overlap() -> None:
    assert not set(BUILTINS) & (set(REFUSED) | set(SPELLED_OTHERWISE))
    assert not set(REFUSED) & set(SPELLED_OTHERWISE)


@pytest.mark.parametrize("name", [*builtins.STATE_ENTRIES, "m_scale"])
@pytest.mark.parametrize("kind", ["state", "scalar"])
def test_entries_of_a_checkpoint_are_no_names_of_states(name: str, kind: str) -> None:
    declare = f"state m\n{kind} {name}" + (" = 1" if kind == "scalar" else "")
    source = rule(f"m = m + grad * {name}", f"{name} = {name} * 0.5", "weight = weight - lr * m", declare=declare)
    assert "E0203" in codes(source)
    assert "E0203" not in codes(source.replace(name, f"{name}_"))


def test_they_are_those_of_the_runtime() -> None:
    from forge_dsl.formats import registry
    from forge_dsl.runtime import entries

    assert {entries.ROUNDING, entries.FINGERPRINT, registry.LOW_KEY} == set(builtins.STATE_ENTRIES)
    assert registry.scale_key("m") == "m_scale"


def test_a_state_declared_under_another_spelling_is_told_of_the_local_that_it_was_for() -> None:
    found = diagnose(rule("exp_avg = 2 * grad", "weight = weight - lr * exp_avg", declare="state exp_avgg"))
    assert [(d.code, d.help) for d in found] == [
        ("E0206", "did you mean `exp_avg`, which is assigned on line 5? Then declare that")
    ]
    (found,) = diagnose(rule("u = 2 * grad", "weight = weight - lr * u", declare="state exp_avg"))
    assert (found.code, found.help) == ("E0206", "remove it, or read it in `update:`")
