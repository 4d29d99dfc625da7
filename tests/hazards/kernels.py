"""One step of a kernel and of the reference side by side, with operands placed in memory as a test wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import optim, testing
from forge_dsl.runtime.rule import Rule
from forge_dsl.testing import Case, Problem

KERNELS = ["fused", "elementwise", "many", "banded"]
launched = pytest.mark.skipif(not testing.can_launch(optim.SGD.rule), reason="needs a GPU, or TRITON_INTERPRET=1")
every_kernel = pytest.mark.parametrize("how", [pytest.param(k, marks=launched) for k in KERNELS[:3]] + ["banded"])

SGD: Rule = optim.SGDMomentum.rule
ADAMW: Rule = optim.AdamW.rule
Place = Callable[[Tensor], Tensor]


def case_of(rule: Rule, **on: bool) -> Case:
    """The case with these flags on and all others off, and every switch of a hyper on."""
    wanted = {name: on.get(name, False) for name in rule.spec.flag_names}
    found = [case for case in testing.cases(rule) if case.flags == wanted]
    return max(found, key=lambda case: sum(case.switches))


@dataclass
class Step:
    """A problem and the operands of one step. `x` [tokens, columns], `dy` [tokens, rows]."""

    rule: Rule
    case: Case
    problem: Problem
    x: Tensor
    dy: Tensor
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.table = testing.next_table(self.rule, self.case, self.problem)

    def placed(self, place: Place) -> Step:
        """The same step with every tensor where `place` puts it."""
        states = [None if state is None else place(state) for state in self.problem.states]
        problem = replace(self.problem, weight=place(self.problem.weight), states=states)
        moved = Step.__new__(Step)
        moved.__dict__ = self.__dict__ | {"problem": problem, "x": place(self.x), "dy": place(self.dy)}
        return moved

    def run(self, how: str, exact: bool = True) -> list[Tensor]:
        """The weight and states after the kernel, as plain copies."""
        testing.STEPS[how](self.rule, self.case, self.problem, self.x, self.dy, self.table, exact)
        return [tensor.clone() for _, tensor in self.problem.tensors(self.rule)]

    def expected(self) -> list[Tensor]:
        """The same from the reference on the exact gradient; changes nothing."""
        problem = self.problem.clone()
        grad = (self.dy.double().T @ self.x.double()).float()
        testing.reference_step(self.rule, self.case, problem, grad, self.table)
        return [tensor for _, tensor in problem.tensors(self.rule)]


def make(
    rule: Rule,
    case: Case,
    shape: tuple[int, int, int],
    x: torch.dtype = torch.float32,
    dy: torch.dtype = torch.float32,
    weight: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
) -> Step:
    """A step on integer-valued operands, whose gradient is exact in fp32. shape: tokens, rows, columns."""
    tokens, rows, columns = shape
    problem = testing.make_problem(rule, case, (rows, columns), weight, state, seed=3)
    operands = testing.integers((tokens, columns), 1, x), testing.integers((tokens, rows), 2, dy)
    return Step(rule, case, problem, *operands)


def assert_same(got: list[Tensor], want: list[Tensor], what: str = "") -> None:
    """Weight and states agree bit for bit."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        testing.assert_same_bits(a, b, f"{what} tensor {index}")


class Recorder:
    """Stands for a kernel and notes every launch: grid, positional arguments, keywords. Runs it unless `dry`.

    A dry one passes for interpreted, so that nothing asks for the properties of a GPU.
    """

    def __init__(self, kernel: Any, dry: bool = False) -> None:
        self.kernel, self.dry = kernel, dry
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.arg_names = kernel.arg_names
        # The runtime tells an interpreted kernel by the name of its type.
        self.__class__ = type("InterpretedFunction" if dry else type(kernel).__name__, (Recorder,), {})

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **keywords: Any) -> None:
            self.launches.append((grid, arguments, keywords))
            if not self.dry:
                self.kernel[grid](*arguments, **keywords)

        return launch


def recorded(rule: Rule, dry: bool = False) -> tuple[Rule, dict[str, Recorder]]:
    """The rule with its kernels recorded, and the recorders by name."""
    names = ("linear_kernel", "elementwise_kernel", "many_kernel", "scalars_kernel")
    recorders = {name: Recorder(getattr(rule, name), dry) for name in names}
    return replace(rule, **recorders), recorders
