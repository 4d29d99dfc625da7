"""Launching the Hopper kernel: what it can take, and a launch that costs little on the host.

Triton's own launch path examines every argument each time and costs as much as a small kernel runs. Here everything
that follows from types, shapes and strides is worked out once per combination and kept. A launch then takes the
addresses and calls the compiled kernel (`direct_launch`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime import direct_launch, gluon_support
from forge_dsl.runtime.devices import on
from forge_dsl.runtime.gradient_bits import CHOICES as GRADIENT_BITS
from forge_dsl.runtime.hopper_plan import Plan, plan
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import BLOCK_WISE, Storage, plain
from forge_dsl.runtime.tiles import multiprocessors

# With FORGE_DSL_PORTABLE=1 in the environment the portable kernel is used everywhere.
ENABLED = os.environ.get("FORGE_DSL_PORTABLE", "0") in {"", "0"}
# Rows of a tile, and columns of a wide one; a narrow one has half of them.
TILE_O, TILE_I = 128, 256
_SLICE_COLUMNS = 64
_GROUP = 4
# A thread's at the start, without a warp that loads and with one: 12 or 16 warps fill a multiprocessor.
_REGISTERS = {False: 168, True: 128}
_OPERANDS = (torch.bfloat16, torch.float16)
# Types of the bits beside a bf16 weight.
_BESIDE = {"bf16+8": torch.int8, "bf16+16": torch.int16}
_LIMIT = 2**31


def suits(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    gradient_bits: int = 24,
    kept: Storage | None = None,
) -> str | None:
    """Why the Hopper kernel cannot take this update, or None where it can."""
    if rule.hopper_kernel is None:
        return gluon_support.REASON
    if weight.device.type != "cuda" or _capability(weight.device) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if gradient_bits not in GRADIENT_BITS:
        return f"it hands the gradient over in {' or '.join(map(str, GRADIENT_BITS))} bits, not {gradient_bits}"
    if x.dtype != dy.dtype or x.dtype not in _OPERANDS:
        return f"it takes operands that are both bfloat16 or both float16, not {x.dtype} and {dy.dtype}"
    if x.shape[0] == 0:
        return "there are no tokens"
    for name, operand in (("x", x), ("dy", dy)):
        if _row_stride(operand) is None:
            return f"{name} has rows that TMA cannot load: {_describe(operand)}"
    present = [state for state in states if state is not None]
    kept = kept or plain(len(states))
    for index, stored in enumerate((weight, *states)):
        reason = None if stored is None else _unfit(stored, index, kept.formats[index], kept.extras[index])
        if reason is not None:
            return f"{'a state' if index else 'the weight'} {reason}"
    if len({_row_stride(state) for state in present}) > 1:
        return "the states are laid out differently"
    return None


def _unfit(stored: Tensor, index: int, form: str, extra: Tensor | None) -> str | None:
    """Why a tensor cannot be read and written as it is kept. index: 0 for the weight."""
    if form in BLOCK_WISE:
        blocks = -(-stored.shape[1] // _SLICE_COLUMNS)
        known = form == "fp8" or index != 0
        if not known or stored.dtype != torch.uint8 or extra is None or extra.dtype != torch.uint8:
            return f"is stored as {form} in {stored.dtype}"
        if stored.shape[1] % 4:
            return f"is stored as {form} in rows of {stored.shape[1]} bytes, which do not end with a 32-bit word"
        if tuple(extra.shape) != (blocks, stored.shape[0]) or not extra.is_contiguous():
            return f"has scales of shape {list(extra.shape)}, strides {list(extra.stride())}"
    elif form in _BESIDE:
        if index or stored.dtype != torch.bfloat16 or extra is None or extra.dtype != _BESIDE[form]:
            return f"is stored as {form} in {stored.dtype}"
        if extra.stride() != stored.stride() or extra.data_ptr() % 16:
            return f"has bits beside it that lie otherwise: {_describe(extra)}"
        if form == "bf16+8" and stored.shape[1] % 4:
            return f"has rows of {stored.shape[1]} bytes beside it, which do not end with a 32-bit word"
    elif form != "plain" or stored.dtype not in DTYPES:
        return f"is stored as {stored.dtype}"
    if _row_stride(stored) is None:
        return f"cannot be read 16 bytes at a time: {_describe(stored)}"
    return None


def find(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    switches: Sequence[bool],
    kept: Storage | None = None,
    exact: bool = False,
    gradient_bits: int = 24,
) -> Launch | None:
    """The launch to use, or None where the portable kernel is the better one or the only one.

    That is so too where the weight has tiles for fewer than half of the multiprocessors, of which smaller tiles occupy
    more, and where rows end within 16 bytes: their masks take an access for each element, and registers that spill.
    In exact arithmetic it is so too where a tensor is stored otherwise than as plain numbers, whose conversion spills;
    the gradient has all its 32 bits there, else at least `gradient_bits`.
    """
    if not ENABLED or weight.device.type != "cuda" or _capability(weight.device) != (9, 0):
        return None
    if rule.hopper_kernel is None:
        _say_once(gluon_support.REASON)
        return None
    kept = kept or plain(len(states))
    if exact and set(kept.formats) != {"plain"}:
        return None
    found = _look_up(rule, x, dy, weight, states, switches, exact, 32 if exact else gradient_bits, kept)
    return found if isinstance(found, Launch) and found.worthwhile else None


@lru_cache(maxsize=1)
def _say_once(reason: str) -> None:
    warnings.warn(f"The kernel for Hopper is not used, the portable one is: {reason}", RuntimeWarning, stacklevel=2)


def _row_stride(tensor: Tensor) -> int | None:
    """Elements between rows where rows can be read 16 bytes at a time, else None. A single row may end anywhere."""
    rows, columns = tensor.shape
    down, across = tensor.stride()
    if tensor.data_ptr() % 16 or (across != 1 and columns != 1):
        return None
    if rows == 1:
        down = -(-columns // 8) * 8
    # Offsets within a tile are of 32 bits.
    return down if down % 8 == 0 and columns <= down < _LIMIT // TILE_O else None


def _describe(tensor: Tensor) -> str:
    return f"strides {list(tensor.stride())}, address {tensor.data_ptr() % 16} mod 16"


def linear_step_hopper(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    table: Tensor,
    switches: Sequence[bool],
    exact: bool = False,
    gradient_bits: int = 24,
    kept: Storage | None = None,
) -> None:
    """One fused step of a linear weight, in place. Arguments as of `launch.linear_step_portable`.

    exact: the update's arithmetic; the gradient is rounded to `gradient_bits` either way. Raises ValueError if this
    kernel cannot take the update (see `suits`), before anything is changed.
    """
    kept = kept or plain(len(states))
    found = _look_up(rule, x, dy, weight, states, switches, exact, gradient_bits, kept)
    if isinstance(found, str):
        raise ValueError(f"the Hopper kernel cannot take this update: {found}")
    found(x, dy, weight, states, table, kept)


def _look_up(
    rule: Rule,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    states: Sequence[Tensor | None],
    switches: Sequence[bool],
    exact: bool,
    gradient_bits: int,
    kept: Storage,
) -> Launch | str:
    """The launch for tensors like these, or why there is none; worked out once."""
    key = (
        rule.hopper_kernel,
        x.dtype,
        x.shape,
        x.stride(),
        x.data_ptr() % 16,
        dy.dtype,
        dy.shape,
        dy.stride(),
        dy.data_ptr() % 16,
        weight.device,
        *[None if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in (weight, *states, *kept.extras)],
        kept.formats,
        kept.draws,
        *switches,
        exact,
        gradient_bits,
    )
    found = _FOUND.get(key)
    if found is None:
        reason = suits(rule, x, dy, weight, states, gradient_bits, kept)
        if len(_FOUND) >= _KEPT:
            _FOUND.clear()
        found = reason or Launch(rule, x, dy, weight, states, switches, exact, gradient_bits, kept)
        _FOUND[key] = found
    return found


class Launch:
    """A launch of one kernel at given types, shapes and strides; what is left are the addresses."""

    def __init__(
        self,
        rule: Rule,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        states: Sequence[Tensor | None],
        switches: Sequence[bool],
        exact: bool,
        gradient_bits: int,
        kept: Storage,
    ) -> None:
        self.kernel = rule.hopper_kernel
        rows, columns = weight.shape
        present = [state for state in states if state is not None]
        even = rows % TILE_O == 0 and columns % TILE_I == 0
        chosen = plan(x.shape[0], (weight, *present), kept, not even, exact, gradient_bits)
        state = present[0] if present else weight
        self.sizes = (x.shape[0], rows, columns, _row_stride(weight), _row_stride(state))
        self.dy, self.x = operand(dy, chosen.block_t, TILE_O), operand(x, chosen.block_t, chosen.width)
        names = [switch.name for switch in rule.spec.switches]
        alike = self.sizes[3] == self.sizes[4]
        named = dict(zip(names, switches, strict=True))
        self.constants = configuration(named, columns, even, alike, exact, gradient_bits, chosen, kept)
        self.options = options(exact, chosen)
        tiles = -(-rows // TILE_O) * -(-columns // chosen.width)
        programs = multiprocessors(weight.device)
        self.grid = (min(tiles, programs), 1, 1)
        self.worthwhile = tiles >= programs // 2 and columns % 8 == 0
        self.device = weight.device.index
        self.direct: direct_launch.Direct | None = None
        # Registers that the compiled kernel spills; known from the first launch on.
        self.spilled = 0

    def __call__(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        states: Sequence[Tensor | None],
        table: Tensor,
        kept: Storage,
    ) -> None:
        """Launch on the current stream of the weight's device."""
        again = self.again(weight, states, table, kept)
        if again is not None and again(dy.data_ptr(), x.data_ptr()):
            return
        descriptors = self.dy.descriptor(dy), self.x.descriptor(x)
        tensors, extras = _in_place(weight, states, kept)
        with on(weight.device):
            compiled = self.kernel[self.grid](
                *descriptors, *tensors, extras, table, *self.sizes, **self.constants, **self.options
            )
        self.spilled = getattr(compiled, "n_spills", 0) or 0
        if self.direct is None:
            self.direct = direct_launch.of(compiled, self.device, self.grid, (self.dy, self.x))

    def again(
        self, weight: Tensor, states: Sequence[Tensor | None], table: Tensor, kept: Storage
    ) -> direct_launch.Again | None:
        """The same launch on operands at other addresses, the first of them dy; None before the first launch.

        Good as long as the tensors are where they are.
        """
        if self.direct is None:
            return None
        return self.direct.bind((*addresses_of(weight, states, table, kept), *self.sizes, *self.constants.values()))


