"""The kernel for Hopper: bit for bit on integer data at every border, bounded on random data, the same in every run.

Compiling takes most of the time, so several processes side by side are best, each with a part (`-k adamw`). A kernel
that hangs ends its process with a traceback after two minutes.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import optim, testing
from forge_dsl.runtime import gluon_support, gradient_bits, hopper, launch, trust
from forge_dsl.runtime.binding import lookup
from forge_dsl.runtime.device_hopper_formats import ROOT as ROOT_TEXT
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import Storage, plain
from forge_dsl.runtime.triton_support import AVAILABLE, tl, triton
from forge_dsl.testing import Case
from tests.dispatch import linear_step
from tests.gpu import hopper_only, kept
from tests.gpu.hopper_only import KEPT_SHAPES, check_one_step, hopper_step

pytestmark = [*hopper_only.MARKS, pytest.mark.usefixtures("no_test_hangs")]

OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIDES = [1, 17, 127, 128, 129, 255, 256, 257, 1000]
TOKENS = [1, 15, 16, 63, 64, 65, 100, 1000]
ADAMW = importlib.import_module("generated.adamw").RULE
ROOT = tl.constexpr(ROOT_TEXT) if AVAILABLE else ROOT_TEXT
SGD = importlib.import_module("generated.sgd").RULE


def rule_of(stem: str) -> Rule:
    return importlib.import_module(f"generated.{stem}").RULE


def test_gluon_is_as_expected() -> None:
    assert gluon_support.AVAILABLE, gluon_support.REASON


@pytest.mark.parametrize("rows", SIDES)
def test_every_border_equals_the_reference_bit_for_bit(rows: int) -> None:
    for columns in SIDES:
        for tokens in TOKENS:
            check_one_step(ADAMW, testing.cases(ADAMW)[0], (tokens, rows, columns), BF16, FP32)


# Sums of so many products of small whole numbers pass whatever the hand-over keeps.
TOKENS_OF = {16: [1, 15], 20: [1, 64, 100], 32: [1, 64, 100, 1000]}


@pytest.mark.parametrize("bits", TOKENS_OF)
@pytest.mark.parametrize(("weight", "state"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
def test_every_hand_over_equals_the_reference_at_borders(bits: int, weight: torch.dtype, state: torch.dtype) -> None:
    for rows in (1, 17, 128, 129, 256, 1000):
        for columns in (1, 63, 64, 128, 192, 256, 257, 1000):
            for tokens in TOKENS_OF[bits]:
                check_one_step(ADAMW, testing.cases(ADAMW)[0], (tokens, rows, columns), weight, state, bits)


@pytest.mark.parametrize("stem", OPTIMIZERS)
@pytest.mark.parametrize("state", [BF16, FP32], ids=str)
def test_exact_arithmetic_equals_the_reference_with_all_bits(stem: str, state: torch.dtype) -> None:
    """By the launcher, which takes this kernel but where it spills; several tiles for each program."""
    rule = rule_of(stem)
    case, shape = testing.cases(rule)[0], (4096, 2304)
    start = testing.make_problem(rule, case, shape, BF16, state, 0)
    x, dy = testing.integers((300, shape[1]), 1, BF16), testing.integers((300, shape[0]), 2, BF16)
    table = testing.next_table(rule, case, start)
    truth = start.clone()
    testing.reference_step(rule, case, truth, (dy.double().T @ x.double()).float(), table)
    found = hopper.find(rule, x, dy, start.weight, start.states, case.switches, exact=True, gradient_bits=16)
    assert found is not None and found.constants["gradient_bits"] == 32 and found.constants["exact"]
    taken = trust.holds(found, rule, x, start.weight, start.states, case.switches)
    assert taken == (not found_to_spill(found, rule, x, dy, start.clone(), table))
    # Of what comes with the project only this one is a few registers short.
    assert taken or (stem, state) == ("nadam", FP32)
    linear_step(rule, x, dy, start.weight, start.states, table, case.switches, True, gradient_bits=16)
    for (name, got), (_, want) in zip(start.tensors(rule), truth.tensors(rule), strict=True):
        testing.assert_same_bits(got, want, f"{stem}: {name}")


def found_to_spill(
    found: hopper.Launch, rule: Rule, x: Tensor, dy: Tensor, problem: testing.Problem, table: Tensor
) -> bool:
    found(x, dy, problem.weight, problem.states, table, plain(len(problem.states)))
    return found.spilled > 0


@pytest.mark.parametrize("stem", OPTIMIZERS)
def test_every_optimizer_equals_the_reference_bit_for_bit(stem: str) -> None:
    """Few and many slices a program, whole tiles and borders, default flags and all of them."""
    rule = rule_of(stem)
    first, last = testing.cases(rule)[0], testing.cases(rule)[-1]
    for case in (first, last) if first != last else (first,):
        testing.assert_bitwise(rule, case, "hopper", (300, 3000, 5000), BF16, BF16, BF16, steps=2)
        testing.assert_bitwise(rule, case, "hopper", (33, 136, 264), BF16, BF16, BF16)
    testing.assert_bitwise(rule, first, "hopper", (2048, 2048, 2304), BF16, BF16, BF16, steps=2)


@pytest.mark.parametrize("stem", OPTIMIZERS)
def test_every_optimizer_stays_near_float64_in_fast_arithmetic(stem: str) -> None:
    jumps = testing.Bound(flips=0.02) if stem == "lion" else None
    case = testing.cases(rule_of(stem))[-1]
    testing.assert_near_float64(rule_of(stem), case, "hopper", (24, 136, 520), FP32, FP32, bound=jumps)


@pytest.mark.parametrize(("weight", "state"), [(FP32, FP32), (FP32, BF16), (FP16, FP16), (FP16, FP32)], ids=str)
def test_types_equal_the_reference_bit_for_bit(weight: torch.dtype, state: torch.dtype) -> None:
    case = testing.cases(ADAMW)[-1]
    testing.assert_bitwise(ADAMW, case, "hopper", (65, 304, 520), FP16, weight, state)


def gradient(x: Tensor, dy: Tensor, bits: int = 24) -> Tensor:
    """`dY^T X` as the kernel hands it over: plain descent with step 1 from a weight of zero, in exact arithmetic."""
    case = Case({"lr": 1.0, "weight_decay": 0.0}, dict.fromkeys(SGD.spec.flag_names, False), (False,))
    problem = testing.Problem(torch.zeros(dy.shape[1], x.shape[1], device="cuda"), [], {"_updates": 0.0})
    table = testing.next_table(SGD, case, problem)
    hopper.linear_step_hopper(SGD, x, dy, problem.weight, [], table, case.switches, True, bits)
    return 0.0 - problem.weight


# Of 20 and 24 bits the error is that of the hand-over and that of the accumulation, of 32 the latter alone.
@pytest.mark.parametrize(("bits", "bound"), [(32, 1.2e-5), (24, 1.2e-5), (20, 1.5e-4), (16, 2e-3)])
def test_the_gradient_keeps_the_accuracy_of_its_accumulation(bits: int, bound: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for tokens in (512, 2048, 8192):
        x = torch.randn(tokens, 4096, device="cuda", dtype=BF16, generator=generator)
        dy = torch.randn(tokens, 2048, device="cuda", dtype=BF16, generator=generator) * 0.1
        want = dy.double().T @ x.double()
        error = ((gradient(x, dy, bits).double() - want).norm() / want.norm()).item()
        assert error <= bound, f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("bits", gradient_bits.CHOICES)
def test_fewer_bits_are_all_bits_rounded_once(bits: int) -> None:
    """The main loop adds the same products in the same order, 16 tokens at a time, however many a stage has."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2000, 520, device="cuda", dtype=BF16, generator=generator)
    dy = torch.randn(2000, 304, device="cuda", dtype=BF16, generator=generator) * 0.1
    want = gradient_bits.handed_over(gradient(x, dy, 32), bits)
    testing.assert_same_bits(gradient(x, dy, bits), want, f"{bits} bits")


