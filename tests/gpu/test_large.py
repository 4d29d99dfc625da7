"""Real kernels at real sizes: bit for bit on integer data, in every type, past 2^31 elements."""

from __future__ import annotations

import importlib

import pytest
import torch

from forge_dsl import testing
from forge_dsl.runtime import launch
from tests.dispatch import linear_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
TYPES = [torch.float32, torch.bfloat16]
# Tokens, rows, columns: whole tiles, and one off in every direction.
SHAPES = [(2048, 4096, 4096), (1000, 4097, 4095), (8, 1024, 4096)]


@pytest.mark.parametrize("stem", OPTIMIZERS)
@pytest.mark.parametrize("weight", TYPES, ids=str)
@pytest.mark.parametrize("state", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["fused", "banded"])
def test_large_weights_equal_the_reference_bit_for_bit(stem, weight, state, shape, how):
    rule = importlib.import_module(f"generated.{stem}").RULE
    case = testing.cases(rule)[-1]
    testing.assert_bitwise(rule, case, how, shape, torch.bfloat16, weight, state, steps=2)


@pytest.mark.parametrize("operand", [torch.float16, torch.float32], ids=str)
def test_other_operand_types_equal_the_reference_bit_for_bit(operand):
    rule = importlib.import_module("generated.adamw").RULE
    for shape in SHAPES:
        testing.assert_bitwise(rule, testing.cases(rule)[0], "fused", shape, operand, steps=1)


@pytest.mark.parametrize("kernel", ["fused", "elementwise"])
def test_weights_of_2_to_the_31_elements_and_more_are_updated_to_the_last_one(kernel):
    rule = importlib.import_module("generated.sgd").RULE
    case = testing.cases(rule)[0]
    rows, columns, tokens = 65_536 + 8, 32_768, 16
    x = testing.integers((tokens, columns), 1, torch.bfloat16)
    dy = testing.integers((tokens, rows), 2, torch.bfloat16)
    weight = torch.full((rows, columns), 0.5, device="cuda", dtype=torch.bfloat16)
    table = testing.next_table(rule, case, testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0))
    if kernel == "fused":
        linear_step(rule, x, dy, weight, [], table, case.switches, True)
    else:
        grad = (dy.float().T @ x.float()).bfloat16()
        launch.elementwise_step(rule, weight, grad, [], table, case.switches, True)
        del grad
    for start in (0, 65_535, rows - 8):
        block = slice(start, min(start + 8, rows))
        old = torch.full((block.stop - block.start, columns), 0.5, device="cuda")
        want, _ = rule.reference(old, dy[:, block].float().T @ x.float(), {}, table, *case.switches)
        testing.assert_same_bits(weight[block], want.bfloat16(), f"rows from {start}")


def test_the_device_fills_the_same_tables_as_python():
    """Over many steps; a power may differ in the last bit of float64, which shows in fp32 once in millions."""
    exact = total = 0
    for stem in OPTIMIZERS:
        rule = importlib.import_module(f"generated.{stem}").RULE
        for case in testing.cases(rule):
            problem = testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0, warm=False)
            flat = [v for value in case.hypers.values() for v in (value if isinstance(value, tuple) else (value,))]
            hypers = torch.tensor(flat, dtype=torch.float64, device="cuda")
            counters = torch.tensor([list(problem.counters.values())], dtype=torch.float64, device="cuda")
            pending, width = torch.empty_like(counters), len(rule.spec.table) + 2 + len(rule.spec.states)
            tables, bases = torch.zeros(1, width, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
            for _ in range(50):
                launch.fill_tables(rule, hypers, counters, tables, pending, bases, case.flags)
                counters.copy_(pending)
                want = testing.next_table(rule, case, problem)
                got = tables[0, : len(want)]
                both_nan = got.isnan() & want.isnan()
                close = (got - want).abs() <= want.abs() * 2.0**-23
                assert (close | both_nan | (got == want)).all(), f"{stem} {case}: {got} against {want}"
                exact += int((both_nan | (got == want)).sum())
                total += len(want)
            assert counters[0].tolist() == pytest.approx(list(problem.counters.values()), rel=1e-12, abs=0)
    assert exact >= total - 2, f"{total - exact} of {total} entries differ"


def test_a_backward_of_a_16384_square_layer_stores_no_gradient():
    """Peak memory stays under weight + states + x + dy + dx + 64 MiB."""
    from generated import AdamW, adamw_linear

    side, tokens = 16_384, 2048
    weight = torch.nn.Parameter(torch.randn(side, side, device="cuda", dtype=torch.bfloat16) * 0.01)
    optimizer = AdamW([weight])
    x = torch.randn(tokens, side, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, side, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        y = adamw_linear(x, weight)
        torch.cuda.synchronize()
        # The output is not part of backward; what backward adds is counted from here.
        del_y = y.numel() * y.element_size()
        # cuBLAS keeps 32 MiB for each thread that called it; what forward's thread keeps is not backward's.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        y.backward(dy)
        peak = torch.cuda.max_memory_allocated() - del_y
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        del y
    allowed = 2 * (3 * side * side + 3 * tokens * side) + 64 * 2**20
    assert peak < allowed, f"peak {peak / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f} MiB"


def test_two_runs_agree_bit_for_bit():
    rule = importlib.import_module("generated.adamw").RULE
    case = testing.cases(rule)[0]
    x = torch.randn(1000, 4095, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(1000, 4097, device="cuda", dtype=torch.bfloat16)
    start = testing.make_problem(rule, case, (4097, 4095), torch.bfloat16, torch.bfloat16, 0)
    table = testing.next_table(rule, case, start)
    runs = [start.clone(), start.clone()]
    for run in runs:
        linear_step(rule, x, dy, run.weight, run.states, table, case.switches, False)
    for (name, a), (_, b) in zip(runs[0].tensors(rule), runs[1].tensors(rule), strict=True):
        testing.assert_same_bits(a, b, name)
