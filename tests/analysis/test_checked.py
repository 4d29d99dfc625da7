"""What a good spec becomes."""

from __future__ import annotations

import pytest

from forge_dsl.analysis import switches
from forge_dsl.analysis.separability import certificate
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.spec import Range
from tests.specs import HERE, checked, rule


def test_adamw() -> None:
    result = checked((HERE / "rules" / "adamw.opt").read_text())
    half_open = Range(low=0.0, high=1.0, high_open=True)
    assert [(h.name, h.default) for h in result.hypers] == [
        ("lr", 1e-3),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 1e-2),
    ]
    assert result.hypers[1].ranges == (half_open, half_open)
    assert result.flags == (("amsgrad", False), ("maximize", False))
    assert [(s.name, s.initial, s.when is not None) for s in result.states] == [
        ("exp_avg", None, False),
        ("exp_avg_sq", None, False),
        ("max_exp_avg_sq", None, True),
    ]
    assert result.switches == (syntax.Name("amsgrad"), syntax.Name("maximize"))
    assert result.uses_step and result.first == () and result.scalars == ()
    assert len(result.scalar_program) == 3 and len(result.update) == 7


def test_sgd_with_momentum() -> None:
    result = checked((HERE / "rules" / "sgd_momentum.opt").read_text())
    assert [format_expr(atom) for atom in result.switches] == ["nesterov", "maximize", "momentum != 0"]
    assert result.first == ("momentum_buffer",)
    assert not result.uses_step
    assert len(result.requires) == 1


def test_nadam() -> None:
    result = checked((HERE / "rules" / "nadam.opt").read_text())
    assert result.scalars == (("mu_product", 1.0),)
    assert [type(node) for node in result.scalar_program].count(syntax.Assign) == 1


def test_one_range_per_element() -> None:
    result = checked(
        rule("weight = weight - lr * a * b", declare="hyper p = (1, 5) in [0, 2], (-inf, inf)\nlet a, b = p")
    )
    assert [str(r) for r in result.hypers[1].ranges] == ["[0, 2]", "(-inf, inf)"]


def test_defaults_are_folded() -> None:
    result = checked(rule("weight = weight - lr * a", declare="hyper a = 1 - 2 ** -3"))
    assert result.hypers[1].default == 0.875


def test_a_zero_initial_value_is_none() -> None:
    lines = ("m = m + grad", "n = n + m", "weight = weight - lr * n")
    result = checked(rule(*lines, declare="state m = 0\nstate n = 1 - 1"))
    assert [state.initial for state in result.states] == [None, None]


def test_a_conditional_scalar_assignment_is_a_choice() -> None:
    result = checked(rule("weight = weight - lr * c * grad", declare="flag f\nscalar c = 1\nc = c * 2  when f"))
    (node,) = result.scalar_program
    assert isinstance(node, syntax.Assign) and node.when is None
    assert format_expr(node.value) == "c * 2 if f else c"


def test_switches_are_listed_once_in_order_of_appearance() -> None:
    declare = "hyper a = 1\nflag g\nstate m when f and a > 0\nflag f\nlet x = 1 if g else 2"
    result = checked(
        rule(
            "m = m + 1  when a > 0 and f",
            "weight = weight - lr * grad * x  when not a > 0 or lr == 2",
            "weight = weight - (m if f and a > 0 else lr)",
            declare=declare,
        )
    )
    assert [format_expr(atom) for atom in result.switches] == ["g", "f", "a > 0", "lr == 2"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_sets_of_variants_are_truth_tables(count: int) -> None:
    atoms = tuple(syntax.Name(f"f{i}") for i in range(count))
    made = switches.Switches(atoms)
    assert made.everywhere.bit_count() == 2**count
    for index, atom in enumerate(atoms):
        where = made.where(atom)
        assert where is not None
        assert all(bool(where >> v & 1) == bool(v >> index & 1) for v in range(2**count))
        inverse = made.where(syntax.Unary("not", atom))
        assert inverse == made.everywhere & ~where
    if count == 3:
        both = made.where(syntax.Logical("and", atoms[:2]))
        either = made.where(syntax.Logical("or", atoms[:2]))
        assert both is not None and either is not None
        assert (both.bit_count(), either.bit_count()) == (2, 6)
    assert made.where(syntax.Name("other")) is None


def test_the_certificate_names_what_every_new_value_depends_on() -> None:
    result = certificate(checked((HERE / "rules" / "adamw.opt").read_text()))
    found = {d.target: (d.tensors, d.scalars) for d in result.dependences}
    assert found["exp_avg"] == (("grad", "exp_avg"), ("beta1", "maximize"))
    assert found["weight"][0] == ("weight", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert {"lr", "eps", "bias1", "bias2"} <= set(found["weight"][1])
    text = str(result)
    assert text.startswith("AdamW is element-wise separable") and "sqrt" in text


def test_the_certificate_counts_statements_in_words() -> None:
    assert "its one statement uses " in str(certificate(checked(rule())))
    assert "its 2 statements use " in str(certificate(checked(rule("g = grad", "weight = weight - lr * g"))))


def test_a_state_of_one_variant_keeps_its_own_dependence() -> None:
    result = certificate(
        checked(rule("m = grad  when lr > 1", "weight = weight - (m if lr > 1 else lr)", declare="state m when lr > 1"))
    )
    assert next(d for d in result.dependences if d.target == "m").tensors == ("grad", "m")