@pytest.mark.parametrize("bits", gradient_bits.CHOICES)
def test_single_products_pass_unchanged(bits: int) -> None:
    """Infinities, NaN, zeros, the smallest and the largest numbers of bf16."""
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 3.3e38, -3.3e38, 2.0**-126, 1e-30])
    values = torch.cat([special, torch.randn(117)]).bfloat16().cuda()
    dy = values[None, :].contiguous()
    got = gradient(torch.ones(1, 264, device="cuda", dtype=BF16), dy, bits)
    testing.assert_same_bits(got, (0.0 + values.float())[:, None].expand(-1, 264), "products with one")


@pytest.mark.parametrize("shape", [(2048, 4096, 4096), (1000, 4104, 4088)], ids=str)
def test_two_runs_agree_bit_for_bit(shape: tuple[int, int, int]) -> None:
    tokens, rows, columns = shape
    case = testing.cases(ADAMW)[0]
    x, dy = (torch.randn(tokens, side, device="cuda", dtype=BF16) for side in (columns, rows))
    start = testing.make_problem(ADAMW, case, (rows, columns), BF16, BF16, 0)
    table = testing.next_table(ADAMW, case, start)
    runs = [start.clone() for _ in range(4)]
    for run in runs:
        hopper.linear_step_hopper(ADAMW, x, dy, run.weight, run.states, table, case.switches)
    for run in runs[1:]:
        for (name, a), (_, b) in zip(runs[0].tensors(ADAMW), run.tensors(ADAMW), strict=True):
            testing.assert_same_bits(a, b, name)


