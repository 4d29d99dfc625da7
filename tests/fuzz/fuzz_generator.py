"""Fuzzing of the whole compiler: valid random specs become files that compile, and say only what the spec expresses.

`python -m tests.fuzz.fuzz_generator --count 20000 --execute 400`
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first kernel is defined

import numpy as np
import torch

from forge_dsl import testing
from forge_dsl.analysis.checked import Checked
from forge_dsl.compile import Compiled, compile_source
from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.emit.folder import render, render_page
from forge_dsl.ir import words
from forge_dsl.loading import module_of
from forge_dsl.runtime.ieee import Real
from forge_dsl.runtime.rule import Rule
from tests.fuzz.fuzz_frontend import run
from tests.fuzz.spec_writer import SpecWriter

# What generated code may call: the helper modules, and these.
HELPERS = (
    "device_math",
    "device_tiles",
    "device_operands",
    "device_hopper",
    "device_slices",
    "device_storage",
    "gluon",
    "ieee",
    "reference_math",
    "linear",
    "tl",
)
CALLS = {
    *("Spec", "HyperSpec", "FlagSpec", "StateSpec", "ScalarSpec", "SwitchSpec", "Range", "Rule"),
    *("ValueError", "float", "range", "super", "super().__init__"),
    *("torch.abs", "torch.sign", "torch.isfinite", "torch.where", "torch.reciprocal"),
    *("torch.full_like", "torch.zeros_like", "s.new_tensor", "weight.new_tensor", "weight.float"),
}
METHODS = {"to", "unbind", "clone"}
# Functions with a bound in ulp: there kernel and reference need not agree in every bit.
BOUNDED = ("exp", "log", "log1p", "expm1", "tanh", "pow")
EXTREMES = (0.0, 1.0, -1.0, 3.0, 1e308, -1e308, 5e-324, float("inf"), float("nan"))


def check_files(checked: Checked, text: str) -> Compiled:
    """Everything that is generated from a valid spec. Raises AssertionError, with the spec, for what must not be."""
    try:
        compiled = compile_source(text, "fuzz.opt")
        files = render([compiled])
        assert set(files) == {"fuzz.py", "tests/test_fuzz.py", "__init__.py", "tests/__init__.py"}
        for name, content in files.items():
            compile(content, name, "exec")
            odd = {char for char in content if char != "\n" and not char.isprintable()}
            assert not odd, f"{name} holds {odd}"
        check_module(files["fuzz.py"], compiled)
        assert render_page(compiled)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    return compiled


def check_module(source: str, compiled: Compiled) -> None:
    """The module's top level has the names that every module has; its code calls nothing but what it is made of."""
    tree = ast.parse(source)
    functions = words.functions(compiled.stem)
    ours = words.MODULE | functions | {compiled.spec.name, f"{compiled.spec.name}Linear", "__all__"}
    assert set(top_level(tree)) <= ours, set(top_level(tree)) - ours
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Import | ast.ImportFrom) or node in tree.body, ast.unparse(node)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
            assert called in CALLS | functions or called.split(".")[0] in HELPERS or method, called
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or ast.unparse(node) == "super().__init__", ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            raise AssertionError("bytes")
        assert not isinstance(node, ast.Lambda | ast.Await | ast.Yield | ast.Global | ast.Delete | ast.Try | ast.While)


def top_level(tree: ast.Module) -> Iterator[str]:
    """Every name that the module binds."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Assign(targets=targets):
                yield from map(ast.unparse, targets)
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case _:
                raise AssertionError(f"a {type(node).__name__} at the top level: {ast.unparse(node)}")


def valid_spec(seed: int) -> Compiled:
    """A random spec that the compiler accepts: numbers thrown together may divide by zero, and then others are."""
    rng = random.Random(seed)
    while True:
        try:
            return compile_source(SpecWriter(rng).write(), "fuzz.opt")
        except DiagnosticError as error:
            if {d.code for d in error.diagnostics if d.severity == "error"} != {"E0407"}:
                raise


def is_exact(compiled: Compiled) -> bool:
    """Whether kernels promise the bits of the reference."""
    return compiled.exact.count(*BOUNDED) == 0


def check_bits(compiled: Compiled, most: int = 4) -> None:
    """In up to `most` variants: each kernel, in exact arithmetic, steps the bits of the reference."""
    rule = module_of(compiled).RULE
    kernels = ("elementwise", "fused", "many")
    with np.errstate(all="ignore"):  # Triton's interpreter computes with numpy, whose warnings say nothing here
        for case, how in itertools.product(testing.cases(rule)[:most], kernels):
            testing.assert_bitwise(rule, case, how, (3, 2, 5), steps=2)


def check_scalars(rule: Rule) -> None:
    """No value of a hyper, scalar or step makes the scalar code raise anything but its own ValueError."""
    spec = rule.spec
    for index, value in enumerate(EXTREMES):
        other = EXTREMES[index - 1]
        hypers = {h.name: (value, other)[: len(h.ranges)] if len(h.ranges) > 1 else value for h in spec.hypers}
        flags = {name: bool(index % 2) for name in spec.flag_names}
        real = {name: tuple(map(Real, v)) if isinstance(v, tuple) else Real(v) for name, v in hypers.items()}
        counters = {"step": Real(1.0)} if spec.uses_step else {}
        counters |= {scalar.name: Real(other) for scalar in spec.scalars}
        counters |= {f"first_{name}": bool(index % 2) for name in spec.first}
        table, scalars = rule.step_scalars(**counters, **real, **flags)
        assert len(table) == len(spec.table) and len(scalars) == len(spec.scalars)
        assert all(isinstance(number, float | bool | int) for number in (*table, *scalars))
        torch.tensor([float(number) for number in table], dtype=torch.float32)
        assert all(isinstance(switch, bool) for switch in rule.switches(**hypers, **flags))
        with contextlib.suppress(ValueError):
            rule.check_arguments(**hypers, **flags)
        if max(map(abs, (value, other))) < 1e38:  # more than fp32 holds, torch will not fill a tensor with
            for state in spec.states:
                assert rule.initial_state(state.name, torch.ones(2), **hypers).dtype == torch.float32


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="specs, whole and spoiled, that are compiled")
    parser.add_argument("--execute", type=int, default=400, help="valid specs whose kernels run too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    outcome = run(arguments.count, arguments.seed, check_files, seconds=60.0)
    print(f"{outcome.valid} generated, {outcome.refused} refused, in {time.perf_counter() - start:.0f} s", flush=True)
    compared = 0
    for seed in range(arguments.seed, arguments.seed + arguments.execute):
        compiled = valid_spec(seed)
        check_scalars(module_of(compiled).RULE)
        if is_exact(compiled):
            check_bits(compiled)
            compared += 1
    print(f"{arguments.execute} with scalars at their extremes, {compared} bit for bit", flush=True)


if __name__ == "__main__":
    sys.exit(main())
