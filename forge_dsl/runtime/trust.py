"""The kernel for Hopper is checked against the reference before it first touches a weight, once per kind of launch.

Gluon is experimental, and a kernel that waits on barriers of its own may fail on a driver or release that nobody has
tried. So before the first launch of each kind in a process (kernel, types, variant, configuration; not shape) the same
compiled kernel updates a small random weight of its own, in several tiles and on few programs, and the result is
compared with the PyTorch reference on the CPU. The reference, and not the portable kernel, because it is printed from
the checked rule and not from the IR that both kernels come from, and compiles nothing. If the kernel disagrees or
raises, the portable kernel takes its place for the rest of the process, with one warning. The reference takes the
gradient with the bits that the kernel hands over, so nothing more is allowed where these are fewer.

What is kept in codes, or with bits beside it, is right where it lies next to the reference's number, on the side that
chance picks. Launched without any check are kernels of a variant that no ordinary arguments reach, which are those of
`testing.cases`.

In exact arithmetic a kernel whose registers spill gives way too, but silently: nothing is wrong with it.

While a CUDA graph is captured nothing can be compared: an unchecked kind is then launched unchecked, as Triton's own
kernels are, and is checked at its next launch outside a capture. A step before the capture, which is needed anyway so
that everything is compiled, does it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.runtime.devices import is_capturing
from forge_dsl.runtime.gradient_bits import handed_over
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import DTYPES, Storage, plain

if TYPE_CHECKING:
    from forge_dsl.testing import Case

# The share of coordinates that may differ by more than rounding: a rule with a jump may take its other side.
FLIPS = 1e-4
_FAST = 1e-5
_ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# The same of codes: where the largest number of a block is all but a power of two, its scale may be on either side.
_FLIPPED_CODES = 1e-3


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
    if case is None:  # no ordinary arguments lead to this variant
        return None
    kept = kept or plain(len(states))
    formats = _formats(rule, (weight, *states), kept)
    even, wanted = constants["even"], dict(constants)
    rows, columns = (4 * hopper.TILE_O, 2 * hopper.TILE_I) if even else (3 * hopper.TILE_O + 40, hopper.TILE_I + 72)
    tokens = hopper_plan.sample_tokens(x.shape[0])
    # The sample and the reference are made on the CPU, whatever the default device is.
    with torch.no_grad(), torch.device("cpu"):
        start = _sample(rule, (rows, columns), formats, kept)
        table = _table(rule, case)
        x_small, dy_small = _integers((tokens, columns), 1), _integers((tokens, rows), 2)
        ours = start.laid(weight.device, 0 if wanted["alike"] else 8)
        x_there, dy_there = (operand.to(weight.device, x.dtype) for operand in (x_small, dy_small))
        # Words of zero for the draws to begin with.
        keyed = torch.cat([table, torch.zeros(1 + len(states))]).to(weight.device)
        _launch(rule, x_there, dy_there, ours, keyed, switches, wanted, ours.kept)
        grad = handed_over((dy_small.double().T @ x_small.double()).float(), wanted["gradient_bits"])
        expected = _reference(rule, case, start, formats, grad, table)
        extras = dict(zip(_names(rule), ours.kept.extras, strict=True))
        for name, got in ours.tensors(rule):
            form, want, beside = formats[name], expected[name], extras[name]
            if beside is None:
                share, most = beyond_rounding(got.cpu(), want.to(got.dtype)), FLIPS
            else:
                decoded = form.decode(got.cpu().contiguous(), beside.cpu())
                share, most = _beyond_neighbours(decoded, want, form), _FLIPPED_CODES
            if share > most:
                return f"{share:.2%} of `{name}` differ from the reference"
    return None


def beyond_rounding(got: Tensor, want: Tensor) -> float:
    """The share of elements that differ by more than rounding in fast arithmetic explains. One device, one type."""
    kind, got, want = want.dtype, got.double(), want.double()
    allowed = _ROUNDING[kind] * torch.maximum(got.abs(), want.abs()) + _slack(want)
    same = (got == want) | (got.isnan() & want.isnan())
    # Next to infinity everything would be near enough.
    near = ((got - want).abs() <= allowed) & got.isfinite() & want.isfinite()
    return 1.0 - (near | same).double().mean().item()


def _beyond_neighbours(got: Tensor, want: Tensor, form: Any) -> float:
    """The share of decoded numbers that no rounding of `want`, fp32, to the format gives, in fast arithmetic."""
    slack = _slack(want)
    ends = [want - slack, want + slack]
    if getattr(form, "nonnegative", False):
        ends[0] = ends[0].clamp(min=0)
    # The draws that take every magnitude down, and those that take it up.
    draws = [torch.full_like(want, draw, dtype=torch.int64) for draw in (0, 0xFFFF)]
    near = torch.stack([form.decode(*form.encode(end, draw)) for end in ends for draw in draws])
    inside = (near.amin(0) <= got) & (got <= near.amax(0))
    # A block that holds something not finite is NaN throughout.
    return 1.0 - (inside | (got.isnan() & near.isnan().any(0))).double().mean().item()


def _slack(want: Tensor) -> Tensor:
    """What fast arithmetic may add to any of these numbers, of which all may be infinite or NaN."""
    return _FAST * torch.where(want.isfinite(), want, 0).abs().max()


def _launch(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    sample: _Sample,
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
        rule, x, dy, sample.weight, sample.states, switches, constants["exact"], constants["gradient_bits"], kept
    )
    launch.constants = constants
    launch.grid = (2, 1, 1)
    launch(x, dy, sample.weight, sample.states, table, kept)
    if constants["exact"] and launch.spilled:
        raise SpilledError


@dataclass
class _Sample:
    """A small weight and its states as they are stored."""

    weight: Tensor
    states: list[Tensor | None]
    kept: Storage

    def tensors(self, rule: Rule) -> Iterator[tuple[str, Tensor]]:
        """What there is, by name."""
        for name, tensor in zip(_names(rule), (self.weight, *self.states), strict=True):
            if tensor is not None:
                yield name, tensor

    def laid(self, device: torch.device, apart: int) -> _Sample:
        """A copy on the device, the rows of states `apart` elements from each other."""
        weight = _laid(self.weight, device, 0)
        states = [None if state is None else _laid(state, device, apart) for state in self.states]
        extras = tuple(None if extra is None else extra.to(device, copy=True) for extra in self.kept.extras)
        return _Sample(weight, states, replace(self.kept, extras=extras))


def _names(rule: Rule) -> tuple[str, ...]:
    return "weight", *rule.spec.state_names


def _formats(rule: Rule, tensors: Sequence[Tensor | None], kept: Storage) -> dict[str, Any]:
    """The format of each tensor that there is, by name; the weight's first."""
    found: dict[str, Any] = {}
    domains = [None, *rule.spec.states]
    for name, tensor, form, state in zip(_names(rule), tensors, kept.formats, domains, strict=True):
        if tensor is not None:
            key = form if form != "plain" else next(key for key, dtype in DTYPES.items() if dtype == tensor.dtype)
            found[name] = registry.of_weight(key) if state is None else registry.of_state(key, state.nonnegative)
    return found


