"""Problems whose tensors are kept in any format and rounded in any way, and the reference's step of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_dsl import testing
from forge_dsl.formats import rounding
from forge_dsl.formats.extended import Extended
from forge_dsl.runtime import banded
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import BLOCK_WISE, DTYPES, Storage, block_wise
from forge_dsl.testing import Case

_GUARD = 0x7B

# A kernel under test: rule, x, dy, weight, states, table, switches, exact, kept.
Kernel = Callable[[Rule, Tensor, Tensor, Tensor, list[Tensor | None], Tensor, Sequence[bool], bool, Storage], None]


@dataclass
class Kept:
    """A weight, its states and what lies beside them; `memory`: all of what they are parts of, as bytes."""

    weight: Tensor
    states: list[Tensor | None]
    storage: Storage
    memory: list[Tensor]

    def tensors(self, rule: Rule) -> Iterator[tuple[str, Tensor]]:
        """Everything that is stored, by name."""
        for name, tensor, extra in zip(
            ("weight", *rule.spec.state_names), (self.weight, *self.states), self.storage.extras, strict=True
        ):
            if tensor is not None:
                yield name, tensor
            if extra is not None:
                yield f"beside {name}", extra


class _Shelf:
    """Copies of tensors in rows that begin at multiples of 16 bytes, with guard bytes between and after them."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []

    def padded(self, tensor: Tensor) -> Tensor:
        """Rows as far apart, in elements, for every type: the kernels want weight and states alike."""
        rows, columns = tensor.shape
        stride = -(-columns // 16) * 16 + 16
        return self._put(tensor, rows * stride + 16, (stride, 1))

    def dense(self, tensor: Tensor) -> Tensor:
        """Scales: no bytes between rows."""
        return self._put(tensor, tensor.numel() + 16, (tensor.shape[1], 1))

    def _put(self, tensor: Tensor, elements: int, strides: tuple[int, int]) -> Tensor:
        room = torch.full((elements * tensor.element_size(),), _GUARD, dtype=torch.uint8, device=tensor.device)
        self.memory.append(room)
        view = room.view(tensor.dtype).as_strided(tuple(tensor.shape), strides)
        return view.copy_(tensor)


def make(
    rule: Rule,
    case: Case,
    shape: tuple[int, int],
    weight: str = "bf16",
    state: str = "bf16",
    draws: bool | None = True,
    seed: int = 0,
) -> Kept:
    """weight: "fp32", "bf16", "fp16", "fp8", "bf16+8" or "bf16+16"; state: as `storage.format_name`; draws: which
    tensors are rounded stochastically: all, none, or, if None, the weight alone.
    """
    start = testing.make_problem(rule, case, shape, torch.float32, torch.float32, seed)
    shelf = _Shelf()
    beside: Tensor | None = None
    if weight in DTYPES:
        tensor, form = shelf.padded(start.weight.to(DTYPES[weight])), "plain"
    elif weight == "fp8":
        codes, scales = block_wise(weight, False, weight=True).encode(start.weight)
        assert scales is not None
        tensor, beside, form = shelf.padded(codes), shelf.dense(scales), weight
    else:
        encoded = Extended(int(weight[5:])).encode(start.weight, None)
        tensor, beside, form = shelf.padded(encoded[0]), shelf.padded(encoded[1]), weight
    states: list[Tensor | None] = []
    extras: list[Tensor | None] = [beside]
    for spec, value in zip(rule.spec.states, start.states, strict=True):
        if value is None or state not in BLOCK_WISE:
            states.append(None if value is None else shelf.padded(value.to(DTYPES[state])))
            extras.append(None)
        else:
            codes, scales = block_wise(state, spec.nonnegative).encode(value)
            assert scales is not None
            states.append(shelf.padded(codes))
            extras.append(shelf.dense(scales))
    kind = state if state in BLOCK_WISE else "plain"
    formats = (form, *("plain" if value is None else kind for value in states))
    flags = (draws is not False, *(draws is True and value is not None for value in states))
    return Kept(tensor, states, Storage(formats, flags, tuple(extras)), shelf.memory)


def table_of(rule: Rule, case: Case, problem: testing.Problem, step: int) -> Tensor:
    """The scalars of the next step, and the words that each tensor's draws begin with."""
    words = map(rounding.signed32, rounding.words(rounding.base(5, 3), step, 1 + len(problem.states)))
    keys = torch.tensor(list(words), dtype=torch.int32, device=testing.device()).view(torch.float32)
    return torch.cat([testing.next_table(rule, case, problem), keys])


def reference_step(rule: Rule, case: Case, truth: Kept, x: Tensor, dy: Tensor, table: Tensor) -> None:
    """The codecs and the reference in PyTorch, on the exact gradient."""
    rows, columns = (torch.arange(size, device=x.device) for size in truth.weight.shape)
    # A sum begins with +0: without it the one product of a single token would keep the sign of its zero.
    grad = (dy.double().T @ x.double()).float() + 0.0
    numbers = rows[:, None], columns[None, :]
    banded._apply(rule, truth.weight, grad, truth.states, table, case.switches, truth.storage, numbers)


def assert_bitwise(
    rule: Rule, case: Case, kernel: Kernel, shape: tuple[int, int, int], steps: int = 2, **how: str | bool | None
) -> None:
    """Steps of a kernel in exact arithmetic store what the reference stores, bit for bit, and nothing beside it.

    shape: tokens, rows, columns; how: as of `make`.
    """
    tokens, rows, columns = shape
    ours, truth = (make(rule, case, (rows, columns), **how) for _ in range(2))  # type: ignore[arg-type]
    problem = testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0)
    for step in range(1, steps + 1):
        x = testing.integers((tokens, columns), 2 * step, torch.bfloat16)
        dy = testing.integers((tokens, rows), 2 * step + 1, torch.bfloat16)
        table = table_of(rule, case, problem, step)
        padded = _Shelf()
        operands = padded.padded(x), padded.padded(dy)
        kernel(rule, *operands, ours.weight, ours.states, table, case.switches, True, ours.storage)
        with torch.no_grad():
            reference_step(rule, case, truth, x, dy, table)
    what = f"{rule.spec.name} {case} {shape} {how}"
    for (name, got), (_, want) in zip(ours.tensors(rule), truth.tensors(rule), strict=True):
        testing.assert_same_bits(got, want, f"{what}: {name}")
    for got, want in zip(ours.memory, truth.memory, strict=True):
        assert torch.equal(got, want), f"{what}: wrote beyond a border"