def test_the_launcher_takes_it_where_it_suits_and_agrees_with_the_portable_kernel() -> None:
    case = testing.cases(ADAMW)[0]
    x, dy = (torch.randn(512, side, device="cuda", dtype=BF16) for side in (2048, 2304))
    ours = testing.make_problem(ADAMW, case, (2304, 2048), FP32, FP32, 0)
    portable = ours.clone()
    table = testing.next_table(ADAMW, case, ours)
    assert hopper.find(ADAMW, x, dy, ours.weight, ours.states, case.switches) is not None
    odd = x[:, :2047], dy, ours.weight[:, :2047], [None if s is None else s[:, :2047] for s in ours.states]
    assert hopper.find(ADAMW, x[1:, 1:], dy[1:], ours.weight[:, 1:], ours.states, case.switches) is None
    assert hopper.suits(ADAMW, *odd) is None and hopper.find(ADAMW, *odd, case.switches) is None
    assert hopper.find(ADAMW, x.float(), dy.float(), ours.weight, ours.states, case.switches) is None
    linear_step(ADAMW, x, dy, ours.weight, ours.states, table, case.switches, False)
    launch.linear_step_portable(ADAMW, x, dy, portable.weight, portable.states, table, case.switches, False)
    for (name, a), (_, b) in zip(ours.tensors(ADAMW), portable.tensors(ADAMW), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_a_captured_step_is_the_eager_one() -> None:
    case = testing.cases(ADAMW)[0]
    x, dy = (testing.integers((128, side), side, BF16) for side in (2048, 2304))
    start = testing.make_problem(ADAMW, case, (2304, 2048), BF16, BF16, 0)
    table = testing.next_table(ADAMW, case, start)
    eager, captured = start.clone(), start.clone()

    def step(problem: testing.Problem) -> None:
        hopper.linear_step_hopper(ADAMW, x, dy, problem.weight, problem.states, table, case.switches)

    for _ in range(3):
        step(eager)
    step(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    # Descriptors are in the graph and not in memory that a later launch could overwrite.
    step(start)
    graph.replay()
    graph.replay()
    for (name, a), (_, b) in zip(eager.tensors(ADAMW), captured.tensors(ADAMW), strict=True):
        testing.assert_same_bits(b, a, name)


def test_offsets_beyond_2_to_the_31_elements() -> None:
    case = testing.cases(SGD)[0]
    rows, columns, tokens = 65_536 + 8, 32_768, 16
    x, dy = testing.integers((tokens, columns), 1, BF16), testing.integers((tokens, rows), 2, BF16)
    weight = torch.full((rows, columns), 0.5, device="cuda", dtype=BF16)
    table = testing.next_table(SGD, case, testing.make_problem(SGD, case, (1, 1), FP32, FP32, 0))
    hopper.linear_step_hopper(SGD, x, dy, weight, [], table, case.switches, True)
    for start in (0, 65_528, rows - 8):
        block = slice(start, start + 8)
        old = torch.full((8, columns), 0.5, device="cuda")
        want, _ = SGD.reference(old, dy[:, block].float().T @ x.float(), {}, table, *case.switches)
        testing.assert_same_bits(weight[block], want.bfloat16(), f"rows from {start}")


def test_what_it_cannot_take_raises_before_anything_changes() -> None:
    case = testing.cases(ADAMW)[0]
    problem = testing.make_problem(ADAMW, case, (64, 64), BF16, BF16, 0)
    before = problem.clone()
    table = testing.next_table(ADAMW, case, problem)
    x = testing.integers((16, 64), 1, FP32)
    with pytest.raises(ValueError, match="float32"):
        hopper.linear_step_hopper(ADAMW, x, x, problem.weight, problem.states, table, case.switches)
    for (name, a), (_, b) in zip(problem.tensors(ADAMW), before.tensors(ADAMW), strict=True):
        testing.assert_same_bits(a, b, name)


@pytest.mark.parametrize("stem", OPTIMIZERS)
def test_stochastic_rounding_has_the_bits_of_the_reference(stem: str) -> None:
    rule = rule_of(stem)
    first, last = testing.cases(rule)[0], testing.cases(rule)[-1]
    for shape in KEPT_SHAPES:
        for case in (first, last) if first != last else (first,):
            kept.assert_bitwise(rule, case, hopper_step, shape)
        kept.assert_bitwise(rule, first, hopper_step, shape, state="fp32", draws=None)


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("stem", [stem for stem in OPTIMIZERS if stem != "sgd"])
def test_blocks_of_8_bits_have_the_bits_of_the_reference(stem: str, form: str) -> None:
    rule = rule_of(stem)
    first, last = testing.cases(rule)[0], testing.cases(rule)[-1]
    for shape in KEPT_SHAPES:
        for case in (first, last) if first != last else (first,):
            kept.assert_bitwise(rule, case, hopper_step, shape, state=form)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_blocks_rounded_to_nearest_have_the_bits_of_the_reference(form: str) -> None:
    for draws in (False, None):
        kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[-1], hopper_step, KEPT_SHAPES[0], state=form, draws=draws)


@pytest.mark.parametrize("weight", ["fp16", "bf16+8", "bf16+16"])
def test_rounding_of_other_weights_has_the_bits_of_the_reference(weight: str) -> None:
    for state in ("fp16", "int8"):
        kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, KEPT_SHAPES[0], weight=weight, state=state)


