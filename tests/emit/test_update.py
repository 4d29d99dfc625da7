"""The printed update of one coordinate: every value in a variable of its own for as long as something reads it."""

from __future__ import annotations

import pytest

from forge_dsl import testing
from forge_dsl.emit.triton import print_program
from forge_dsl.loading import load, module_of
from tests.hazards.kernels import launched
from tests.ir.programs import build, compiled

SPECS = {
    "temporaries beside lets of their names": """
optimizer A
hyper lr = 1
let t1 = lr * 2
let t2 = lr * 3
update:
  a = sqrt(grad * grad) + t1
  weight = weight - t1 * exp_of * exp_of - t2 * a
""".replace("exp_of", "(sqrt(grad * grad) + weight)"),
    "a second version of a name beside a let of that name": """
optimizer A
hyper lr = 1
let x_2 = lr * 2
update:
  x = grad + 1
  y = x * x_2
  x = x * weight
  weight = weight - lr * x - y * x_2
""",
    "old and new values of a state side by side": """
optimizer A
hyper lr = 1
state m
state n
update:
  old = m
  m = 0.5 * m + grad
  n = n + m * old
  weight = weight - lr * (m - old) * n
""",
    "two states that change places": """
optimizer A
hyper lr = 1
state a = weight
state b
update:
  c = a
  a = b + grad
  b = c
  weight = weight - lr * (a - b)
""",
    "the weight as it was": """
optimizer A
hyper lr = 1
state last
update:
  before = weight
  weight = weight - lr * grad
  last = weight - before + 0 * last
  weight = weight + last
""",
    "values under conditions that share parts": """
optimizer A
hyper lr = 1
flag f
flag g
state m when f
update:
  u = grad * grad + 1
  m = m + u / 3 when f
  v = m if f else u / 3
  w = v * 2 if g else u / 3
  weight = weight - lr * w - (m if f and g else v) when not g or f
  weight = weight * 2 when not f
  weight = weight + lr * v
""",
    "an old value that is read after its state was assigned under a condition": """
optimizer A
hyper lr = 1
flag f
state m
update:
  old = m
  m = m + grad when f
  weight = weight - lr * (m + 2 * old)
""",
    "constants as whole values": """
optimizer A
hyper lr = 1
flag f
state m
state k
update:
  c = 2 if f else 0.5
  m = 0
  k = k + m + lr
  m = 0.25 when f
  weight = weight - lr * sqrt(c) * grad * max(c, m) - k
""",
    "states that take the old weight, the gradient and each other's values": """
optimizer A
hyper lr = 1
flag f
state last
state g
state m
update:
  before = weight
  g_ = g
  weight = weight - lr * grad * (g_ + last - m)
  g = grad
  m = before if f else last
  last = +before if f else m
""",
    "a weight that becomes a state": """
optimizer A
hyper lr = 1
flag f
state fast = weight
update:
  fast_ = weight
  weight = fast if f else weight - lr * grad
  fast = fast_
  fast = fast when f
""",
    "a state that takes the value of another": """
optimizer A
hyper lr = 1
state m
state n
update:
  n = m + 0 * n
  m = grad
  weight = weight - lr * n
""",
    "scalars as whole values": """
optimizer A
hyper lr = 0.5
state m
update:
  high = lr * 2
  m = lr + 0 * m
  weight = weight - grad if (grad > lr and high > 0.75) or not (grad < high) else weight - high
""",
    "conditions that differ from coordinate to coordinate in some variants only": """
optimizer A
hyper lr = 0.5
flag fl = true
update:
  weight = weight - (lr * grad if grad > 0 or (grad if fl else step) > lr else 0.25 * weight)
  weight = weight - (lr * grad if grad > 0 and (grad if fl else step) > lr else 0.25 * weight)
  weight = weight - (lr * grad if isfinite(grad if fl else lr) and grad > 0 else 0.25 * weight)
  weight = weight - (lr * grad if (grad if fl else step) > lr and (step if fl else grad) > lr else 0.25 * weight)
  weight = weight - (lr * grad if not ((grad if fl else step) > lr) or grad > 0 else 0.25 * weight)
  weight = weight - (lr * grad if step > 2 or (grad > 0 if fl else step > 2) else 0.25 * weight)
  weight = weight - (lr * grad if (step > 2 or grad > 0) and (step > lr if fl else grad > 0) else 0.25 * weight)
""",
}


