"""`device_hopper_formats` and `device_handover` on a CPU: source with a stand-in for Gluon, assembly step by step.

A block is a numpy array with its dtype; a layout is nothing. Sums of fp32 are rounded one by one, not fused.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_dsl.runtime import device_formats, device_handover, device_hopper_formats

Words = np.ndarray
_FLOAT = np.float32


class Block:
    """A tensor of Gluon's, as far as these functions use one."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype.type
        self.type = types.SimpleNamespace(layout=None, element_ty=self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Block:
        """In another type: by value, or as the same bits. Blocks of uint16 are bf16 by their bits."""
        if not bitcast and (self.dtype, dtype) == (_FLOAT, np.uint16):
            return Block(_upper_halves(self.values))
        if not bitcast and (self.dtype, dtype) == (np.uint16, _FLOAT):
            return Block((self.values.astype(np.uint32) << np.uint32(16)).view(_FLOAT))
        return Block(self.values.view(dtype) if bitcast else self.values.astype(dtype))

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.values.reshape(shape))

    def permute(self, *order: int) -> Block:
        return Block(self.values.transpose(*order))

    def split(self) -> tuple[Block, Block]:
        return Block(self.values[..., 0]), Block(self.values[..., 1])

    def broadcast_to(self, shape: Any) -> Block:
        return Block(np.broadcast_to(self.values, shape))

    def __getitem__(self, key: Any) -> Block:
        return Block(self.values[key])

    def __neg__(self) -> Block:
        return Block(-self.values)


def _operator(name: str) -> Callable[..., Block]:
    def apply(a: Block, b: Any) -> Block:
        with np.errstate(all="ignore"):
            return Block(getattr(np.asarray(a.values), name)(_plain(b, a.dtype)))

    return apply


def _plain(value: Any, like: Any) -> Any:
    return value.values if isinstance(value, Block) else like(value)


