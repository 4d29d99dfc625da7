"""Warnings about roots, quotients, powers and domains, and their absence where the ranges rule the case out."""

from __future__ import annotations

import pytest

from tests.specs import codes, diagnose, rule

SQUARES = [
    "grad * grad",
    "(1 - 0.9) * grad * grad",
    "grad * (1 - 0.9) * grad",
    "grad * (lr * grad)",
    "(-grad) * -grad",
    "grad ** 2",
    "grad ** 4",
    "(grad - weight) ** 2",
    "(grad - weight) * (grad - weight)",
    "abs(grad)",
    "max(grad, 0)",
    "max(0, grad, weight)",
    "clamp(grad, 0, 1)",
    "exp(grad)",
    "1 + tanh(grad)",
    "1 - sign(grad)",
    "lerp(grad * grad, weight * weight, 0.1)",
    "0.9 * abs(grad) + (1 - 0.9) * weight * weight",
    "grad * grad / (1 - 0.9 ** step)",
    "abs(grad) if lr > 0 else weight * weight",
    "sqrt(abs(grad))",
    "grad - grad",
    "-min(grad, 0)",
]


@pytest.mark.parametrize("square", SQUARES)
def test_what_cannot_be_negative_may_go_under_a_root(square: str) -> None:
    assert codes(rule(f"weight = weight - lr * sqrt({square})")) == []


@pytest.mark.parametrize("value", ["grad", "grad * weight", "grad ** 3", "grad * grad - weight", "-abs(grad)"])
def test_what_may_be_negative_warns_under_a_root(value: str) -> None:
    assert codes(rule(f"weight = weight - lr * sqrt({value})")) == ["W0801"]


POSITIVE = [
    "sqrt(grad * grad) + 1e-8",
    "sqrt(grad * grad) + eps",
    "max(abs(grad), eps)",
    "exp(grad)",
    "1 + grad * grad",
    "1 - 0.9 ** step",
    "2 ** grad",
    "lr",
    "step",
]


@pytest.mark.parametrize("divisor", POSITIVE)
def test_what_cannot_be_zero_may_divide(divisor: str) -> None:
    declare = "hyper eps = 1e-8 in [0, inf)" if "eps" in divisor else ""
    assert codes(rule(f"weight = weight - lr * grad / ({divisor})", declare=declare)) == []


@pytest.mark.parametrize("divisor", ["grad", "abs(grad)", "sqrt(grad * grad)", "tanh(grad)", "zero", "lr - 1e-3"])
def test_what_may_be_zero_warns_as_a_divisor(divisor: str) -> None:
    declare = "hyper zero = 0 in [0, inf)" if divisor == "zero" else ""
    assert codes(rule(f"weight = weight - lr * grad / ({divisor})", declare=declare)) == ["W0802"]


def test_scalars_are_left_to_ieee() -> None:
    declare = "hyper zero = 0\nlet a = 1 / zero\nlet b = sqrt(zero - 1) + log(zero) + zero ** zero"
    assert codes(rule("weight = weight - lr * a * b * (lr / zero) * grad", declare=declare)) == ["W0805"]
    assert codes(rule("weight = weight - lr * (1 if isfinite(a + b) else 2) * grad", declare=declare)) == []


def test_the_branch_not_taken_never_poisons() -> None:
    good = [
        "grad / v if v > 0 else 0",
        "0 if v <= 0 else grad / v",
        "grad / v if v != 0 else 0",
        "sqrt(grad) if grad >= 0 else 0",
        "sqrt(grad) if lr > 0 and grad > 0 else 0",
        "0 if grad < 0 or lr > 1 else sqrt(grad)",
        "where(grad > 1, log(grad), 0)",
        "0 if not grad > 0 else log(grad)",
    ]
    for choice in good:
        text = rule("v = v + grad * grad", f"weight = weight - lr * v * ({choice})", declare="state v in [0, inf)")
        assert codes(text) == [], choice
    assert codes(rule("weight = weight - lr * (sqrt(grad) if weight > 0 else 0)")) == ["W0801"]


def test_signs_are_judged_by_ranges_and_zeros_by_defaults() -> None:
    line = "weight = weight - lr * sqrt(a * grad * grad) / (abs(grad) + a)"
    assert codes(rule(line, declare="hyper a = 1 in [0, inf)")) == []
    assert codes(rule(line, declare="hyper a = 1")) == ["W0801"]
    assert codes(rule(line, declare="hyper a = 0 in [0, inf)")) == ["W0802"]


def test_a_requirement_narrows_a_range() -> None:
    line = "weight = weight - lr * sqrt((1 - a) * grad * grad)"
    assert codes(rule(line, declare="hyper a = 0.5 in [0, inf)")) == ["W0801"]
    assert codes(rule(line, declare='hyper a = 0.5 in [0, inf)\nrequire a <= 1, "a is at most 1"')) == []


def test_a_state_is_what_its_domain_says() -> None:
    lines = ("v = 0.9 * v + 0.1 * grad * grad", "weight = weight - lr * sqrt(v)")
    assert codes(rule(*lines, declare="state v in [0, inf)")) == []
    assert codes(rule(*lines, declare="state v")) == ["W0801"]


