"""The kernel for Hopper is compared with the reference before its first use, and left alone if it is wrong."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import optim, testing
from forge_dsl.runtime import gradient_bits, hopper, launch, trust
from forge_dsl.runtime.storage import Storage, plain
from tests.dispatch import linear_step

BF16, FP32 = torch.bfloat16, torch.float32
RULE = optim.AdamW.rule
SWITCHES = testing.cases(RULE)[0].switches
NAMES = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]
Kernel = Callable[..., None]


class FakeLaunch:
    """A launch by its compile-time parameters alone."""

    def __init__(self, **changes: Any) -> None:
        self.constants = {"even": True, "alike": True, "vectors": True, "gradient_bits": 24, **changes}


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small tiles, since kernels run in the interpreter here.
    monkeypatch.setattr(hopper, "TILE_O", 16)
    monkeypatch.setattr(hopper, "TILE_I", 32)
    monkeypatch.setattr(trust, "_KINDS", {})
    monkeypatch.setattr(trust, "_HELD", weakref.WeakSet())


def portable(
    rule: Any, x: Tensor, dy: Tensor, problem: Any, table: Tensor, switches: Any, constants: Any, kept: Storage
) -> None:
    """A right kernel: here the portable one in fast arithmetic, in the interpreter."""
    launch.linear_step_portable(rule, x, dy, problem.weight, problem.states, table, switches, False, kept)


def instead(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> list[tuple[Any, ...]]:
    """Have `kernel` in the place of the one for Hopper; what it was called with."""
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> None:
        calls.append(arguments)
        kernel(*arguments)

    monkeypatch.setattr(trust, "_launch", run)
    return calls


def ask(
    found: Any,
    rule: Any = RULE,
    switches: Sequence[bool] = SWITCHES,
    dtype: torch.dtype = BF16,
    kept: Storage | None = None,
) -> bool:
    x = torch.zeros(16, 64, dtype=BF16, device=testing.device())
    weight = torch.zeros(64, 64, dtype=dtype, device=testing.device())
    states = [weight if there else None for there in rule.present(*switches)]
    return trust.holds(found, rule, x, weight, states, switches, kept)


def test_a_right_kernel_is_checked_once_for_each_kind_and_not_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, portable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = [FakeLaunch(), FakeLaunch()]
        assert all(ask(found) for found in same for _ in range(3)) and len(calls) == 1
        assert ask(FakeLaunch(even=False)) and len(calls) == 2
        assert ask(same[0], dtype=FP32) and ask(FakeLaunch(), dtype=FP32) and len(calls) == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("even", [True, False])
def test_a_right_kernel_of_every_optimizer_passes(name: str, even: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel computes from its own rounding of the gradient; none of these differences is one of results."""
    calls = instead(monkeypatch, portable)
    rule = getattr(optim, name).rule
    cases = testing.cases(rule)
    for case in (cases[0], cases[-1]):
        assert ask(FakeLaunch(even=even, alike=even, switches=case.switches), rule, case.switches)
    assert len(calls) == len({case.switches for case in (cases[0], cases[-1])})


def test_rounding_by_chance_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, portable)
    kept = Storage(plain(3).formats, (True, True, True, False), plain(3).extras)
    assert ask(FakeLaunch(draws=kept.draws), kept=kept) and len(calls) == 1
    assert calls[0][-1].draws == kept.draws


def last_column(rule: Any, x: Tensor, dy: Tensor, problem: Any, *rest: Any) -> None:
    before = problem.weight[:, -1].clone()
    portable(rule, x, dy, problem, *rest)
    problem.weight[:, -1] = before


def nothing(*_: Any) -> None:
    return


def a_nan(rule: Any, x: Tensor, dy: Tensor, problem: Any, *rest: Any) -> None:
    portable(rule, x, dy, problem, *rest)
    problem.states[1][3, 5] = torch.nan


def an_infinity(rule: Any, x: Tensor, dy: Tensor, problem: Any, *rest: Any) -> None:
    portable(rule, x, dy, problem, *rest)
    problem.weight[:, -1] = torch.inf


