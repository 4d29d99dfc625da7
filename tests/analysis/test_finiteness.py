"""Constants that are not finite, where they arise; scalars that are no fp32 numbers, where they meet a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge_dsl
from forge_dsl.analysis.check import check
from forge_dsl.language.parser import parse
from tests.specs import HERE, codes, diagnose, rule

ROOT = Path(forge_dsl.__file__).parent.parent
NOT_FINITE = (
    *("1 / 0", "0 / 0", "-1 / 0.0", "2 % 0", "exp(1000)", "expm1(1000)", "log(0)", "log(0.0)", "log(-1)", "log1p(-1)"),
    *("log1p(-2)", "sqrt(-1)", "rsqrt(0)", "rsqrt(-1)", "0 ** -1", "(-8) ** 0.5", "9 ** 9 ** 9", "1e308 * 10"),
    *("1e308 + 1e308", "-1e308 - 1e308", "1e300 / 1e-300", "inf - inf", "0 * inf", "inf / inf", "inf % 2"),
    *("max(1, exp(1000))", "lerp(1e308, -1e308, 2)", "where(2 > 1, 1 / 0, 2)"),
)
UNKNOWN = ("step / 0", "lr / (1 - 1)", "step % 0", "(1 if lr > 0 else 1 / 0)", "(1 if lr > 0 or 1 / 0 > 1 else 2)")
# Where a scalar stands alone, and where it meets a tensor.
ALONE = {
    "condition": ("weight = weight - lr * grad * (1 if ({}) > 3 else 2)", ""),
    "bound": ("weight = weight - lr * min(grad, {})", ""),
    "let": ("weight = weight - lr * grad * (2 if isfinite(k) else 1)", "let k = ({})"),
    "scalar": ("weight = weight - lr * grad * (2 if isfinite(k) else 1)", "scalar k = 1\nk = k * 0 + ({})"),
    "require": ("weight = weight - lr * grad", 'require lr != ({}), "message"'),
}
MET = {
    "factor": ("weight = weight - lr * grad * ({})", ""),
    "term": ("weight = weight - (lr * grad + ({}))", ""),
    "let": ("weight = weight - lr * grad * k", "let k = ({})"),
    "local": ("k = grad * ({})\n  weight = weight - lr * k", ""),
    "value": ("k = {}\n  weight = weight - lr * k * grad", ""),
    "branch": ("weight = weight - (grad if grad > lr else {})", ""),
    "function": ("weight = weight - lerp(grad, lr, {})", ""),
    "state": ("m = m + grad\n  weight = weight - lr * m", "state m = weight * ({})"),
    "variant": ("weight = weight - (lr * grad * ({}) if f else lr * grad)", "flag f"),
}


def built(places: dict[str, tuple[str, str]], place: str, expression: str) -> str:
    update, declare = (text.replace("{}", expression) for text in places[place])
    return rule(update, declare=declare)


@pytest.mark.parametrize("place", ALONE)
@pytest.mark.parametrize("expression", [*NOT_FINITE, *UNKNOWN])
def test_a_scalar_of_numbers_that_is_not_finite_is_warned_about(place: str, expression: str) -> None:
    if place == "require" and ("step" in expression or "lr" in expression):
        pytest.skip("the defaults decide a requirement")
    source = built(ALONE, place, expression)
    found = diagnose(source)
    assert [d.code for d in found] == ["W0805"], found
    assert source[found[0].span.start : found[0].span.end] in f"({expression})"


@pytest.mark.parametrize("place", MET)
@pytest.mark.parametrize("expression", NOT_FINITE)
def test_where_it_meets_a_tensor_it_is_an_error(place: str, expression: str) -> None:
    found = diagnose(built(MET, place, expression))
    assert {d.code for d in found if d.severity == "error"} == {"E0407"}
    assert any(
        d.message.endswith((" is not a number, and it meets a tensor", "infinity, and it meets a tensor"))
        for d in found
    )


@pytest.mark.parametrize("place", MET)
@pytest.mark.parametrize(
    "expression",
    [
        *("1 / 3", "9 ** 9", "exp(-1000)", "1 / inf", "exp(-inf)", "min(lr, inf)", "max(-inf, lr)", "tanh(inf)"),
        *("0 ** 0", "1e-400", "2 % inf", "(1 if 2 > 1 else 1 / 0)", "where(false, log(0), 1)", "1e308 * 1e-300", "inf"),
    ],
)
def test_finite_constants_and_written_infinities_get_nothing(place: str, expression: str) -> None:
    assert codes(built(MET, place, expression)) == []


def test_an_end_of_a_range_is_a_number_or_a_written_infinity() -> None:
    assert codes(rule("weight = weight - lr * b * grad", declare="hyper b = 1 in [0, 1 / 0]")) == ["E0401"]
    assert codes(rule("weight = weight - lr * b * grad", declare="hyper b = 1 in [0, inf]")) == []
    assert codes(rule("weight = weight - lr * b * grad", declare="hyper b = 1 in [-2 * inf, inf]")) == []


def test_a_zero_is_followed_through_names() -> None:
    assert codes(rule("weight = weight - lr * grad / z", declare="let a = 2\nlet z = a - 2")) == ["E0407"]
    assert codes(rule("z = 0", "weight = weight - lr * grad / z")) == ["E0407"]
    conditional = rule("z = 0  when not f", "z = lr  when f", "weight = weight - lr * grad / z", declare="flag f")
    assert codes(conditional) == ["W0802"]


@pytest.mark.parametrize(
    "update",
    [
        ("m = grad if first(m) else m + r * (grad - m)", "weight = weight - lr * m"),
        ("m = where(first(m), grad, m + r * (grad - m))", "weight = weight - lr * m"),
        ("m = grad if abs(grad) < 1 or step == 1 else m + r * grad", "weight = weight - lr * m"),
    ],
)
def test_a_choice_that_may_leave_the_first_step_out_is_trusted(update: tuple[str, ...]) -> None:
    assert codes(rule(*update, declare="state m\nlet r = 1 / (step - 1)")) == []


def test_what_happens_at_the_first_step_says_so() -> None:
    (found,) = diagnose(rule("weight = weight - lr / (step - 1) * grad"))
    assert found.message == "at the first step, with every hyper and flag at its default, `lr / (step - 1)` is infinity"


def test_a_diagnostic_names_the_way_out() -> None:
    (found,) = diagnose(rule("weight = weight - lr * grad / 0"))
    assert found.message == "this divisor is 0" and found.help == "write `inf` where infinity is meant"


@pytest.mark.parametrize(
    ("declare", "scalar"),
    [
        ("hyper k = 0", "(lr / k)"),
        ("hyper k = 0\nlet r = lr / k", "r"),
        ("hyper k = 0", "log(k)"),
        ("hyper k = -1", "sqrt(k)"),
        ("hyper k = 0\nflag f", "(1 if f else lr / k)"),
        ("hyper ks = (0, 1)\nlet a, b = ks", "(b / a)"),
        ("hyper k = 1000", "exp(k)"),
        # At the first step.
        ("hyper b = 1\nlet bias = 1 - b ** step", "(lr / bias)"),
        ("", "(1 / (step - 1))"),
        ("", "(1 / log(step))"),
        ("hyper k = 1", "(1 / (step - k))"),
        ("flag f", "(1 if f or step > 2 else 1 / (step - 1))"),
    ],
)
def test_a_scalar_that_is_not_finite_at_the_defaults_is_warned_about(declare: str, scalar: str) -> None:
    assert codes(rule(f"weight = weight - lr * {scalar} * grad", declare=declare)) == ["W0805"]


@pytest.mark.parametrize(
    ("declare", "scalar"),
    [
        ("hyper warmup = 0 in [0, inf)", "min(1, step / warmup)"),
        ("hyper k = 0", "(lr / k if k != 0 else lr)"),
        ("hyper k = 0", "(lr if k == 0 else lr / k)"),
        ("hyper k = 0", "(1 if k != 0 and 1 / k > 2 else 2)"),
        ("hyper k = 0\nflag f", "(lr / k if f else lr)"),
        ("hyper k = 0 in [0, inf)\nlet cap = inf if k == 0 else k", "(1 / cap)"),
        ("hyper k = 0", "(2 if step % k == 0 else 1)"),
        ("hyper k = 1", "(1 / (step + k))"),
        ("", "(1 / (step - 1) if step > 1 else 1)"),
    ],
)
def test_a_scalar_that_ieee_arithmetic_makes_right_is_not(declare: str, scalar: str) -> None:
    assert codes(rule(f"weight = weight - lr * {scalar} * grad", declare=declare)) == []


def test_a_branch_that_is_not_taken_at_the_defaults_is_judged_by_its_numbers_alone() -> None:
    declare = "hyper k = 0\nflag f"
    assert codes(rule("weight = weight - lr * (grad * (lr / k) if f else grad)", declare=declare)) == []
    assert codes(rule("weight = weight - lr * (grad / 0 if f else grad)", declare="flag f")) == ["E0407"]
    assert (
        codes(rule("g = grad  when not f", "g = grad * (lr / k)  when f", "weight = weight - lr * g", declare=declare))
        == []
    )


def test_a_number_that_fp32_cannot_hold_is_warned_about_where_it_meets_a_tensor() -> None:
    largest = "3.4028235677973366e38"  # in float64 the first number that is rounded to infinity
    assert codes(rule(f"weight = weight - lr * ({largest} * grad)")) == ["W0806"]
    assert codes(rule("weight = weight - lr * (3.4028235677973362e38 * grad)")) == []
    assert codes(rule("weight = weight - lr * 1e39 * grad", declare="")) == []  # 1e36
    assert codes(rule("weight = weight - lr * (grad if grad > 0 else -1e39)")) == ["W0806"]
    assert codes(rule("weight = weight - lr * (step * 1e39 * 1e-39) * grad")) == []
    assert codes(rule("weight = weight - lr * clamp(grad, -1e39, 1e39)")) == []
    assert codes(rule("m = m * 0 + 1e39", "weight = weight - lr * m * grad", declare="state m")) == ["W0806"]


def test_a_number_that_is_zero_in_fp32_is_warned_about_where_it_meets_a_tensor() -> None:
    half = "7.006492321624085e-46"  # of the smallest fp32 number: a tie, which goes to zero
    assert codes(rule(f"weight = weight - lr * ({half} * grad)")) == ["W0806"]
    assert codes(rule("weight = weight - lr * (7.006492321624087e-46 * grad)")) == []
    assert codes(rule("weight = weight - lr * (0 * grad)")) == []
    assert codes(rule("weight = weight - lr * (1e-46 * 1e46) * grad")) == []
    assert codes(rule("weight = weight - lr * max(grad, 1e-46)")) == []
    assert codes(rule("weight = weight - lr * grad - eps * weight", declare="hyper eps = 1e-50 in [0, 1]")) == ["W0806"]


SWAPPED = {
    "numbers": ("clamp(grad, 1, -1)", ""),
    "folded": ("clamp(grad, 2 * 3, 10 / 2)", ""),
    "infinity": ("clamp(grad, inf, 0)", ""),
    "hypers": ("clamp(grad, c, -c)", "hyper c = 1"),
    "one of each": ("clamp(grad, c, 0.5)", "hyper c = 1"),
    "lets": ("clamp(grad, low, c)", "hyper c = 1\nlet low = 2 * c"),
    "tuple": ("clamp(grad, high, low)", "hyper ends = (0, 1)\nlet low, high = ends"),
    "scalar": ("grad * clamp(step, 3, 2)", ""),
    "chosen": ("(clamp(grad, c, -c) if c > 0 else grad)", "hyper c = 1"),
    "not chosen, of numbers": ("(clamp(grad, 1, -1) if c > 1 else grad)", "hyper c = 1"),
}
IN_ORDER = {
    "numbers": ("clamp(grad, -1, 1)", ""),
    "equal": ("clamp(grad, 1, 1)", ""),
    "zeros": ("clamp(grad, -c, c)", "hyper c = 0"),
    "infinities": ("clamp(grad, -inf, inf)", ""),
    "not known": ("clamp(grad, step, -step)", ""),
    "of a tensor": ("clamp(grad, 1, weight)", ""),
    "not chosen at the defaults": ("(clamp(grad, -c, c) if c > 0 else grad)", "hyper c = -1"),
}


@pytest.mark.parametrize("case", SWAPPED)
def test_a_lower_bound_above_the_upper_one_is_warned_about(case: str) -> None:
    expression, declare = SWAPPED[case]
    source = rule(f"weight = weight - lr * {expression}", declare=declare)
    (found,) = diagnose(source)
    assert found.code == "W0807" and "is above the upper bound" in found.notes[0]
    assert source[found.span.start :].startswith("clamp(")
    assert found.message.startswith("with every hyper") == ("hyper" in declare and case != "not chosen, of numbers")


@pytest.mark.parametrize("case", IN_ORDER)
def test_bounds_in_order_or_unknown_get_nothing(case: str) -> None:
    expression, declare = IN_ORDER[case]
    assert codes(rule(f"weight = weight - lr * {expression}", declare=declare)) == []


@pytest.mark.parametrize("folder", ["optimizers", "examples/specs", "tests/specs/rules"])
def test_published_rules_get_nothing(folder: str) -> None:
    paths = sorted((ROOT / folder).glob("*.opt"))
    assert len(paths) >= 4
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not check(parse(text), text, path.name)[1], path


def test_yogi_is_warned_about_its_domain_alone() -> None:
    assert codes((HERE / "warned" / "yogi.opt").read_text(encoding="utf-8")) == ["W0804"]


@pytest.mark.parametrize("condition", ["k != 0", "not k == 0", "0 != k", "k > 0", "k < 0", "k >= 1", "k == 1"])
@pytest.mark.parametrize("valid", ["", " in [0, 0]", " in [0, inf)", " in (-1, 0]"])
def test_a_condition_that_the_default_contradicts_is_followed_without_a_crash(condition: str, valid: str) -> None:
    declare = f"hyper k = 0{valid}"
    for quotient in ("lr / k * grad", "grad / k", "rsqrt(abs(k)) * grad", "grad * abs(k) ** -1.5", "grad * k ** -2"):
        found = codes(rule(f"weight = weight - ({quotient} if {condition} else grad * lr)", declare=declare))
        assert not [code for code in found if code.startswith("E")]
        if condition == "k != 0":
            assert found == []
