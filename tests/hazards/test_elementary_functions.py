"""Hazard: elementary functions differ between libraries, and libdevice's do not run in Triton's interpreter.

The fast ones keep the bounds that their docstrings state; the exact ones, and the reference, are the float64 value
rounded once. Truth is numpy's float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import device_math, reference_math
from forge_dsl.runtime.triton_support import tl, triton
from tests.hazards.kernels import launched

pytestmark = launched
BLOCK = 2048
FUNCTIONS = ["exp", "log", "log1p", "expm1", "tanh"]


@triton.jit
def apply_one(x, out, which: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if which == "exp":
        value = device_math.exp(value)
    elif which == "log":
        value = device_math.log(value)
    elif which == "log1p":
        value = device_math.log1p(value)
    elif which == "expm1":
        value = device_math.expm1(value)
    elif which == "tanh":
        value = device_math.tanh(value)
    elif which == "exp_exact":
        value = device_math.exp_exact(value)
    elif which == "log_exact":
        value = device_math.log_exact(value)
    elif which == "log1p_exact":
        value = device_math.log1p_exact(value)
    elif which == "expm1_exact":
        value = device_math.expm1_exact(value)
    elif which == "tanh_exact":
        value = device_math.tanh_exact(value)
    elif which == "sign":
        value = device_math.sign(value)
    else:
        tl.static_assert(which == "isfinite")
        value = device_math.isfinite(value).to(tl.float32)
    tl.store(out + at, value)


@triton.jit
def apply_two(x, y, out, which: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    if which == "minimum":
        value = device_math.minimum(a, b)
    elif which == "maximum":
        value = device_math.maximum(a, b)
    elif which == "power":
        value = device_math.power(a, b)
    elif which == "divide":
        value = device_math.divide(a, b)
    else:
        tl.static_assert(which == "power_exact")
        value = device_math.power_exact(a, b)
    tl.store(out + at, value)


def on_device(name: str, *arguments: np.ndarray) -> np.ndarray:
    """The function of `device_math` in a kernel."""
    count = len(arguments[0])
    padded = [torch.ones(-(-count // BLOCK) * BLOCK) for _ in arguments]
    for tensor, argument in zip(padded, arguments, strict=True):
        tensor[:count] = torch.from_numpy(argument)
    moved = [tensor.to(testing.device()) for tensor in padded]
    out = torch.empty_like(moved[0])
    kernel = apply_one if len(arguments) == 1 else apply_two
    with np.errstate(all="ignore"):
        kernel[(len(out) // BLOCK,)](*moved, out, name, BLOCK)
    return out.cpu().numpy()[:count]


def numbers(low: float, high: float, count: int = 20_000) -> np.ndarray:
    """fp32 numbers of both signs whose magnitudes are spread evenly over the exponents from `low` to `high`."""
    rng = np.random.default_rng(7)
    magnitudes = 2.0 ** rng.uniform(np.log2(low), np.log2(high), count)
    return (magnitudes * rng.choice([-1, 1], count)).astype(np.float32)


DOMAINS = {
    "exp": numbers(1e-6, 87),
    "log": np.abs(numbers(1e-37, 3e38)),
    "log1p": np.concatenate([np.abs(numbers(1e-30, 1e38)), -np.abs(numbers(1e-30, 0.999, 5000))]),
    "expm1": numbers(1e-30, 87),
    "tanh": numbers(1e-30, 40),
}
WIDE: dict[str, Callable[..., np.ndarray]] = {name: getattr(np, name) for name in FUNCTIONS} | {
    "power": np.power,
    "divide": np.divide,
}


def truth(name: str, *arguments: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return WIDE[name](*(argument.astype(np.float64) for argument in arguments))


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The distance in units of the last fp32 place of the true value."""
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
        return np.abs(got.astype(np.float64) - want) / unit


BOUNDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": lambda x: 2 + 1.25 * np.abs(x),
    "log": lambda x: np.where(np.abs(x - 1) < 0.5, np.inf, 4.0),
    "log1p": lambda x: np.full_like(x, 10.0),
    "expm1": lambda x: np.where(np.abs(x) <= 1, 8.0, 3 + 1.25 * np.abs(x)),
    "tanh": lambda x: np.full_like(x, 8.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fast_function_keeps_its_stated_bound(name: str) -> None:
    x = DOMAINS[name]
    error = ulps(on_device(name, x), truth(name, x))
    worst = int(np.argmax(error / BOUNDS[name](x.astype(np.float64))))
    assert (error <= BOUNDS[name](x.astype(np.float64))).all(), (x[worst], error[worst])


@pytest.mark.parametrize(("name", "bound"), [("log1p", 3.0), ("expm1", 3.0)])
def test_series_near_zero_are_as_good_as_their_arithmetic(name: str, bound: float) -> None:
    """Within |x| < 0.5 no function of the hardware takes part, so that this holds everywhere."""
    x = np.concatenate([numbers(1e-30, 0.4999), np.array([0.49999997, -0.49999997, 1e-45, 0.0], np.float32)])
    error = ulps(on_device(name, x), truth(name, x))
    assert error.max() <= bound


def test_the_fast_logarithm_near_one_is_bounded_absolutely() -> None:
    x = (1 + numbers(1e-7, 0.5)).astype(np.float32)
    assert (np.abs(on_device("log", x) - truth("log", x)) <= 2.0**-22).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_exact_function_is_the_true_value_rounded_once(name: str) -> None:
    x = DOMAINS[name]
    assert ulps(on_device(f"{name}_exact", x), truth(name, x)).max() <= 0.51


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_is_the_true_value_rounded_once(name: str) -> None:
    x = DOMAINS[name]
    got = getattr(reference_math, name)(torch.from_numpy(x)).numpy()
    assert ulps(got, truth(name, x)).max() <= 0.51


def powers() -> tuple[np.ndarray, np.ndarray]:
    """Bases and exponents whose power is a normal fp32 number."""
    base, exponent = np.abs(numbers(1e-30, 1e30)), numbers(1e-3, 20)
    size = np.abs(exponent * np.log2(base))
    return base[size < 120], exponent[size < 120]


def test_powers() -> None:
    base, exponent = powers()
    want = truth("power", base, exponent)
    bound = 4 + np.abs(exponent) * (2 + np.abs(np.log2(base.astype(np.float64))))
    assert (ulps(on_device("power", base, exponent), want) <= bound).all()
    assert ulps(on_device("power_exact", base, exponent), want).max() <= 0.51
    reference = reference_math.power(torch.from_numpy(base), torch.from_numpy(exponent)).numpy()
    assert ulps(reference, want).max() <= 0.51


def test_fast_quotients() -> None:
    above, below = numbers(1e-10, 1e10), numbers(2.0**-20, 2.0**20)[::-1].copy()
    assert ulps(on_device("divide", above, below), truth("divide", above, below)).max() <= 2
    far = numbers(2.0**-126, 2.0**126)
    assert ulps(on_device("divide", far, far), np.ones(len(far))).max() <= 2


@pytest.mark.parametrize("divisor", [0.0, -0.0, np.inf, np.nan])
def test_fast_quotients_of_special_numbers(divisor: float) -> None:
    below = np.full_like(SPECIAL, divisor)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(on_device("divide", SPECIAL, below), SPECIAL / below)


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, np.inf, -np.inf, np.nan, 1e30, -1e30], np.float32
)


@pytest.mark.parametrize("suffix", ["", "_exact"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_arguments(name: str, suffix: str) -> None:
    with np.errstate(all="ignore"):
        want = truth(name, SPECIAL).astype(np.float32)
    got = on_device(name + suffix, SPECIAL)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])
    np.testing.assert_array_equal(got[want == 0], want[want == 0])
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=2e-6)


@pytest.mark.parametrize("name", ["power", "power_exact"])
def test_special_powers_are_those_of_torch(name: str) -> None:
    base, exponent = (side.ravel() for side in np.meshgrid(SPECIAL, SPECIAL))
    want = torch.pow(torch.from_numpy(base).double(), torch.from_numpy(exponent).double()).float().numpy()
    got = on_device(name, base, exponent)
    exact = ~np.isfinite(want) | (want == 0)
    np.testing.assert_array_equal(got[exact], want[exact])
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))
    np.testing.assert_allclose(got[~exact], want[~exact], rtol=1e-5)


@pytest.mark.parametrize(("name", "torch_name"), [("minimum", "minimum"), ("maximum", "maximum")])
def test_minimum_and_maximum_propagate_nan(name: str, torch_name: str) -> None:
    a, b = (side.ravel() for side in np.meshgrid(SPECIAL, SPECIAL))
    want = getattr(torch, torch_name)(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    got = on_device(name, a, b)
    np.testing.assert_array_equal(got, want)
    assert not np.signbit(got[got == 0]).any()
    reference = getattr(reference_math, name)(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_array_equal(reference, want)
    assert not np.signbit(reference[reference == 0]).any()


def test_sign_and_isfinite_are_those_of_torch() -> None:
    x = torch.from_numpy(SPECIAL)
    np.testing.assert_array_equal(on_device("sign", SPECIAL), torch.sign(x).nan_to_num().numpy())
    assert torch.sign(torch.tensor(float("nan"))) == 0
    np.testing.assert_array_equal(on_device("isfinite", SPECIAL) != 0, torch.isfinite(x).numpy())