def a_shifted_gradient(rule: Any, x: Tensor, dy: Tensor, *rest: Any) -> None:
    portable(rule, x, dy.roll(8, 1), *rest)


def one_tile_twice(rule: Any, x: Tensor, dy: Tensor, problem: Any, *rest: Any) -> None:
    portable(rule, x, dy, problem, *rest)
    problem.states[0][: hopper.TILE_O, : hopper.TILE_I] *= 1.02


def fewer_bits(rule: Any, x: Tensor, dy: Tensor, problem: Any, table: Tensor, switches: Any, *_: Any) -> None:
    """The gradient in bf16, where all of it is asked for."""
    state = {name: tensor.float() for name, tensor in problem.tensors(rule) if name != "weight"}
    grad = gradient_bits.handed_over((dy.float().T @ x.float()).cpu(), 16)
    weight, new = rule.reference(problem.weight.float().cpu(), grad, state, table.cpu(), *switches)
    for name, tensor in problem.tensors(rule):
        tensor.copy_(weight if name == "weight" else new[name])


def other_codes(rule: Any, x: Tensor, dy: Tensor, problem: Any, *rest: Any) -> None:
    """Two codes further in one tile."""
    portable(rule, x, dy, problem, *rest)
    for tensor in (problem.weight, *problem.states):
        if tensor is not None and tensor.dtype == torch.uint8:
            tensor[: hopper.TILE_O, : hopper.TILE_I].add_(2)


def other_scales(
    rule: Any, x: Tensor, dy: Tensor, problem: Any, table: Tensor, switches: Any, constants: Any, kept: Any
):
    portable(rule, x, dy, problem, table, switches, constants, kept)
    for extra in kept.extras:
        if extra is not None and extra.dtype == torch.uint8:
            extra[0, : hopper.TILE_O].add_(1)


def other_low_bits(
    rule: Any, x: Tensor, dy: Tensor, problem: Any, table: Tensor, switches: Any, constants: Any, kept: Any
) -> None:
    portable(rule, x, dy, problem, table, switches, constants, kept)
    low = kept.extras[0]
    low[: hopper.TILE_O].bitwise_xor_(1 << 8 * low.element_size() - 2)


def approximate(
    rule: Any, x: Tensor, dy: Tensor, problem: Any, table: Tensor, switches: Any, constants: Any, kept: Any
) -> None:
    """A right kernel whose roots and quotients are off by some 2 ulp, and that rounds as chance will have it."""
    generator = torch.Generator().manual_seed(3)
    formats = trust._formats(rule, (problem.weight, *problem.states), kept)
    extras = dict(zip(trust._names(rule), kept.extras, strict=True))
    held = {name: formats[name].decode(tensor, extras[name]) for name, tensor in problem.tensors(rule)}
    grad = (dy.float().T @ x.float()).cpu()
    weight, new = rule.reference(held.pop("weight"), grad, held, table.cpu(), *switches)
    for name, tensor in problem.tensors(rule):
        value = {"weight": weight, **new}[name]
        value = value * (1 + 3e-7 * torch.randn(value.shape, generator=generator))
        chance = torch.randint(0, 65536, value.shape, generator=generator)
        codes, extra = formats[name].encode(value, chance)
        tensor.copy_(codes)
        if extra is not None:
            extras[name].copy_(extra)


def raises(*_: Any) -> None:
    raise AttributeError("module 'gluon' has no attribute 'warp_specialize'")


@pytest.mark.parametrize(
    "kernel", [last_column, nothing, a_nan, an_infinity, a_shifted_gradient, one_tile_twice, raises]
)
def test_a_wrong_kernel_is_not_used_and_one_warning_says_so(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, kernel)
    reason = "raised AttributeError: module 'gluon'" if kernel is raises else "differ from the reference"
    with pytest.warns(RuntimeWarning, match=f"AdamW, the portable one is: .*{reason}") as caught:
        assert not any(ask(found) for found in (FakeLaunch(), FakeLaunch()) for _ in range(2))
    assert len(caught) == 1 and len(calls) == 1