for _name in ("add", "sub", "mul", "and", "or", "xor", "rshift", "lshift", "lt", "ge", "eq"):
    setattr(Block, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("add", "mul", "sub"):
    setattr(Block, f"__r{_name}__", _operator(f"__r{_name}__"))


def _where(condition: Block, a: Any, b: Any) -> Block:
    like = next((side.dtype for side in (a, b) if isinstance(side, Block)), np.int32)
    return Block(np.where(condition.values, _plain(a, like), _plain(b, like)))


def _reduce(x: Block, axis: int, combine: Callable[[Block, Block], Block]) -> Block:
    found = Block(x.values.take(0, axis))
    for index in range(1, x.shape[axis]):
        found = combine(found, Block(x.values.take(index, axis)))
    return found


def _inline(text: str, constraints: str, arguments: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Run assembly on groups of `pack` neighbouring elements; elements narrower than 32 bits share registers.

    dtype: of the result, or a tuple of those of several. An argument that is a number stands for a block of it.
    """
    shape = arguments[0].shape
    inputs = []
    for argument in arguments:
        values = np.broadcast_to(np.asarray(getattr(argument, "values", argument)), shape)
        values = values if values.dtype.itemsize <= 4 else values.astype(np.int32)
        inputs += list(np.ascontiguousarray(values).reshape(-1, pack).view(np.uint32).T)
    outputs = constraints.split(",")
    results = assembled(text, sum(part.startswith("=") for part in outputs), inputs)
    found = []
    for kind in dtype if isinstance(dtype, tuple) else (dtype,):
        registers = pack * np.dtype(kind).itemsize // 4
        taken, results = results[:registers], results[registers:]
        found.append(Block(np.stack(taken, axis=1).view(kind).reshape(shape)))
    assert not results
    return tuple(found) if isinstance(dtype, tuple) else found[0]


def assembled(text: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """The values of `$0` to `$outputs - 1` after PTX `text`, on arrays of uint32."""
    registers: dict[str, Any] = {f"${outputs + i}": np.ascontiguousarray(value) for i, value in enumerate(inputs)}
    shape = registers[f"${outputs}"].shape

    def read(name: str) -> Any:
        if name.startswith("0f"):
            return np.full(shape, int(name[2:], 16), np.uint32)
        if re.fullmatch(r"0x[0-9A-Fa-f]+|[0-9]+", name):
            return np.full(shape, int(name, 0), np.uint32)
        return registers[name]

    # Without the braces around all of it; others are vectors.
    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        match = re.fullmatch(r"(?:@(!?)(\w+) )?([\w.]+) (.*)", line.strip(), re.DOTALL)
        if match is None or match[3] == ".reg":
            assert not line.strip() or match is not None, line
            continue
        inverted, guard, operation, rest = match.groups()
        halves = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest)
        if halves is not None:
            assert operation == "mov.b32" and not guard
            registers[halves[1]] = read(halves[3]) & np.uint32(0xFFFF)
            registers[halves[2]] = read(halves[3]) >> np.uint32(16)
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        value = _EXECUTE[operation](*(read(name) for name in names))
        if guard:
            keep = ~registers[guard] if not inverted else registers[guard]
            value = np.where(keep, registers[target], value)
        registers[target] = value
    return [registers[f"${i}"] for i in range(outputs)]


def _on_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*words: Words) -> Any:
        with np.errstate(all="ignore"):
            found = function(*(word.view(_FLOAT) for word in words))
        if found.dtype == bool:
            return found
        # What the hardware makes of NaN.
        return np.where(np.isnan(found), np.uint32(0x7FFFFFFF), found.astype(_FLOAT).view(np.uint32))

    return apply


def _down(exact: np.ndarray) -> np.ndarray:
    """float64 rounded down to fp32."""
    near = exact.astype(_FLOAT)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, _FLOAT(-np.inf)), near)


def _permute(a: Words, b: Words, selector: Words) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for byte in range(4):
        place = int(selector.flat[0]) >> 4 * byte & 15
        taken = both >> np.uint64(8 * (place & 7)) & np.uint64(255)
        # The highest bit of a place asks for eight times the sign.
        taken = (taken >> np.uint64(7)) * np.uint64(255) if place & 8 else taken
        found |= (taken << np.uint64(8 * byte)).astype(np.uint32)
    return found


def _from_e4m3(pair: Words) -> Words:
    """Two float8 e4m3fn numbers as two fp16 numbers."""
    bytes_of = torch.from_numpy(np.stack([pair & 0xFF, pair >> 8], axis=-1).astype(np.uint8))
    return bytes_of.view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint32)[..., 0]


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            sides = [side if row >> bit & 1 else ~side for side, bit in ((a, 2), (b, 1), (c, 0))]
            found |= sides[0] & sides[1] & sides[2]
    return found


_EXECUTE: dict[str, Callable[..., Any]] = {
    "mov.f32": lambda a: a,
    "mov.b32": lambda a: a,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.view(np.int32)).view(np.uint32),
    "prmt.b32": _permute,
    "lop3.b32": _lop3,
    "add.f32": _on_floats(lambda a, b: a + b),
    "mul.rn.f32": _on_floats(lambda a, b: a * b),
    "mul.rn.ftz.f32": _on_floats(lambda a, b: np.where(np.abs(a.astype(np.float64) * b) < 2.0**-126, a * b * 0, a * b)),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(_FLOAT).view(np.uint32),
    "add.rm.f32": _on_floats(lambda a, b: _down(a.astype(np.float64) + b)),
    "fma.rm.f32": _on_floats(lambda a, b, c: _down(a.astype(np.float64) * b + c)),
    "sqrt.approx.ftz.f32": _on_floats(np.sqrt),
    "setp.geu.f32": _on_floats(lambda a, b: ~(a < b)),
    "setp.lt.f32": _on_floats(lambda a, b: a < b),
    "setp.ge.and.f32": lambda a, b, p: (a.view(_FLOAT) >= b.view(_FLOAT)) & p,
}


def _nan_or_larger(a: Block, b: Any, propagate_nan: Any = None) -> Block:
    both = np.maximum if propagate_nan or a.dtype != _FLOAT else np.fmax
    return Block(both(a.values, _plain(b, a.dtype)))


class Plane:
    """Shared memory: an array of slices, each of which is stored and loaded whole."""

    def __init__(self, values: Any) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype.type
        self.layout = None

    def index(self, place: Any) -> Plane:
        return Plane(self.values[int(getattr(place, "values", place))])

    def store(self, block: Block) -> None:
        assert block.dtype == self.dtype
        self.values[...] = block.values

    def load(self, layout: Any) -> Block:
        return Block(self.values.copy())

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Plane:
        return Plane(self.values.reshape(shape))


def _upper_halves(x: Any) -> Any:
    """fp32 rounded to nearest bf16, ties to even, as its bits; NaN stays one."""
    words = x.view(np.uint32).astype(np.uint64)
    rounded = (words + np.uint64(0x7FFF) + (words >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint64(0x7FFF), rounded).astype(np.uint16)


def _load() -> dict[str, Any]:
    """The functions of `device_hopper_formats`, on blocks."""
    gl = _gluon()
    mixing: dict[str, Any] = {"tl": None, "triton": types.SimpleNamespace(jit=lambda f: f)}
    _define(device_formats, mixing)
    found: dict[str, Any] = {
        "gl": gl,
        "gluon": types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f),
        "tl": types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=True)),
        "device_formats": types.SimpleNamespace(mix=mixing["mix"]),
        "AVAILABLE": False,
    }
    _define(device_hopper_formats, found)
    return found


def _load_handover() -> dict[str, Any]:
    """The functions of `device_handover`, on blocks and planes."""
    found: dict[str, Any] = {
        "gl": _gluon(),
        "gluon": types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f),
        "PUBLIC_REINTERPRET": True,
    }
    _define(device_handover, found)
    return found


def _gluon() -> Any:
    """What stands for Gluon's language."""
    return types.SimpleNamespace(
        constexpr=object,
        int16=np.int16,
        int32=np.int32,
        uint32=np.uint32,
        uint8=np.uint8,
        float32=np.float32,
        bfloat16=np.uint16,
        float16=np.float16,
        where=_where,
        abs=lambda x: Block(np.abs(x.values)),
        max=lambda x, axis: Block(x.values.max(axis)),
        reduce=_reduce,
        maximum=_nan_or_larger,
        minimum=lambda a, b: Block(np.fmin(a.values, a.dtype(b))),
        sqrt_rn=lambda x: Block(np.sqrt(x.values)),
        arange=lambda a, b, layout: Block(np.arange(a, b, dtype=np.int32)),
        SliceLayout=lambda *_: None,
        convert_layout=lambda x, *_, **__: x,
        full_like=lambda x, value: Block(np.full_like(x.values, value)),
        join=lambda a, b: Block(np.stack([a.values, b.values], axis=-1)),
        inline_asm_elementwise=_inline,
        NVMMASharedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        allocate_shared_memory=lambda dtype, shape, layout: Plane(np.zeros(shape, dtype)),
    )


def _define(module: Any, names: dict[str, Any]) -> None:
    """Run a module's source with `names` in place of what it imports."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    source = re.sub(r"^from forge_dsl.*$", "", source, flags=re.MULTILINE)
    exec(compile(source, module.__file__, "exec"), names)


FUNCTIONS = _load()
HANDOVER = _load_handover()
