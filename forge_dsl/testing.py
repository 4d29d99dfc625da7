"""What the generated exactness tests are made of; useful for your own rules too.

*Bitwise.* x and dy are drawn from small integers, so that every partial sum of `dY^T X` is exact in fp32 whatever its
order. Then a kernel in exact arithmetic must equal the reference on the exact gradient bit for bit: no tolerance.

*Bounded.* In fast arithmetic, and against float64 or torch.optim, `Bound` says how far a trajectory may drift and why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forge_dsl.runtime import hopper, launch
from forge_dsl.runtime.ieee import Real
from forge_dsl.runtime.rule import Hyper, Rule
from forge_dsl.runtime.triton_support import AVAILABLE, interpreted
from forge_dsl.spec import HyperSpec, Range

_EXERCISE = (0.0625, 0.9, 1.5, -0.5)
_LARGEST_INTEGER = 3
_FP32 = 2.0**-24


@dataclass(frozen=True)
class Case:
    """One way to run a rule: the arguments that select and exercise a variant, by name."""

    hypers: dict[str, Hyper]
    flags: dict[str, bool]
    switches: tuple[bool, ...]

    def __str__(self) -> str:
        on = [name for name, value in self.flags.items() if value]
        changed = [f"{name}={value}" for name, value in self.hypers.items()]
        return "-".join([*on, *changed]) or "plain"


def device() -> torch.device:
    """The GPU if there is one, else the CPU, where kernels run in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def can_launch(rule: Rule) -> bool:
    """Whether kernels run here at all: on a GPU, or in the interpreter (TRITON_INTERPRET=1)."""
    return AVAILABLE and (torch.cuda.is_available() or interpreted(rule.linear_kernel))


def cases(rule: Rule) -> list[Case]:
    """Every combination of flags with every reachable side of the other switches; hypers at values that can be seen.

    Combinations that the rule's own `require` refuses are left out.
    """
    spec = rule.spec
    base = {hyper.name: _visible(hyper) for hyper in spec.hypers}
    choosing = [h for h in spec.hypers if any(not s.is_flag and h.name in s.text for s in spec.switches)]
    found: dict[tuple[bool, ...], Case] = {}
    for flags in itertools.product((False, True), repeat=len(spec.flags)):
        named = dict(zip(spec.flag_names, flags, strict=True))
        for values in itertools.product(*(_candidates(hyper) for hyper in choosing)):
            hypers = base | dict(zip((h.name for h in choosing), values, strict=True))
            try:
                rule.check_arguments(**hypers, **named)
            except ValueError:
                continue
            switches = tuple(bool(s) for s in rule.switches(**hypers, **named))
            found.setdefault(switches, Case(hypers, named, switches))
    return list(found.values())


def _visible(hyper: HyperSpec) -> Hyper:
    """A value at which the hyper matters: its default, unless that is 0 or too small to see."""
    if isinstance(hyper.default, tuple):
        return hyper.default
    if hyper.default != 0 and abs(hyper.default) > 1e-6:
        return hyper.default
    return 1e-3 if hyper.default != 0 else _inside(hyper.ranges[0])


def _inside(limits: Range | None) -> float:
    return next((value for value in _EXERCISE if limits is None or value in limits), 0.0)


def _candidates(hyper: HyperSpec) -> list[Hyper]:
    limits = hyper.ranges[0]
    default = hyper.default
    if isinstance(default, tuple):
        return [default]
    return [
        default,
        *(value for value in (0.0, *_EXERCISE) if value != default and (limits is None or value in limits)),
    ]


@dataclass
class Problem:
    """A weight with states and the counters of its next step."""

    weight: Tensor
    states: list[Tensor | None]
    counters: dict[str, float]

    def clone(self) -> Problem:
        """An independent copy."""
        states = [None if state is None else state.clone() for state in self.states]
        return Problem(self.weight.clone(), states, dict(self.counters))

    def tensors(self, rule: Rule) -> Iterator[tuple[str, Tensor]]:
        """The weight and each state, by name."""
        yield "weight", self.weight
        for name, state in zip(rule.spec.state_names, self.states, strict=True):
            if state is not None:
                yield name, state