@pytest.mark.parametrize(
    ("update", "domain", "good"),
    [
        ("v + grad * grad", "[0, inf)", True),
        ("v - grad * grad", "[0, inf)", False),
        ("max(v - grad * grad, 0)", "[0, inf)", True),
        ("max(v, grad * grad)", "[0, inf)", True),
        ("0.9 * v + 0.2 * sign(grad)", "[-1, 1]", False),
        ("0.9 * v + (1 - 0.9) * sign(grad)", "[-1, 1]", True),
        ("beta * v + (1 - beta) * sign(grad)", "[-1, 1]", True),
        ("(1 - beta) * sign(grad) + beta * v", "[-1, 1]", True),
        ("lerp(v, tanh(grad), beta)", "[-1, 1]", True),
        ("clamp(v + grad, -1, 1)", "[-1, 1]", True),
        ("v + 1", "[0, 1]", False),
        ("v * 0.5", "[0, 1]", True),
        ("v * 0.5", "(0, 1]", True),
    ],
)
def test_a_domain_is_kept_or_warned_about(update: str, domain: str, good: bool) -> None:
    start = " = 1" if domain.startswith("(") else ""
    declare = f"hyper beta = 0.9 in [0, 1]\nstate v{start} in {domain}"
    lines = (f"v = {update}", "weight = weight - lr * v * beta * grad")
    assert codes(rule(*lines, declare=declare)) == ([] if good else ["W0804"])


def test_only_the_value_that_is_stored_must_be_in_the_domain() -> None:
    lines = ("v = v - grad", "v = max(v, 0)", "weight = weight - lr * v")
    assert codes(rule(*lines, declare="state v in [0, inf)")) == []
    lines = ("v = max(v - grad, 0)", "v = v - grad  when f", "weight = weight - lr * v")
    assert codes(rule(*lines, declare="flag f\nstate v in [0, inf)")) == ["W0804"]


def test_a_recurrent_scalar_is_followed() -> None:
    declare = "hyper beta = 0.9 in [0, 1)\nscalar c = 1\nc = c * beta"
    assert codes(rule("weight = weight - lr * grad / (1 - c)", declare=declare)) == []
    assert codes(rule("weight = weight - lr * grad / (2 - c * 3)", declare=declare)) == ["W0802"]
    assert codes(rule("weight = weight - lr * grad * sqrt(c) / (1 + c)", declare=declare)) == []


@pytest.mark.parametrize(
    ("exponent", "said"),
    [
        ("0.5", "a fractional power is NaN"),
        ("-2.5", "a fractional power is NaN"),
        ("(1 / 3)", "a fractional power is NaN"),
        ("lr", "a power whose exponent may be a fraction is NaN"),
        ("grad", "a power whose exponent may be a fraction is NaN"),
        ("3", None),
        ("1025", None),
        ("100000000000", None),
        ("2e300", None),
        ("(6 / 2)", None),
    ],
)
def test_a_power_of_what_may_be_negative_is_judged_by_its_exponent(exponent: str, said: str | None) -> None:
    found = [d.message for d in diagnose(rule(f"weight = weight - lr * grad ** {exponent}")) if d.code == "W0801"]
    assert [message.partition(" for ")[0] for message in found] == ([] if said is None else [said])


def test_zero_to_the_power_of_zero() -> None:
    line = "weight = weight - lr * abs(grad) ** p"
    assert codes(rule(line, declare="hyper p = 0.5 in [0, 1]")) == []
    assert codes(rule(line, declare="hyper p = 0 in [0, 1]")) == ["W0803"]
    assert codes(rule("weight = weight - lr * grad ** 0")) == []


@pytest.mark.parametrize("small", ["1e-50", "eps", "tiny", "eps * eps * 1e10", "-eps"])
def test_a_number_that_fp32_rounds_to_zero_keeps_no_divisor_from_zero(small: str) -> None:
    declare = "hyper eps = 1e-50 in [0, inf)\nlet tiny = eps + 0"
    text = rule(f"weight = weight - lr * grad / (sqrt(abs(grad)) + {small}) - 0 * (eps + tiny)", declare=declare)
    assert {*codes(text)} == {"W0802", "W0806"}


@pytest.mark.parametrize("large", ["1e-45", "eps * 1e20", "sqrt(eps)", "eps / eps"])
def test_a_small_number_that_reaches_the_tensor_as_a_larger_one_does(large: str) -> None:
    text = rule(
        f"weight = weight - lr * grad / (abs(grad) + {large}) * (eps * 1e50)", declare="hyper eps = 1e-50 in [0, inf)"
    )
    assert codes(text) == []


@pytest.mark.parametrize(
    "choice",
    [
        "grad / weight if weight != 0 else 0",
        "0 if weight == 0 else grad / weight",
        "grad / weight if grad > 1 and 0 != weight else 0",
        "where(weight != 0, grad * weight ** -1, 0)",
    ],
)
def test_a_divisor_that_the_condition_keeps_from_zero_is_fine(choice: str) -> None:
    assert codes(rule(f"weight = weight - lr * ({choice})")) == []


@pytest.mark.parametrize(
    "choice",
    [
        "grad / weight if weight != 1 else 0",
        "0 if weight != 0 else grad / weight",
        "(0 if weight != 0 else 1) + grad / weight",
        "grad / weight if weight != 0 or grad > 0 else 0",
    ],
)
def test_another_condition_does_not(choice: str) -> None:
    assert codes(rule(f"weight = weight - lr * ({choice})")) == ["W0802"]
