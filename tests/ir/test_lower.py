"""From expressions of `update:` to operations: one case per construct."""

from __future__ import annotations

import pytest

from forge_dsl.ir.lower import lower
from tests.ir.programs import compiled, show

DECLARATIONS = """
flag f
flag g
hyper mu = 0
state m
state c when f
state d when mu != 0
let later = step > 3
"""
# What makes every declared name read and written, beside the case itself.
REST = """
m = m + x
c = c + grad when f
d = d + grad when mu != 0
weight = weight * (lr + mu + (1 if f or g or later else 0)) - m - (c if f else d if mu != 0 else grad)
"""
CASES = {
    # arithmetic
    "-grad": "(neg grad)",
    "+grad": "grad",
    "grad + weight": "(add grad weight)",
    "grad - weight - 1": "(sub (sub grad weight) 1)",
    "grad - (weight - 1)": "(sub grad (sub weight 1))",
    "grad * weight / 2": "(div (mul grad weight) 2)",
    "grad / weight / m": "(div (div grad weight) m)",
    # powers
    "grad ** 1": "grad",
    "grad ** 2": "(mul grad grad)",
    "grad ** 3": "(mul (mul grad grad) grad)",
    "grad ** 4": "(mul (mul (mul grad grad) grad) grad)",
    "grad ** 5": "(pow grad 5)",
    "grad ** -1": "(pow grad -1)",
    "grad ** 0": "(pow grad 0)",
    "grad ** 0.5": "(sqrt grad)",
    "grad ** 1.5": "(pow grad 1.5)",
    "grad ** lr": "(pow grad $lr)",
    "lr ** grad": "(pow $lr grad)",
    "(1 + 1) ** grad": "(pow 2 grad)",
    "grad ** (1 + 1)": "(mul grad grad)",
    # functions
    "sqrt(grad)": "(sqrt grad)",
    "rsqrt(grad)": "(rsqrt grad)",
    "exp(log(abs(grad)))": "(exp (log (abs grad)))",
    "log1p(expm1(tanh(sign(grad))))": "(log1p (expm1 (tanh (sign grad))))",
    "min(grad, weight, m)": "(min (min grad weight) m)",
    "max(grad, 0)": "(max grad 0)",
    "clamp(grad, -1, lr)": "(min (max grad -1) $lr)",
    "lerp(m, grad, 0.25)": "(add m (mul 0.25 (sub grad m)))",
    "lerp(grad, grad, lr)": "(add grad (mul $lr (sub grad grad)))",
    # scalars: maximal expressions without a coordinate are one table entry
    "lr * grad": "(mul $lr grad)",
    "lr * 2 * grad": "(mul $lr_two grad)",
    "grad * lr * 2": "(mul (mul grad $lr) 2)",
    "grad * (1 - lr)": "(mul grad $one_minus_lr)",
    "lr * sqrt(step) * grad": "(mul $lr_sqrt_step grad)",
    "grad * (2 * 3 + 1)": "(mul grad 7)",
    "grad * -1": "(mul grad -1)",
    "grad * (1 / 3)": "(mul grad 0.333333343)",
    "grad * 1e-50": "(mul grad 0)",
    "grad * 1e60": "(mul grad inf)",
    "grad * (1 if f else lr)": "(mul grad $one_if_f_else_lr)",
    # conditions
    "grad if grad > 0 else m": "(select (gt grad 0) grad m)",
    "where(grad > 0, grad, m)": "(select (gt grad 0) grad m)",
    "grad if 0 < grad <= lr else m": "(select (and (lt 0 grad) (le grad $lr)) grad m)",
    "grad if not grad == m else m": "(select (not (eq grad m)) grad m)",
    "grad if grad != m or grad >= 1 and m > 0 else m": "(select (or (ne grad m) (and (ge grad 1) (gt m 0))) grad m)",
    "grad if isfinite(grad) else 0": "(select (isfinite grad) grad 0)",
    "grad if first(m) else m": "(select $first_m grad m)",
    "grad if later else m": "(select $later grad m)",
    "grad if later and grad > 0 else m": "(select (and $later (gt grad 0)) grad m)",
    "grad if true else m": "grad",
    "where(1 > 2, grad, m)": "m",
    "grad if grad > 0 and (1 > 2) else m": "(select (and (gt grad 0) false) grad m)",
    # switches: known when a kernel is compiled
    "grad if f else m": "(choose:f grad m)",
    "grad if not f else m": "(choose:f m grad)",
    "grad if mu != 0 else m": "(choose:has_mu grad m)",
    "grad if f and g else m": "(choose:f (choose:g grad m) m)",
    "grad if f or g else m": "(choose:f grad (choose:g grad m))",
    "grad if not (f or g) else m": "(choose:f m (choose:g m grad))",
    "grad if not (f and mu != 0) else m": "(choose:f (choose:has_mu m grad) grad)",
    "where(f, grad, grad)": "grad",
    "grad if f and grad > 0 else m": "(select (and $is_f (gt grad 0)) grad m)",
}