def make_problem(
    rule: Rule,
    case: Case,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    state_dtype: torch.dtype,
    seed: int,
    warm: bool = True,
) -> Problem:
    """A random weight; states random within their domain (`warm`), or as the rule begins them."""
    generator = torch.Generator().manual_seed(seed)
    where = device()
    weight = torch.randn(tuple(shape), generator=generator)
    states: list[Tensor | None] = []
    for state, there in zip(rule.spec.states, rule.present(*case.switches), strict=True):
        value = rule.initial_state(state.name, weight, **case.hypers)
        if warm:
            noise = torch.rand(tuple(shape), generator=generator)
            value = state.typical(noise)
        states.append(value.to(where, state_dtype) if there else None)
    scalars = {scalar.name: scalar.initial for scalar in rule.spec.scalars}
    written = {f"written_{name}": float(warm) for name in rule.spec.first}
    first, last = ({"step": 0.0}, {}) if rule.spec.uses_step else ({}, {"_updates": 0.0})
    counters = first | scalars | written | last
    return Problem(weight.to(where, weight_dtype), states, counters)


def next_table(rule: Rule, case: Case, problem: Problem, dtype: torch.dtype = torch.float32) -> Tensor:
    """Advance the counters by one step and return that step's table, rounded to `dtype`."""
    spec, counters = rule.spec, problem.counters
    arguments: dict[str, Any] = {f"first_{name}": counters[f"written_{name}"] == 0 for name in spec.first}
    if spec.uses_step:
        counters["step"] += 1
        arguments["step"] = Real(counters["step"])
    else:
        counters["_updates"] += 1
    arguments |= {scalar.name: Real(counters[scalar.name]) for scalar in spec.scalars}
    for name, value in case.hypers.items():
        arguments[name] = tuple(map(Real, value)) if isinstance(value, tuple) else Real(value)
    table, scalars = rule.step_scalars(**arguments, **case.flags)
    counters |= {scalar.name: float(value) for scalar, value in zip(spec.scalars, scalars, strict=True)}
    counters |= {f"written_{name}": 1.0 for name in spec.first}
    return torch.tensor([float(value) for value in table], dtype=torch.float64).to(device(), dtype)


def integers(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: products of them are summed exactly in fp32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-_LARGEST_INTEGER, _LARGEST_INTEGER + 1, tuple(shape), generator=generator)
    return values.to(device(), dtype)


def reference_step(rule: Rule, case: Case, problem: Problem, grad: Tensor, table: Tensor) -> None:
    """One step of the reference, each tensor stored once in its own type."""
    state = {name: tensor for name, tensor in problem.tensors(rule) if name != "weight"}
    weight, new = rule.reference(problem.weight, grad, state, table, *case.switches)
    problem.weight.copy_(weight)
    for name, tensor in state.items():
        tensor.copy_(new[name])


Step = Callable[[Rule, Case, Problem, Tensor, Tensor, Tensor, bool], None]


def fused_kernel(rule: Rule, case: Case, problem: Problem, x: Tensor, dy: Tensor, table: Tensor, exact: bool) -> None:
    """The Triton kernel that fuses `dY^T X` with the rule."""
    launch.linear_step_portable(rule, x, dy, problem.weight, problem.states, table, case.switches, exact)


def hopper_kernel(rule: Rule, case: Case, problem: Problem, x: Tensor, dy: Tensor, table: Tensor, exact: bool) -> None:
    """The kernel for Hopper, which hands the gradient over with 24 bits; whole numbers up to 2^16 are exact in them.

    It takes operands of 16 bits; as bf16 the small whole numbers of these tests are what they were in fp32.
    """
    if x.dtype == torch.float32:
        x, dy = x.bfloat16(), dy.bfloat16()
    hopper.linear_step_hopper(rule, x, dy, problem.weight, problem.states, table, case.switches, exact)


def elementwise_kernel(
    rule: Rule, case: Case, problem: Problem, x: Tensor, dy: Tensor, table: Tensor, exact: bool
) -> None:
    """The Triton kernel for a gradient that exists."""
    grad = (dy.double().T @ x.double()).float()
    launch.elementwise_step(rule, problem.weight, grad, problem.states, table, case.switches, exact)