def _sample(rule: Rule, shape: tuple[int, int], formats: dict[str, Any], kept: Storage) -> _Sample:
    """Random, in the formats of the launch, states within their domains."""
    generator = torch.Generator().manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32)

    numbers = {state.name: state.typical(uniform()) for state in rule.spec.states}
    numbers["weight"] = 0.1 * (uniform() - 0.5)
    stored = [formats[name].encode(numbers[name]) if name in formats else (None, None) for name in _names(rule)]
    (weight, *states), extras = zip(*stored, strict=True)
    return _Sample(weight, states, replace(kept, extras=extras))


def _integers(shape: tuple[int, int], seed: int) -> Tensor:
    """Small whole numbers: their products are summed exactly, and the gradient is the same in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _table(rule: Rule, case: Case) -> Tensor:
    """The scalars of the first step, fp32 on the CPU."""
    from forge_dsl import testing

    return testing.next_table(
        rule, case, testing.make_problem(rule, case, (1, 1), torch.float32, torch.float32, 0)
    ).cpu()


def _laid(tensor: Tensor, device: torch.device, apart: int) -> Tensor:
    """A copy on the device, its rows `apart` elements from each other."""
    rows, columns = tensor.shape
    memory = torch.zeros(rows, columns + apart, device=device, dtype=tensor.dtype)
    view = memory[:, :columns]
    view.copy_(tensor)
    return view


def _reference(
    rule: Rule, case: Case, start: _Sample, formats: dict[str, Any], grad: Tensor, table: Tensor
) -> dict[str, Tensor]:
    """What one step in fp32, from what is stored, has to store."""
    extras = dict(zip(_names(rule), start.kept.extras, strict=True))
    held = {name: formats[name].decode(tensor, extras[name]) for name, tensor in start.tensors(rule)}
    weight, new = rule.reference(held.pop("weight"), grad, held, table, *case.switches)
    return {"weight": weight, **new}


__all__ = ["FLIPS", "beyond_rounding", "disagreement", "holds", "is_settled"]
