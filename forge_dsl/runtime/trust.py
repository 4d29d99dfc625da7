"""The kernel for Hopper is checked against the reference before it first touches a weight, once per kind of launch.

Gluon is experimental, and a kernel that waits on barriers of its own may fail on a driver or release that nobody has
tried. So before the first launch of each kind in a process (kernel, types, variant, configuration; not shape) the same
compiled kernel updates a small random weight of its own, in several tiles and on few programs, and the result is
compared with the PyTorch reference on the CPU. The reference, and not the portable kernel, because it is printed from
the checked rule and not from the IR that both kernels come from, and compiles nothing. If the kernel disagrees or
raises, the portable kernel takes its place for the rest of the process, with one warning. The reference takes the
gradient with the bits that the kernel hands over, so nothing more is allowed where these are fewer.

Launched without any check are kernels on a weight or a state in another format than a plain one (8-bit codes, and bits
beside a weight), for which there is no reference here to compare with, and those of a variant that no ordinary
arguments reach, which are those of `testing.cases`.

In exact arithmetic a kernel whose registers spill gives way too, but silently: nothing is wrong with it.

While a CUDA graph is captured nothing can be compared: an unchecked kind is then launched unchecked, as Triton's own
kernels are, and is checked at its next launch outside a capture. A step before the capture, which is needed anyway so
that everything is compiled, does it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.runtime.devices import is_capturing
from forge_dsl.runtime.gradient_bits import handed_over
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import Storage, plain

if TYPE_CHECKING:
    from forge_dsl.testing import Case, Problem

# The share of coordinates that may differ by more than rounding: a rule with a jump may take its other side.
FLIPS = 1e-4
_FAST = 1e-5
_ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class SpilledError(Exception):
    """The kernel is in exact arithmetic and spills registers."""


_HELD: weakref.WeakSet[Any] = weakref.WeakSet()
_KINDS: dict[tuple[Any, ...], bool] = {}


def holds(
    found: Any,
    rule: Rule,
    x: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    switches: Sequence[bool],
    kept: Storage | None = None,
) -> bool:
    """Whether the launch `found` (a `hopper.Launch`) may be used for tensors like these; see above."""
    if found in _HELD:
        return True
    kinds = tuple(None if tensor is None else tensor.dtype for tensor in (weight, *states))
    key = (rule.hopper_kernel, weight.device, x.dtype, kinds, tuple(found.constants.items()))
    good = _KINDS.get(key)
    if good is None:
        if is_capturing(weight.device):
            return True
        good = _KINDS[key] = _check(rule, x, weight, states, switches, found.constants, kept)
    if good:
        _HELD.add(found)
    return good


def is_settled(found: Any) -> bool:
    """Whether the launch has been found good, so that `holds` says so from now on."""
    return found in _HELD


def _check(
    rule: Rule,
    x: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    switches: Sequence[bool],
    constants: dict[str, Any],
    kept: Storage | None,
) -> bool:
    try:
        reason = disagreement(rule, x, weight, states, switches, constants, kept)
    except SpilledError:
        return False
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {error}"
    if reason is not None:
        warnings.warn(
            f"The kernel for Hopper is not used for {rule.spec.name}, the portable one is: on a small random weight "
            f"{reason}. Please report this with the versions of torch, Triton and the driver.",
            RuntimeWarning,
            stacklevel=3,
        )
    return reason is None


def disagreement(
    rule: Rule,
    x: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    switches: Sequence[bool],
    constants: dict[str, Any],
    kept: Storage | None = None,
) -> str | None:
    """How one step of the kernel differs from the reference, or None. The arguments say which kernel; all are left
    alone.

    constants: the compile-time parameters that the kernel must come to have, for it is that one that is checked.
    kept: how its tensors are kept. Rounding by chance is within what rounding to nearest is allowed to differ by.
    """
    from forge_dsl import testing
    from forge_dsl.runtime import hopper, hopper_plan

    case = next((case for case in testing.cases(rule) if case.switches == tuple(switches)), None)
    kinds = {tensor.dtype for tensor in (weight, *states) if tensor is not None}
    kept = kept or plain(len(states))
    if case is None or not kinds <= _ROUNDING.keys() or set(kept.formats) != {"plain"}:
        # No ordinary arguments lead to this variant, or what is stored are codes: nothing to compare with here.
        return None
    even, wanted = constants["even"], dict(constants)
    rows, columns = (4 * hopper.TILE_O, 2 * hopper.TILE_I) if even else (3 * hopper.TILE_O + 40, hopper.TILE_I + 72)
    # As many tokens as it takes to get the same configuration, whole steps only where the caller has them.
    tokens = min(x.shape[0], hopper_plan.MEMORY_BOUND + 72)
    with torch.no_grad():
        start = _problem(rule, case, (rows, columns), weight.dtype, [None if s is None else s.dtype for s in states])
        table = _table(rule, case, start)
        x_small, dy_small = _integers((tokens, columns), 1), _integers((tokens, rows), 2)
        ours = replace(start, weight=_laid(start.weight, weight.device, 0))
        apart = 0 if wanted["alike"] else 8
        ours.states = [None if state is None else _laid(state, weight.device, apart) for state in start.states]
        x_there, dy_there = (operand.to(weight.device, x.dtype) for operand in (x_small, dy_small))
        # Words of zero for the draws to begin with.
        keyed = torch.cat([table, torch.zeros(1 + len(states), device="cpu")]).to(weight.device)
        _launch(rule, x_there, dy_there, ours, keyed, switches, wanted, kept)
        grad = handed_over((dy_small.double().T @ x_small.double()).float(), wanted["gradient_bits"])
        _reference(rule, case, start, grad, table)
        for (name, got), (_, want) in zip(ours.tensors(rule), start.tensors(rule), strict=True):
            share = beyond_rounding(got.cpu(), want)
            if share > FLIPS:
                return f"{share:.2%} of `{name}` differ from the reference"
    return None


def beyond_rounding(got: Tensor, want: Tensor) -> float:
    """The share of elements that differ by more than rounding in fast arithmetic explains. One device, one type."""
    kind, got, want = want.dtype, got.double(), want.double()
    largest = want[want.isfinite()].abs().max() if want.isfinite().any() else torch.zeros((), device=want.device)
    allowed = _ROUNDING[kind] * torch.maximum(got.abs(), want.abs()) + _FAST * largest
    same = (got == want) | (got.isnan() & want.isnan())
    return 1.0 - (((got - want).abs() <= allowed) | same).double().mean().item()


def _launch(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    problem: Problem,
    table: Tensor,
    switches: Sequence[bool],
    constants: dict[str, Any],
    kept: Storage,
) -> None:
    """One step by the very kernel that `constants` are of, on so few programs that each has several tiles.

    Raises SpilledError.
    """
    from forge_dsl.runtime import hopper

    launch = hopper.Launch(
        rule, x, dy, problem.weight, problem.states, switches, constants["exact"], constants["gradient_bits"], kept
    )
    launch.constants = constants
    launch.grid = (2, 1, 1)
    launch(x, dy, problem.weight, problem.states, table, kept)
    if constants["exact"] and launch.spilled:
        raise SpilledError


def _problem(
    rule: Rule, case: Case, shape: tuple[int, int], weight: torch.dtype, states: Sequence[torch.dtype | None]
) -> Problem:
    """On the CPU, whatever the default device: random, in the types of the launch, the states within their domains."""
    from forge_dsl import testing

    generator = torch.Generator("cpu").manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)

    held: list[Tensor | None] = []
    for state, kind in zip(rule.spec.states, states, strict=True):
        value = state.typical(uniform())
        held.append(None if kind is None else value.to(kind))
    counters = testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0).counters
    return testing.Problem((0.1 * (uniform() - 0.5)).to(weight), held, counters)


def _integers(shape: tuple[int, int], seed: int) -> Tensor:
    """Small whole numbers: their products are summed exactly, and the gradient is the same in every order."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device="cpu").float()


def _table(rule: Rule, case: Case, problem: Problem) -> Tensor:
    from forge_dsl import testing

    return testing.next_table(rule, case, problem).cpu()


def _laid(tensor: Tensor, device: torch.device, apart: int) -> Tensor:
    """A copy on the device, its rows `apart` elements from each other."""
    rows, columns = tensor.shape
    memory = torch.zeros(rows, columns + apart, device=device, dtype=tensor.dtype)
    view = memory[:, :columns]
    view.copy_(tensor)
    return view


def _reference(rule: Rule, case: Case, problem: Problem, grad: Tensor, table: Tensor) -> None:
    """One step, in fp32 from what is stored, each tensor stored once."""
    state = {name: tensor.float() for name, tensor in problem.tensors(rule) if name != "weight"}
    weight, new = rule.reference(problem.weight.float(), grad, state, table, *case.switches)
    for name, tensor in problem.tensors(rule):
        tensor.copy_(weight if name == "weight" else new[name])


__all__ = ["FLIPS", "beyond_rounding", "disagreement", "holds", "is_settled"]