def many_kernel(rule: Rule, case: Case, problem: Problem, x: Tensor, dy: Tensor, table: Tensor, exact: bool) -> None:
    """The Triton kernel for many parameters: here the problem's, and a part of a copy, in one launch."""
    grad = (dy.double().T @ x.double()).float()
    copy = problem.clone()
    part = slice(0, grad.shape[0] // 2)
    states = [None if state is None else state[part] for state in copy.states]
    items = [
        launch.Item(copy.weight[part], grad[part], states, table),
        launch.Item(problem.weight, grad, problem.states, table),
    ]
    launch.many_step(rule, items, case.switches, exact)
    assert_same_bits(copy.weight[part], problem.weight[part], "the same parameter, in another place of the launch")


def banded(rule: Rule, case: Case, problem: Problem, x: Tensor, dy: Tensor, table: Tensor, exact: bool) -> None:
    """The library GEMM in bands of rows, then the rule."""
    from forge_dsl.runtime.banded import linear_step_banded

    linear_step_banded(rule, x, dy, problem.weight, problem.states, table, case.switches, exact)


STEPS: dict[str, Step] = {
    "fused": fused_kernel,
    "hopper": hopper_kernel,
    "elementwise": elementwise_kernel,
    "many": many_kernel,
    "banded": banded,
}


def assert_bitwise(
    rule: Rule,
    case: Case,
    how: str,
    shape: tuple[int, int, int],
    operand: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    steps: int = 3,
    seed: int = 0,
) -> None:
    """`steps` steps of a kernel in exact arithmetic equal those of the reference on the exact gradient, bit for bit.

    shape: tokens, rows (out), columns (in).
    """
    tokens, rows, columns = shape
    ours = make_problem(rule, case, (rows, columns), weight_dtype, state_dtype, seed)
    truth = ours.clone()
    for step in range(steps):
        x = integers((tokens, columns), seed + 2 * step + 1, operand)
        dy = integers((tokens, rows), seed + 2 * step + 2, operand)
        STEPS[how](rule, case, ours, x, dy, next_table(rule, case, ours), True)
        grad = (dy.double().T @ x.double()).float()
        reference_step(rule, case, truth, grad, next_table(rule, case, truth))
    for (name, got), (_, want) in zip(ours.tensors(rule), truth.tensors(rule), strict=True):
        assert_same_bits(got, want, f"{rule.spec.name} {how} {case} {shape}: {name}")


def assert_same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Equal as bits, NaN and the sign of zero included; says where the first difference is."""
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = got.contiguous().view(view) != want.contiguous().view(view)
    # Which NaN an operation returns is not specified by IEEE 754; that it is one, is.
    different &= ~(got.isnan() & want.isnan())
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, the first at {first}: "
            f"{got[first].item()!r}, expected {want[first].item()!r}"
        )


@dataclass(frozen=True)
class Bound:
    """How far a trajectory may be from the true one, per tensor, and why.

    Every step rounds the stored tensor `stored` times (half a unit in the last place of its largest element) and
    computes its change in fp32 with at most `ulps` roundings of the largest change. Errors of earlier steps are carried
    on and do not grow, since the rules contract or copy what they carry. A change computed from tensors that are stored
    coarsely (states, and the weight under L2 decay) inherits their relative error, which a moment collects over the
    steps it remembers: `remembered` roundings of the coarsest.

    A rule with a jump (the sign of a moment, a comparison) may take the other side where its argument is within
    rounding of the jump. No bound on the size holds there; `flips` bounds the share of coordinates beyond it.
    """

    ulps: float = 64.0
    remembered: float = 4.0
    flips: float = 0.0
    stored: float = 1.0

    def check(self, got: Tensor, want: Tensor, steps: int, change: float, coarsest: float, what: str) -> None:
        """Raise AssertionError if `got` is further from `want` than `steps` steps explain.

        change: the largest change of a step; coarsest: the unit roundoff of the coarsest tensor of the problem.
        """
        largest = want.abs().max().item()
        assert math.isfinite(largest), f"{what} diverged; the test shows nothing"
        inherited = self.remembered * coarsest if coarsest > _FP32 else 0.0
        allowed = steps * (self.stored * _STORED[got.dtype] * largest + (self.ulps * _FP32 + inherited) * change)
        error = (got.double() - want.double()).abs()
        beyond = int((error > allowed).sum())
        worst = error.max().item()
        assert beyond <= self.flips * error.numel(), (
            f"{what}: {beyond} of {error.numel()} elements are beyond {allowed:.3g}, the worst at {worst:.3g}"
        )


_STORED = {torch.float32: _FP32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def trajectory(
    rule: Rule,
    case: Case,
    problem: Problem,
    gradients: Sequence[tuple[Tensor, Tensor]],
    step: Callable[[Problem, Tensor, Tensor, Tensor], None],
    table_dtype: torch.dtype = torch.float32,
) -> tuple[Problem, dict[str, float]]:
    """Run `step` over all (x, dy); returns the final problem and the largest change of a step per tensor."""
    changes: dict[str, float] = {}
    for x, dy in gradients:
        before = problem.clone()
        step(problem, x, dy, next_table(rule, case, problem, table_dtype))
        for (name, new), (_, old) in zip(problem.tensors(rule), before.tensors(rule), strict=True):
            change = (new.double() - old.double()).abs().max().item() if new.numel() else 0.0
            changes[name] = max(changes.get(name, 0.0), change)
    return problem, changes


def assert_near_float64(
    rule: Rule,
    case: Case,
    how: str,
    shape: tuple[int, int, int] = (9, 17, 33),
    weight_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    exact: bool = False,
    steps: int = 20,
    bound: Bound | None = None,
) -> None:
    """`steps` steps stay within `bound` of the same steps in float64, weight and every state."""
    bound = bound or Bound()
    tokens, rows, columns = shape
    gradients = [
        (integers((tokens, columns), 2 * k + 1, torch.float32), integers((tokens, rows), 2 * k + 2, torch.float32))
        for k in range(steps)
    ]
    start = make_problem(rule, case, (rows, columns), weight_dtype, state_dtype, seed=7)
    wide = start.clone()
    wide.weight = wide.weight.double()
    wide.states = [None if state is None else state.double() for state in wide.states]

    def ours(problem: Problem, x: Tensor, dy: Tensor, table: Tensor) -> None:
        STEPS[how](rule, case, problem, x, dy, table, exact)

    def truth(problem: Problem, x: Tensor, dy: Tensor, table: Tensor) -> None:
        reference_step(rule, case, problem, dy.double().T @ x.double(), table)

    got, _ = trajectory(rule, case, start, gradients, ours)
    want, changes = trajectory(rule, case, wide, gradients, truth, torch.float64)
    coarsest = max(_STORED[weight_dtype], _STORED[state_dtype])
    for (name, a), (_, b) in zip(got.tensors(rule), want.tensors(rule), strict=True):
        bound.check(a, b, steps, changes[name], coarsest, f"{rule.spec.name} {how} {case}: {name} against float64")


def torch_oracle(rule: Rule, case: Case, weight: Tensor) -> torch.optim.Optimizer | None:
    """torch's own optimizer of this rule, single-tensor path, on `weight`; None if torch has none."""
    name = {"SGDMomentum": "SGD"}.get(rule.spec.name, rule.spec.name)
    found: type[torch.optim.Optimizer] | None = getattr(torch.optim, name, None)
    if found is None:
        return None
    arguments: dict[str, Any] = {"foreach": False, **case.hypers, **case.flags}
    return found([weight], **arguments)


def assert_near_torch(
    rule: Rule, case: Case, how: str, exact: bool, steps: int = 20, bound: Bound | None = None
) -> None:
    """`steps` steps from the rule's beginning stay within twice `bound` of torch.optim, weight and state for state."""
    bound = bound or Bound()
    shape = (9, 17, 33)
    tokens, rows, columns = shape
    start = make_problem(rule, case, (rows, columns), torch.float32, torch.float32, seed=11, warm=False)
    mirror = torch.nn.Parameter(start.weight.clone())
    oracle = torch_oracle(rule, case, mirror)
    assert oracle is not None, f"torch.optim has no {rule.spec.name}"
    changes: dict[str, float] = {}
    for k in range(steps):
        x = integers((tokens, columns), 2 * k + 1, torch.float32)
        dy = integers((tokens, rows), 2 * k + 2, torch.float32)
        before = start.clone()
        STEPS[how](rule, case, start, x, dy, next_table(rule, case, start), exact)
        for (name, new), (_, old) in zip(start.tensors(rule), before.tensors(rule), strict=True):
            changes[name] = max(changes.get(name, 0.0), (new - old).abs().max().item())
        mirror.grad = (dy.double().T @ x.double()).float()
        oracle.step()
    theirs: dict[str, Tensor] = {"weight": mirror.detach()} | oracle.state[mirror]
    for name, got in start.tensors(rule):
        want = theirs[name]
        doubled = replace(bound, ulps=2 * bound.ulps, stored=2.0)
        doubled.check(got, want, steps, changes[name], _FP32, f"{rule.spec.name} {how} {case}: {name} against torch")