def coded(name: str, weight: str, state: str, draws: bool) -> tuple[Any, tuple[bool, ...], Storage]:
    """A rule, its switches, and how its tensors are kept."""
    rule = getattr(optim, name).rule
    switches = testing.cases(rule)[-1].switches
    present = rule.present(*switches)
    formats = (weight, *(state if there else "plain" for there in present))
    return rule, switches, Storage(formats, (draws, *(draws and there for there in present)), (None,) * len(formats))


def ask_coded(name: str, weight: str, state: str, draws: bool, tokens: int = 16) -> bool:
    rule, switches, kept = coded(name, weight, state, draws)
    where = testing.device()
    x = torch.zeros(tokens, 64, dtype=BF16, device=where)
    memory = torch.zeros(64, 64, dtype=torch.uint8 if weight == "fp8" else BF16, device=where)
    codes = torch.zeros(64, 64, dtype=torch.uint8 if state != "plain" else BF16, device=where)
    states = [codes if there else None for there in rule.present(*switches)]
    found = FakeLaunch(formats=kept.formats, draws=kept.draws)
    return trust.holds(found, rule, x, memory, states, switches, kept)


KEPT = [("plain", "int8"), ("plain", "fp8"), ("fp8", "plain"), ("fp8", "int8"), ("bf16+8", "fp8"), ("bf16+16", "plain")]