@pytest.mark.parametrize(("expression", "expected"), CASES.items(), ids=CASES.keys())
def test_an_expression_becomes_these_operations(expression: str, expected: str) -> None:
    one = compiled(f"x = {expression}" + REST, DECLARATIONS)
    assert show(lower(one.checked, one.layout), "m") == f"(add m {expected})"


def test_statements_run_in_order_and_each_tensor_is_stored_once() -> None:
    one = compiled("x = grad + 1\nx = x * weight\nweight = weight - lr * x\nweight = weight + x")
    program = lower(one.checked, one.layout)
    x = "(mul (add grad 1) weight)"
    assert show(program) == f"(add (sub weight (mul $lr {x})) {x})"
    assert [out.name for out in program.outputs] == ["weight"]


def test_a_condition_on_a_statement_keeps_the_old_value_elsewhere() -> None:
    one = compiled("weight = weight - lr * grad\nweight = weight * 2 when f", "flag f")
    assert show(lower(one.checked, one.layout)) == (
        "(choose:f (mul (sub weight (mul $lr grad)) 2) (sub weight (mul $lr grad)))"
    )


def test_a_name_first_assigned_under_a_condition_has_no_old_value() -> None:
    one = compiled("x = lr * grad when f\nweight = weight - x when f\nweight = weight * 3 when not f", "flag f")
    assert show(lower(one.checked, one.layout)) == (
        "(choose:f (choose:f (sub weight (mul $lr grad)) weight) (mul (choose:f (sub weight (mul $lr grad)) weight) 3))"
    )


def test_states_are_written_in_their_order_and_only_if_assigned() -> None:
    one = compiled(
        "b = b + grad\na = a + b\nweight = weight - lr * (a + anchor)", "state a\nstate anchor = weight\nstate b"
    )
    program = lower(one.checked, one.layout)
    assert [out.name for out in program.outputs] == ["weight", "a", "b"]
    assert set(program.inputs) == {"weight", "grad", "a", "b", "anchor"}


def test_equal_expressions_are_one_value() -> None:
    one = compiled("weight = weight - (lr * sqrt(grad)) * (lr * sqrt(grad))")
    program = lower(one.checked, one.layout)
    assert program.count("sqrt") == 1
    assert program.count("mul") == 2


def test_a_value_has_the_name_it_is_assigned_to() -> None:
    one = compiled("g = -grad\nu = g * g\nweight = weight - lr * u")
    names = {op.name: op.code for op in lower(one.checked, one.layout).ops if op.code in {"neg", "mul", "sub"}}
    assert names == {"g": "neg", "u": "mul", "weight": "sub", None: "mul"}


def test_boolean_locals_are_conditions() -> None:
    one = compiled("up = grad > 0\nweight = weight - (lr if up and not grad > 1 else 0)")
    assert show(lower(one.checked, one.layout)) == "(sub weight (select (and (gt grad 0) (not (gt grad 1))) $lr 0))"