def addresses_of(weight: Tensor, states: Sequence[Tensor | None], table: Tensor, kept: Storage) -> tuple[Any, ...]:
    """Of weight and states, of what lies beside each, and of the table."""
    tensors, extras = _in_place(weight, states, kept)
    return (*[t.data_ptr() for t in tensors], tuple([extra.data_ptr() for extra in extras]), table.data_ptr())


def _in_place(
    weight: Tensor, states: Sequence[Tensor | None], kept: Storage
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Weight and states, and what is beside each. The weight stands, unread and unwritten, for what there is not."""
    tensors = [weight if tensor is None else tensor for tensor in (weight, *states)]
    return tensors, tuple([weight if extra is None else extra for extra in kept.extras])


_FOUND: dict[tuple[Any, ...], Launch | str] = {}
_KEPT = 4096


@dataclass(frozen=True)
class Operand:
    """A matrix for TMA without its address: shape, elements between rows, and the block of one load."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype

    def descriptor(self, tensor: Tensor) -> Any:
        """What Triton's launch makes a TMA descriptor of."""
        gl = gluon_support.gl
        kind = gl.float16 if self.dtype == torch.float16 else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), kind)
        return gluon_support.TensorDescriptor(tensor, list(self.shape), list(self.strides), list(self.block), layout)