@pytest.mark.parametrize("stem", OPTIMIZERS)
def test_weights_in_fp8_have_the_bits_of_the_reference(stem: str) -> None:
    rule = rule_of(stem)
    for state in ("bf16", "int8", "fp8", "fp32") if stem != "sgd" else ("bf16",):
        for shape in KEPT_SHAPES:
            kept.assert_bitwise(rule, testing.cases(rule)[-1], hopper_step, shape, weight="fp8", state=state)
        for draws in (False, None):
            how = {"weight": "fp8", "state": state, "draws": draws}
            kept.assert_bitwise(rule, testing.cases(rule)[0], hopper_step, KEPT_SHAPES[0], **how)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_weights_in_fp8_at_every_border(state: str) -> None:
    for rows in (1, 17, 128, 129, 256):
        for columns in (4, 8, 24, 60, 64, 72, 128, 256, 264, 1000):
            shape = 63, rows, columns
            kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, shape, 1, weight="fp8", state=state)


@pytest.mark.parametrize("state", ["bf16", "int8", "fp8"])
def test_rounding_and_blocks_at_every_border(state: str) -> None:
    for rows in (1, 17, 128, 129, 256):
        # Rows of codes end with a whole word of four.
        for columns in (
            (1, 8, 24, 63, 64, 72, 127, 256, 264, 1000) if state == "bf16" else (4, 8, 24, 64, 72, 256, 1000)
        ):
            for tokens in (1, 63, 100):
                shape = tokens, rows, columns
                kept.assert_bitwise(ADAMW, testing.cases(ADAMW)[0], hopper_step, shape, steps=1, state=state)


