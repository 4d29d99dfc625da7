"""The generator on random specs; `python -m tests.fuzz.fuzz_generator --count 20000` runs many more."""

from __future__ import annotations

import pytest

from forge_dsl import testing
from forge_dsl.compile import compile_source
from forge_dsl.emit.module import render_module
from forge_dsl.loading import module_of
from tests.fuzz.fuzz_frontend import run
from tests.fuzz.fuzz_generator import check_bits, check_files, check_module, check_scalars, is_exact, valid_spec

# Exact specs among the first hundreds; a run of the command looks at more.
SEEDS = [seed for seed in range(160) if is_exact(valid_spec(seed))][:40]


def test_every_valid_spec_becomes_files_that_say_only_what_it_expresses() -> None:
    outcome = run(300, seed=50_000, on_valid=check_files, seconds=60.0)
    assert outcome.valid >= 50 and outcome.refused >= 50


@pytest.mark.parametrize("seed", range(60_000, 60_100))
def test_scalar_code_never_raises(seed: int) -> None:
    check_scalars(module_of(valid_spec(seed)).RULE)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_step_the_bits_of_the_reference(seed: int) -> None:
    compiled = valid_spec(seed)
    if not testing.can_launch(module_of(compiled).RULE):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    check_bits(compiled, most=2)


SOURCE = compile_source("optimizer Sgd\nhyper lr = 1\nupdate:\n  weight = weight - lr * grad\n", "fuzz.opt")


def test_the_check_of_modules_accepts_a_module() -> None:
    check_module(render_module(SOURCE), SOURCE)


@pytest.mark.parametrize("line", ["import os", "evil = 1", "class Evil: pass", "exec('1')", "if evil: pass"])
def test_the_check_of_modules_notices_other_names(line: str) -> None:
    with pytest.raises(AssertionError):
        check_module(f"{render_module(SOURCE)}\n{line}\n", SOURCE)


@pytest.mark.parametrize(
    "line", ["exec('1')", "x = open('y')", "().__class__", "torch.load('x')", "import os", "del x"]
)
def test_the_check_of_modules_notices_other_code(line: str) -> None:
    with pytest.raises(AssertionError):
        check_module(f"{render_module(SOURCE)}\ndef fuzz_table():\n    {line}\n", SOURCE)
