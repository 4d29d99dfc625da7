"""Every variant of every spec: what the passes leave computes what the author wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forge_dsl import testing
from forge_dsl.compile import Compiled, compile_source
from forge_dsl.ir.lower import lower
from forge_dsl.loading import module_of
from tests.ir.programs import Array, numbers, run, same_bits

ROOT = Path(__file__).parents[2]
PATHS = [*(ROOT / "optimizers").glob("*.opt"), *(ROOT / "examples/specs").glob("*.opt")]
SPECS = {path.stem: compile_source(path.read_text(encoding="utf-8"), path.name) for path in sorted(PATHS)}
EACH = [(name, case) for name, one in SPECS.items() for case in testing.cases(module_of(one).RULE)]
every_variant = pytest.mark.parametrize(("name", "case"), EACH, ids=[f"{name}-{case}" for name, case in EACH])


def table(one: Compiled, case: testing.Case, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """The per-step table at the third step."""
    rule = module_of(one).RULE
    problem = testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0)
    for _ in range(3):
        values = testing.next_table(rule, case, problem, dtype)
    return dict(zip(rule.spec.table, values.tolist(), strict=True))


def tensors(one: Compiled, draw: object = numbers) -> dict[str, Array]:
    names = ["weight", "grad", *one.spec.state_names]
    return {name: draw((300,), seed) for seed, name in enumerate(names)}  # type: ignore[operator]


def present(one: Compiled, case: testing.Case) -> set[str]:
    there = module_of(one).RULE.present(*case.switches)
    return {"weight"} | {name for name, held in zip(one.spec.state_names, there, strict=True) if held}


@every_variant
def test_the_exact_program_of_a_variant_computes_the_bits_of_the_spec(name: str, case: testing.Case) -> None:
    one = SPECS[name]
    inputs, slots = tensors(one), table(one, case)
    switches = dict(zip((switch.name for switch in one.spec.switches), case.switches, strict=True))
    written = run(lower(one.checked, one.layout), inputs, slots, switches)
    program = one.program(case.switches, "exact")
    assert program.count("choose") == 0
    assert set(program.inputs) <= {"grad"} | present(one, case), "a variant reads no state that it lacks"
    kept = run(program, inputs, slots)
    for output in present(one, case) & written.keys():
        assert same_bits(written[output], kept.get(output, inputs[output])), output


@every_variant
def test_the_fast_program_differs_by_roundings_only(name: str, case: testing.Case) -> None:
    one = SPECS[name]
    rng = np.random.default_rng(5)
    inputs = tensors(one, lambda shape, seed: rng.uniform(0.5, 1.5, shape))
    exact, fast = (run(one.program(case.switches, mode), inputs, table(one, case)) for mode in ("exact", "fast"))
    assert exact.keys() == fast.keys()
    for output, value in exact.items():
        # The sums in these rules are of a few terms of like size: at most 64 roundings of float64.
        np.testing.assert_allclose(fast[output], value, rtol=64 * 2.0**-53, atol=64 * 2.0**-53, err_msg=output)


@every_variant
def test_fast_divides_only_by_what_differs_from_coordinate_to_coordinate(name: str, case: testing.Case) -> None:
    program = SPECS[name].program(case.switches, "fast")
    for op in program.ops:
        if op.code == "div":
            assert program.ops[op.args[1]].code not in {"slot", "const"}
    assert program.count("div", "rcp") <= SPECS[name].program(case.switches, "exact").count("div")


def variants(name: str) -> list[tuple[bool, ...]]:
    return [case.switches for other, case in EACH if other == name]


@pytest.mark.parametrize("variant", variants("adamw"))
def test_adamw_divides_once_and_raises_to_no_power(variant: tuple[bool, ...]) -> None:
    program = SPECS["adamw"].program(variant, "fast")
    assert program.count("pow", "exp", "log") == 0
    assert program.count("div", "rcp") == 1
    assert program.count("sqrt") == 1


@pytest.mark.parametrize("variant", variants("sgd_momentum"))
def test_sgd_without_momentum_has_no_buffer(variant: tuple[bool, ...]) -> None:
    one = SPECS["sgd_momentum"]
    momentum = dict(zip((switch.text for switch in one.spec.switches), variant, strict=True))["momentum != 0"]
    for mode in ("exact", "fast"):
        program = one.program(variant, mode)  # type: ignore[arg-type]
        assert ("momentum_buffer" in program.inputs) == momentum
        assert ("momentum_buffer" in {out.name for out in program.outputs}) == momentum


@pytest.mark.parametrize("name", SPECS)
def test_a_kernel_takes_the_states_of_the_spec_and_no_more(name: str) -> None:
    rule = module_of(SPECS[name]).RULE
    for kernel in (rule.linear_kernel, rule.elementwise_kernel):
        pointers = [argument for argument in kernel.arg_names if argument.endswith("_ptr")]
        assert set(pointers) - {"grad_ptr"} == {"weight_ptr", *(f"{state}_ptr" for state in rule.spec.state_names)}