def test_the_root_of_the_root_of_the_largest_is_no_more_than_255() -> None:
    """As the processor approximates roots. Otherwise a draw could make it 256, of which a byte keeps 0."""
    count, top = 2**24, 0x4F7C05FC
    found = torch.empty(count, device="cuda")
    double_root[(count // 1024,)](found, top + 1 - count, 1024)
    assert found.max() == 255.0
    fourth_powers = torch.arange(256, device="cuda", dtype=torch.float64).pow(4).float()
    for k, power in enumerate(fourth_powers.view(torch.int32).tolist()):
        double_root[(1,)](found, power, 1024)
        assert abs(found[0].item() - k) <= 2**-16


@triton.jit
def double_root(found, first, COUNT: tl.constexpr):
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = (first + place).to(tl.float32, bitcast=True)
    for _ in tl.static_range(2):
        x = tl.inline_asm_elementwise(ROOT, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(found + place, x)


@pytest.mark.parametrize("state", ["bf16", "int8", "fp8"])
def test_rounding_and_blocks_in_fast_arithmetic_differ_in_few_decisions(state: str) -> None:
    """A result that is off by some units of fp32 moves few roundings, and by one code."""
    case, (tokens, rows, columns) = testing.cases(ADAMW)[0], (512, 2048, 2048)
    ours, truth = (kept.make(ADAMW, case, (rows, columns), state=state) for _ in range(2))
    problem = testing.make_problem(ADAMW, case, (1, 1), FP32, FP32, 0)
    table = kept.table_of(ADAMW, case, problem, 1)
    x, dy = testing.integers((tokens, columns), 1, BF16), testing.integers((tokens, rows), 2, BF16)
    hopper_step(ADAMW, x, dy, ours.weight, ours.states, table, case.switches, False, ours.storage)
    kept.reference_step(ADAMW, case, truth, x, dy, table)
    for (name, got), (_, want) in zip(ours.tensors(ADAMW), truth.tensors(ADAMW), strict=True):
        view = torch.uint8 if got.element_size() == 1 else torch.int16
        distance = (got.contiguous().view(view).int() - want.contiguous().view(view).int()).abs()
        # Near zero and where fp8 begins, a code may be a large step: there are few such coordinates.
        assert (distance > 1).float().mean() < 1e-5, f"{name}: {int((distance > 1).sum())} are codes apart"
        assert (distance > 0).float().mean() < 0.005, f"{name}: {(distance > 0).float().mean():.4f} differ"


def test_rounding_is_the_default_and_takes_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in bf16 as a user has them, and with 8-bit states; a second step takes the launch that was kept."""
    taken: list[Storage] = []
    launch_of = hopper.Launch.__call__

    def spy(self: hopper.Launch, *arguments: Any) -> None:
        _x, _dy, weight, _states, _table, kept_as, *_ = arguments
        # The check before the first use has a small weight of its own.
        if weight.shape == (2304, 2048):
            taken.append(kept_as)
        launch_of(self, *arguments)

    monkeypatch.setattr(hopper.Launch, "__call__", spy)
    for options in ({}, {"state_dtype": "int8"}, {"state_dtype": "fp8"}, {"extra_bits": 8}):
        layer = optim.AdamWLinear(2048, 2304, bias=False, device="cuda", dtype=BF16)
        optimizer = optim.AdamW(layer.parameters(), lr=1e-3, **options)
        before = layer.weight.detach().clone()
        for _ in range(2):
            layer(torch.randn(512, 2048, device="cuda", dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert layer.weight.isfinite().all() and not torch.equal(before, layer.weight)
        binding = lookup(layer.weight)
        assert binding is not None and binding.route is not None and binding.route.schedule == "hopper"
    # The second step repeats the launch that was kept, without this call where the release of Triton allows.
    assert len(taken) >= 4 and all(storage.draws[0] for storage in taken)


@pytest.mark.parametrize("bits", gradient_bits.CHOICES)
@pytest.mark.parametrize("arithmetic", ["fast", "exact"])
def test_the_optimizer_hands_over_what_it_was_asked_for(
    bits: int, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    launch_of = hopper.Launch.__call__

    def spy(self: hopper.Launch, *arguments: Any) -> None:
        taken.append(self.constants["gradient_bits"])
        launch_of(self, *arguments)

    monkeypatch.setattr(hopper.Launch, "__call__", spy)
    layer = optim.AdamWLinear(2048, 2304, bias=False, device="cuda", dtype=BF16)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, arithmetic=arithmetic, gradient_bits=bits)
    layer(torch.randn(512, 2048, device="cuda", dtype=BF16)).float().square().mean().backward()
    assert set(taken) == {32 if arithmetic == "exact" else optimizer.gradient_bits}