def operand(tensor: Tensor, block_t: int, width: int) -> Operand:
    """x or dy [tokens, columns], loaded in blocks of block_t x width."""
    tokens, columns = tensor.shape
    stride = _row_stride(tensor)
    assert stride is not None
    return Operand((tokens, columns), (stride, 1), (block_t, width), tensor.dtype)


def configuration(
    switches: dict[str, bool],
    columns: int,
    even: bool,
    alike: bool,
    exact: bool,
    gradient_bits: int,
    chosen: Plan,
    kept: Storage,
) -> dict[str, Any]:
    """The compile-time parameters of a kernel, in the order of its signature."""
    return {
        **switches,
        "exact": exact,
        "formats": kept.formats,
        "draws": kept.draws,
        "even": even,
        "vectors": columns % 8 == 0,
        "alike": alike,
        "gradient_bits": gradient_bits,
        "STAGES": chosen.stages,
        "ROWS": chosen.rows,
        "EVERY": chosen.every,
        "LAST": chosen.last,
        "TOGETHER": chosen.together,
        "AHEAD": chosen.ahead,
        "EAGER": chosen.eager,
        "PAIRS": chosen.pairs,
        "LOADER": chosen.loader,
        "GROUP": _GROUP,
    }


def options(exact: bool, chosen: Plan) -> dict[str, Any]:
    """The compiler's options; its warps are those of the main loop.

    Fusion of products and sums is said explicitly: Triton's default differs by release.
    """
    return {"num_warps": 4 if chosen.narrow else 8, "maxnreg": _REGISTERS[chosen.loader], "enable_fp_fusion": not exact}


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)