@pytest.mark.parametrize(
    ("kernel", "name"), [*((approximate, name) for name in NAMES), (portable, "AdamW"), (portable, "SGD")]
)
@pytest.mark.parametrize(("weight", "state"), KEPT)
def test_a_right_kernel_passes_in_every_format(
    kernel: Kernel, name: str, weight: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = instead(monkeypatch, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert all(ask_coded(name, weight, state, draws) for draws in (True, False)) and len(calls) >= 1


@pytest.mark.parametrize(("weight", "state"), KEPT)
def test_a_right_kernel_of_many_tokens_passes_in_every_format(
    weight: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose plan is another, and whose sums are larger."""
    instead(monkeypatch, approximate)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert ask_coded("AdamW", weight, state, True, tokens=4096)


@pytest.mark.parametrize(("weight", "state"), KEPT)
def test_the_default_device_is_not_asked(weight: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, approximate)
    rule, switches, kept = coded("AdamW", weight, state, True)
    memory = torch.zeros(64, 64, dtype=torch.uint8 if weight == "fp8" else BF16)
    codes = torch.zeros(64, 64, dtype=torch.uint8 if state != "plain" else BF16)
    states = [codes if there else None for there in rule.present(*switches)]
    constants = FakeLaunch().constants
    x = torch.zeros(16, 64, dtype=BF16)
    with torch.device("meta"):
        assert trust.disagreement(rule, x, memory, states, switches, constants, kept) is None


@pytest.mark.parametrize(
    ("kernel", "weight", "state"),
    [
        *((kernel, *formats) for kernel in (nothing, a_shifted_gradient) for formats in KEPT),
        *((kernel, *formats) for kernel in (other_codes, other_scales) for formats in KEPT[:5]),
        *((other_low_bits, *formats) for formats in KEPT[4:]),
    ],
)
def test_a_wrong_kernel_is_found_in_every_format(
    kernel: Kernel, weight: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, kernel)
    with pytest.warns(RuntimeWarning, match="differ from the reference"):
        assert not ask_coded("AdamW", weight, state, True)


def test_the_reference_takes_the_gradient_with_the_bits_that_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hand-over with 16 bits may do is a disagreement of one with more."""
    # Whole numbers that need more than eight bits.
    monkeypatch.setattr(trust, "_integers", lambda shape, seed: 40.0 + seed + torch.zeros(shape))
    instead(monkeypatch, fewer_bits)
    assert ask(FakeLaunch(gradient_bits=16), dtype=FP32)
    for bits in (20, 24, 32):
        with pytest.warns(RuntimeWarning, match="differ from the reference"):
            assert not ask(FakeLaunch(gradient_bits=bits), dtype=FP32)


@pytest.mark.parametrize("spilled", [0, 3])
def test_exact_arithmetic_that_spills_gives_way_without_a_word(spilled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []

    class Launched:
        def __init__(self, *arguments: Any) -> None:
            self.arguments, self.spilled = arguments, spilled
            seen.append(arguments[6:8])

        def __call__(self, x: Tensor, dy: Tensor, weight: Tensor, states: Any, table: Tensor, kept: Storage) -> None:
            rule, switches = self.arguments[0], self.arguments[5]
            launch.linear_step_portable(rule, x, dy, weight, states, table, switches, False, kept)

    monkeypatch.setattr(hopper, "Launch", Launched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(FakeLaunch(exact=True, gradient_bits=32)) == (not spilled)
        # In fast arithmetic it stays: what is faster was measured there.
        assert ask(FakeLaunch(exact=False))
    assert seen == [(True, 32), (False, 24)]


def test_the_arguments_of_the_caller_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, portable)
    where = testing.device()
    x, weight = torch.randn(16, 64).to(where, BF16), torch.randn(64, 64).to(where, BF16)
    states = [torch.rand(64, 64).to(where, BF16), torch.rand(64, 64).to(where, BF16), None]
    kept = [tensor.clone() for tensor in (x, weight, *states[:2])]
    generator = torch.get_rng_state()
    assert trust.holds(FakeLaunch(), RULE, x, weight, states, SWITCHES)
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, weight, *states[:2]), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    problem = calls[0][3]
    assert problem.weight.data_ptr() != weight.data_ptr() and problem.weight.shape == (64, 64)


def test_the_check_has_borders_and_strides_as_the_launch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, portable)
    ask(FakeLaunch(even=False, alike=False))
    problem = calls[0][3]
    rows, columns = problem.weight.shape
    assert rows % hopper.TILE_O and columns % hopper.TILE_I and columns % 8 == 0
    assert problem.weight.stride(0) != problem.states[0].stride(0)
    # Every program has more than one tile, so that tiles overlap as they do in a large weight.
    assert -(-rows // hopper.TILE_O) * -(-columns // hopper.TILE_I) >= 4


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = instead(monkeypatch, nothing)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=BF16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found = FakeLaunch()
    assert trust.holds(found, RULE, on_gpu, on_gpu, [on_gpu, on_gpu, None], SWITCHES) and not calls
    # And it is made up for at the next launch outside a capture.
    with pytest.warns(RuntimeWarning, match="not used"):
        assert not ask(found)


def test_launches_that_are_forgotten_are_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, portable)
    found = FakeLaunch()
    assert ask(found)
    alive = weakref.ref(found)
    del found
    assert alive() is None


def test_a_wrong_kernel_makes_the_optimizer_take_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end on the CPU: the launcher's own route, with a kernel for Hopper that is found and wrong."""
    instead(monkeypatch, nothing)

    class Wrong(FakeLaunch):
        def __call__(self, *_: Any) -> None:
            raise AssertionError("launched although it was found wrong")

    monkeypatch.setattr(hopper, "find", lambda *_: Wrong())
    case = testing.cases(RULE)[0]
    ours = testing.make_problem(RULE, case, (24, 40), FP32, FP32, 0)
    truth = ours.clone()
    x, dy = testing.integers((8, 40), 1, FP32), testing.integers((8, 24), 2, FP32)
    table = testing.next_table(RULE, case, ours)
    with pytest.warns(RuntimeWarning, match="not used"):
        linear_step(RULE, x, dy, ours.weight, ours.states, table, case.switches, False)
    launch.linear_step_portable(RULE, x, dy, truth.weight, truth.states, table, case.switches, False)
    testing.assert_same_bits(ours.weight, truth.weight, "weight")


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_numbers_of_which_none_is_finite_are_compared_too(value: float) -> None:
    want = torch.full((4, 64), value)
    assert trust.beyond_rounding(want, torch.ones(4, 64)) == 1.0
    assert trust.beyond_rounding(want, want) == 0.0 and trust.beyond_rounding(torch.zeros(4, 64), want) == 1.0
    form = trust.registry.of_state("int8", True)
    got = form.decode(*form.encode(want))
    assert trust._beyond_neighbours(got, want, form) == 0.0
    assert trust._beyond_neighbours(torch.zeros(4, 64), want, form) == 1.0
