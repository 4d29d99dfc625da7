"""Measuring the schedules on clones: one weight, its states and operands of random numbers, nothing that is in use.

Before anything is timed, each schedule takes one step from the same start, on whole numbers, whose gradient is exact in
any order; the results must agree within the rounding of fast arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.runtime import hopper, launch, trust
from forge_dsl.runtime.banded import linear_step_banded
from forge_dsl.runtime.rule import Rule
from forge_dsl.selection.table import Measurement, Schedule
from forge_dsl.selection.timer import Run, Timer

OPERANDS: dict[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


class DisagreementError(Exception):
    """Two schedules gave different results, beyond rounding."""


@dataclass(frozen=True)
class Class:
    """What to measure: a rule, the types of operands (and weight) and of states, sizes, and with how many bits the
    kernel for Hopper hands the gradient over: 24 or 32."""

    rule: Rule
    operand: torch.dtype
    state: torch.dtype
    rows: int
    columns: int
    tokens: int
    gradient_bits: Literal[24, 32] = 24

    def __str__(self) -> str:
        types = f"{str(self.operand)[6:]}, {str(self.state)[6:]} states"
        more = "" if self.gradient_bits == 24 else f", {self.gradient_bits} bits of the gradient"
        return f"{self.rule.spec.name} {self.rows} x {self.columns}, {self.tokens} tokens, {types}{more}"


def classes(
    rules: Sequence[Rule],
    operand: torch.dtype,
    state: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    gradient_bits: Literal[24, 32] = 24,
) -> list[Class]:
    """All combinations of rules, weights [out, in] and numbers of tokens."""
    combined = product(rules, shapes, tokens)
    return [Class(rule, operand, state, *shape, count, gradient_bits) for rule, shape, count in combined]


class Clone:
    """A weight of a class with states and operands, on `device`, and one run of each schedule on it."""

    def __init__(self, one: Class, device: torch.device) -> None:
        self.rule, self.bits = one.rule, one.gradient_bits
        plain = [case for case in testing.cases(one.rule) if not any(case.flags.values())]
        # Of the variants without flags the one with the most states: SGD with momentum, RMSprop with momentum.
        case = max(plain, key=lambda case: sum(one.rule.present(*case.switches)))
        self.switches = case.switches
        generator = torch.Generator(device).manual_seed(0)

        def uniform() -> Tensor:
            return torch.rand(one.rows, one.columns, device=device, generator=generator, dtype=torch.float32)

        self.weight = uniform().sub_(0.5).mul_(0.1).to(one.operand)
        self.states: list[Tensor | None] = []
        for state, there in zip(one.rule.spec.states, one.rule.present(*case.switches), strict=True):
            self.states.append(state.typical(uniform()).to(one.state) if there else None)
        sizes = (one.tokens, one.columns), (one.tokens, one.rows)
        self.x, self.dy = (
            torch.randint(-3, 4, size, device=device, generator=generator).to(one.operand) for size in sizes
        )
        small = testing.make_problem(one.rule, case, (1, 1), torch.float32, torch.float32, 0)
        self.table = testing.next_table(one.rule, case, small).to(device)

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The weight and the states that there are, by name."""
        named = zip(self.rule.spec.state_names, self.states, strict=True)
        return [("weight", self.weight), *((name, state) for name, state in named if state is not None)]

    def stored(self) -> tuple[int, bool]:
        """Bytes per parameter of weight and states, and whether one of them is fp32."""
        tensors = [tensor for _, tensor in self.tensors]
        return sum(t.element_size() for t in tensors), any(t.dtype == torch.float32 for t in tensors)

    def copy_from(self, kept: list[Tensor]) -> None:
        """Set weight and states to what they were."""
        for (_, tensor), value in zip(self.tensors, kept, strict=True):
            tensor.copy_(value)

    def runs(self) -> dict[Schedule, Run]:
        """Every schedule that can take this update, in place, as the optimizer would launch it."""
        common = self.rule, self.x, self.dy, self.weight, self.states
        found: dict[Schedule, Run] = {}
        if hopper.find(*common, self.switches, gradient_bits=self.bits) is not None:
            arguments = *common, self.table, self.switches, False, self.bits
            found["hopper"] = lambda: hopper.linear_step_hopper(*arguments)
        found["portable"] = lambda: launch.linear_step_portable(*common, self.table, self.switches, False)
        found["banded"] = lambda: linear_step_banded(*common, self.table, self.switches, False)
        return found


def check(clone: Clone, runs: dict[Schedule, Run]) -> None:
    """One step of every schedule from one start. Raises DisagreementError, naming schedules, tensor and share."""
    start = [tensor.clone() for _, tensor in clone.tensors]
    runs["banded"]()
    truth = [tensor.clone() for _, tensor in clone.tensors]
    for name, run in runs.items():
        if name == "banded":
            continue
        clone.copy_from(start)
        run()
        for (tensor, got), want in zip(clone.tensors, truth, strict=True):
            share = trust.beyond_rounding(got, want)
            if share > trust.FLIPS:
                raise DisagreementError(f"{share:.2%} of `{tensor}` differ between the schedules {name} and banded")
    clone.copy_from(start)


def measure(one: Class, device: torch.device, time: Timer) -> Measurement:
    """Check, then time the schedules of one class. Raises DisagreementError, and what a kernel raises."""
    clone = Clone(one, device)
    with torch.no_grad():
        runs = clone.runs()
        check(clone, runs)
        # Small enough that hundreds of steps keep every rule finite.
        clone.dy.mul_(1e-3)
        times = time({str(name): run for name, run in runs.items()})
    stored, wide = clone.stored()
    return Measurement(
        operand=OPERANDS[one.operand],
        stored=stored,
        wide=wide,
        rows=one.rows,
        columns=one.columns,
        tokens=one.tokens,
        gradient_bits=one.gradient_bits,
        milliseconds={name: times[name] for name in runs},
    )


@dataclass(frozen=True)
class Outcome:
    """What came of a class: a measurement, or the reason why there is none. fault: it is a wrong result."""

    one: Class
    measured: Measurement | None = None
    reason: str = ""
    fault: bool = False


def measure_all(
    wanted: Sequence[Class], device: torch.device, time: Timer, begin: Callable[[Class], None] = lambda one: None
) -> Iterator[Outcome]:
    """Each class in turn; one that does not fit into memory, or whose schedules disagree, does not stop the others."""
    for one in wanted:
        begin(one)
        try:
            yield Outcome(one, measure(one, device, time))
        except DisagreementError as error:
            yield Outcome(one, reason=str(error), fault=True)
        except torch.OutOfMemoryError:
            yield Outcome(one, reason="there is not enough memory on the device")
        if device.type == "cuda":
            torch.cuda.empty_cache()