@launched
@pytest.mark.parametrize("how", ["elementwise", "fused", "banded"])
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
def test_each_value_is_the_one_that_the_author_meant(text: str, how: str) -> None:
    rule = load(text).RULE
    for case in testing.cases(rule):
        testing.assert_bitwise(rule, case, how, (3, 4, 5))
        testing.assert_near_float64(rule, case, how, (3, 4, 5), exact=False, steps=2)


def lines(*outputs: str, exact: bool = False, taken: frozenset[str] = frozenset()) -> list[str]:
    body = print_program(build(*outputs), exact, taken)
    return [*map(str.strip, body.lines), *(f"return {name} as {value}" for name, value in body.results.items())]


def test_what_is_read_twice_gets_a_variable_and_what_is_read_once_does_not() -> None:
    assert lines("weight = (add (mul grad grad) (sqrt (mul grad grad)))") == [
        "t1 = grad * grad",
        "t2 = t1 + tl.sqrt(t1)",
        "return weight as t2",
    ]


def test_no_variable_is_called_as_something_that_is_taken() -> None:
    assert lines("weight = (mul (add grad 1) (add grad 1))", taken=frozenset({"t1", "t2"})) == [
        "t1_2 = grad + 1.0",
        "t2_2 = t1_2 * t1_2",
        "return weight as t2_2",
    ]


@pytest.mark.parametrize(
    ("operation", "fast", "exact"),
    [
        ("(div grad m)", "device_math.divide(grad, m)", "tl.div_rn(grad, m)"),
        ("(sqrt grad)", "tl.sqrt(grad)", "tl.sqrt_rn(grad)"),
        ("(rsqrt grad)", "tl.rsqrt(grad)", "tl.div_rn(1.0, tl.sqrt_rn(grad))"),
        ("(exp grad)", "device_math.exp(grad)", "device_math.exp_exact(grad)"),
        ("(pow grad m)", "device_math.power(grad, m)", "device_math.power_exact(grad, m)"),
        ("(max grad m)", "device_math.maximum(grad, m)", "device_math.maximum(grad, m)"),
        ("(sub grad (sub m 0.1))", "grad - (m - 0.1)", "grad - (m - 0.1)"),
        ("(mul (add grad m) -2)", "(grad + m) * -2.0", "(grad + m) * -2.0"),
        ("(neg (add grad m))", "-1.0 * (grad + m)", "-1.0 * (grad + m)"),
        ("(mul grad 1e-40)", "grad * tl.cast(1e-40, tl.float32)", "grad * tl.cast(1e-40, tl.float32)"),
        ("(mul grad inf)", 'grad * float("inf")', 'grad * float("inf")'),
        ("(add grad -0)", "grad + -0.0", "grad + -0.0"),
        ("(choose:f grad m)", "grad if f else m", "grad if f else m"),
        ("(choose:f 1 2)", "tl.cast(1.0 if f else 2.0, tl.float32)", "tl.cast(1.0 if f else 2.0, tl.float32)"),
        ("(select (lt grad m) 1 2)", "tl.where(grad < m, 1.0, 2.0)", "tl.where(grad < m, 1.0, 2.0)"),
        ("(select (not (and (lt grad 0) (ge m 0))) grad m)", "tl.where(~((grad < 0.0) & (m >= 0.0)), grad, m)", None),
        ("(select (and (lt $a 0) (ge m 0)) grad m)", "tl.where(tl.where(a < 0.0, m >= 0.0, False), grad, m)", None),
        ("(select (or (ge m 0) (lt $a 0)) grad m)", "tl.where(tl.where(a < 0.0, True, m >= 0.0), grad, m)", None),
        ("(select (and (lt $a 0) (lt $b 0)) grad m)", "tl.where((a < 0.0) & (b < 0.0), grad, m)", None),
    ],
)
def test_operations_as_triton(operation: str, fast: str, exact: str | None) -> None:
    for text, mode in ((fast, False), (exact or fast, True)):
        assert lines(f"weight = {operation}", exact=mode)[0] == f"t1 = {text}"


def test_work_of_one_variant_stands_under_its_condition() -> None:
    one = compiled("m = m + grad * grad when f\nweight = weight - lr * (m if f else grad)", "flag f\nstate m when f")
    body = print_program(one.fast, False, frozenset())
    assert body.lines == [
        "    if f:",
        "        m = m + grad * grad",
        "    weight = weight - lr * (m if f else grad)",
    ]
    assert body.results == {"weight": "weight", "m": "m"}


def test_a_module_is_compiled_once() -> None:
    text = SPECS["the weight as it was"]
    assert load(text) is load(text)
    assert module_of(compiled("weight = weight - lr * grad")) is module_of(compiled("weight = weight - lr * grad"))
