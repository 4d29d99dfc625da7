"""Compile the Hopper kernel of every optimizer with no GPU present; registers, shared memory, spills and ptxas
warnings.

    python benchmarks/hopper_registers.py              # the shipped configurations; exit 1 if one spills
    python benchmarks/hopper_registers.py --full       # every combination of flags too
    python benchmarks/hopper_registers.py --usual      # only what most models have

What must hold of each shipped configuration: no spilled register, no stack frame, at most 168 registers, `wgmma` not
serialised, weight and states accessed 16 bytes a thread (8 of 8-bit codes), shared memory within a multiprocessor's
227 KiB.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = "0"

OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
SHARED_LIMIT = 232_448
_WEIGHTS_IN_CODES = ("fp8 W", "fp8 W, int8", "fp8 W, fp8")
REGISTER_LIMIT = 168


class Stand:
    """A tensor as far as compiling needs one: shape, strides, type, and an aligned address."""

    def __init__(self, rows: int, columns: int, dtype: Any) -> None:
        self.shape, self.dtype = (rows, columns), dtype

    def stride(self) -> tuple[int, int]:
        """Of a contiguous matrix."""
        return self.shape[1], 1

    def data_ptr(self) -> int:
        """Divisible by 16."""
        return 256

    def element_size(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)


def no_device() -> None:
    """Let Triton compile for sm_90a without asking for a device."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Properties:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_LIMIT, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    class Driver:
        utils = Properties

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

    driver.set_active(Driver())


@dataclass(frozen=True)
class Configuration:
    """One kernel: an optimizer's case, stored types, shape, and the knobs."""

    stem: str
    case: Any
    weight: Any
    state: Any
    tokens: int
    columns: int = 4096
    operand: Any = None
    exact: bool = False
    gradient_bits: int = 24
    kept: str = "plain"

    def __str__(self) -> str:
        types = f"{str(self.weight)[6:]}/{str(self.state)[6:]}"
        more = (" exact" if self.exact else "") + (f", {self.kept}" if self.kept != "plain" else "")
        return f"{self.stem} {self.case} {types} T={self.tokens} I={self.columns} {self.gradient_bits} bits{more}"


def storage(kept: str, there: tuple[bool, ...], rows: int, columns: int) -> Any:
    """How tensors are kept, with stand-ins beside them. there: which states exist."""
    import torch

    from forge_dsl.runtime.storage import BLOCK_WISE, Storage

    states: tuple[str, ...] = ("plain",) * len(there)
    draws, weight = (False,) * (1 + len(there)), "plain"
    extras: list[Any] = [None] * (1 + len(there))
    if kept == "rounding W":
        draws = (True, *draws[1:])
    elif kept == "rounding":
        draws = (True, *there)
    elif kept.startswith("fp8 W"):
        # The weight in codes; its states are bf16, or in codes too.
        form = kept.removeprefix("fp8 W").lstrip(", ") or "plain"
        draws, weight, states = (True, *there), "fp8", tuple(form if present else "plain" for present in there)
        scales = Stand(-(-columns // 64), rows, torch.uint8)
        extras = [scales, *(scales if present and form != "plain" else None for present in there)]
    elif kept in BLOCK_WISE:
        draws, states = (True, *there), tuple(kept if present else "plain" for present in there)
        scales = Stand(-(-columns // 64), rows, torch.uint8)
        extras = [None, *(scales if present else None for present in there)]
    elif kept in ("bf16+8", "bf16+16"):
        draws, weight = (kept == "bf16+8", *there), kept
        extras[0] = Stand(rows, columns, torch.int8 if kept == "bf16+8" else torch.int16)
    return Storage((weight, *states), draws, tuple(extras))


def compiled(one: Configuration) -> Any:
    """The compiled kernel of a configuration, as the launcher would have it."""
    import torch

    from forge_dsl.runtime import hopper
    from forge_dsl.runtime.storage import BLOCK_WISE

    rule = importlib.import_module(f"generated.{one.stem}").RULE
    rows = 4096 if one.columns % hopper.TILE_I == 0 else 4104
    there = tuple(map(bool, rule.present(*one.case.switches)))
    kept = storage(one.kept, there, rows, one.columns)
    weight = Stand(rows, one.columns, torch.uint8 if kept.formats[0] == "fp8" else one.weight)
    state = torch.uint8 if any(form in BLOCK_WISE for form in kept.formats[1:]) else one.state
    states = [Stand(rows, one.columns, state) if present else weight for present in there]
    extras = tuple(weight if extra is None else extra for extra in kept.extras)
    even = rows % hopper.TILE_O == 0 and one.columns % hopper.TILE_I == 0
    stored = (weight, *(tensor for tensor, present in zip(states, there, strict=True) if present))
    chosen = hopper.plan(one.tokens, stored, kept, not even, one.exact, one.gradient_bits)
    kind = one.operand or torch.bfloat16
    stride = -(-one.columns // 8) * 8
    dy = hopper.Operand((one.tokens, rows), (rows, 1), (chosen.block_t, hopper.TILE_O), kind)
    x = hopper.Operand((one.tokens, one.columns), (stride, 1), (chosen.block_t, chosen.width), kind)
    names = [switch.name for switch in rule.spec.switches]
    switches = dict(zip(names, one.case.switches, strict=True))
    constants = hopper.configuration(switches, one.columns, even, True, one.exact, one.gradient_bits, chosen, kept)
    return rule.hopper_kernel.warmup(
        dy.descriptor(Stand(*dy.shape, kind)),
        x.descriptor(Stand(*x.shape, kind)),
        weight,
        *states,
        extras,
        Stand(1, 16, torch.float32),
        *(one.tokens, rows, one.columns, stride, stride),
        **constants,
        **hopper.options(one.exact, chosen),
        grid=(132, 1, 1),
    )


@dataclass(frozen=True)
class Report:
    """What ptxas says about a kernel, and how it accesses global memory."""

    registers: int
    spilled: int
    stack: int
    shared: int
    warnings: tuple[str, ...]
    vectors: int
    scalars: int

    @property
    def good(self) -> bool:
        """What a shipped configuration must be."""
        fits = self.registers <= REGISTER_LIMIT and self.shared <= SHARED_LIMIT
        return fits and not (self.spilled or self.stack or self.warnings or self.scalars)


def report(kernel: Any, eight_bits: bool = False) -> Report:
    """Assemble the PTX again with ptxas's own report."""
    text = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        command = [_ptxas(text), "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        return sum(int(value) for value in re.findall(pattern, found))

    warnings = tuple(line.strip() for line in found.splitlines() if re.search(r"warning|C75\d\d", line))
    accesses = re.findall(r"(?:ld|st)\.global\S*", text)
    # The scalars of a step are read one by one, with 32 bits; nothing else is. Of 8-bit codes a thread has 64 bits, and
    # scales go by the byte.
    usual = (".v4.b32", ".v2.b32", ".b8") if eight_bits else (".v4.b32",)
    narrow = [a for a in accesses if not a.endswith(usual) and a != "ld.global.b32"]
    return Report(
        registers=max(map(int, re.findall(r"Used (\d+) registers", found))),
        spilled=number(r"(\d+) bytes spill stores"),
        stack=number(r"(\d+) bytes stack frame"),
        shared=kernel.metadata.shared,
        warnings=warnings,
        vectors=sum(a.endswith(".v4.b32") for a in accesses),
        scalars=len(narrow),
    )


def _ptxas(text: str) -> str:
    """An assembler of Triton's own that knows this version of PTX."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    version = re.search(r"^\.version (\d+)\.(\d+)", text, re.MULTILINE)
    assert version is not None
    newest = tuple(map(int, version.groups())) > (8, 7)
    names = ("ptxas-blackwell", "ptxas") if newest else ("ptxas", "ptxas-blackwell")
    return next(str(folder / name) for name in names if (folder / name).exists())


def shipped() -> Iterator[Configuration]:
    """Default flags, with every state that arguments decide about: bf16 and fp32 states, few and many tokens,
    borders."""
    import torch

    for stem, case in _defaults():
        for state in (torch.bfloat16, torch.float32):
            for tokens, columns in ((512, 4096), (2048, 4096), (512, 4104), (2048, 4104)):
                yield Configuration(stem, case, torch.bfloat16, state, tokens, columns)
        for bits in (16, 20, 32):
            yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 2048, gradient_bits=bits)
            yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 512, gradient_bits=bits, kept="rounding W")
        yield Configuration(stem, case, torch.bfloat16, torch.float32, 512, 4104, gradient_bits=32)
        yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 512, gradient_bits=32, kept="int8")
        # With fp32 states NAdam spills, and gives way to the portable kernel.
        yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 512, gradient_bits=32, exact=True)
        yield Configuration(stem, case, torch.float32, torch.float32, 2048)
        for state in (torch.bfloat16, torch.float32):
            for columns in (4096, 4104):
                yield Configuration(stem, case, torch.bfloat16, state, 512, columns, kept="rounding W")
        for kept in ("rounding", "int8", "fp8", "bf16+8", "bf16+16", *_WEIGHTS_IN_CODES):
            for columns in (4096, 4104):
                yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 512, columns, kept=kept)
        for kept in ("rounding W", "rounding", "int8", "fp8", "bf16+8"):
            yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 2048, kept=kept)
        # With this many tokens a warp of its own loads the operands of these too.
        yield Configuration(stem, case, torch.bfloat16, torch.float32, 4096)
        for kept in ("int8", "fp8", *_WEIGHTS_IN_CODES):
            yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, 4096, kept=kept)


def usual() -> Iterator[Configuration]:
    """What most models have: bf16 weights, with bf16 states rounded or not, fp32 and int8 states; few and many
    tokens."""
    import torch

    for stem, case in _defaults():
        for tokens in (512, 2048):
            for kept in ("plain", "rounding", "int8"):
                yield Configuration(stem, case, torch.bfloat16, torch.bfloat16, tokens, kept=kept)
            yield Configuration(stem, case, torch.bfloat16, torch.float32, tokens)


def _defaults() -> Iterator[tuple[str, Any]]:
    from forge_dsl import testing

    for stem in OPTIMIZERS:
        rule = importlib.import_module(f"generated.{stem}").RULE
        plain = [case for case in testing.cases(rule) if not any(case.flags.values())]
        yield stem, max(plain, key=lambda case: sum(rule.present(*case.switches)))


def everything() -> Iterator[Configuration]:
    """Every combination of switches, with narrow and wide tensors, whole tiles and borders."""
    import torch

    from forge_dsl import testing

    narrow, wide = torch.bfloat16, torch.float32
    for stem in OPTIMIZERS:
        for case in testing.cases(importlib.import_module(f"generated.{stem}").RULE):
            for weight, state in ((narrow, narrow), (narrow, wide), (wide, wide)):
                for tokens, columns in ((512, 4096), (2048, 4104), (4096, 4096)):
                    yield Configuration(stem, case, weight, state, tokens, columns)
            for kept in ("rounding W", "rounding", "int8", "fp8", *_WEIGHTS_IN_CODES):
                for tokens in (512, 2048, 4096):
                    yield Configuration(stem, case, narrow, narrow, tokens, kept=kept)


def main() -> None:
    """Compile and report; exit 1 if a configuration that must not spill does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all combinations of flags")
    parser.add_argument("--usual", action="store_true", help="only what most models have")
    parser.add_argument("--only", help="one optimizer")
    arguments = parser.parse_args()
    no_device()
    from forge_dsl.runtime import gluon_support

    if not gluon_support.AVAILABLE:
        raise SystemExit(f"cannot compile for Hopper: {gluon_support.REASON}")
    import triton

    print(f"triton {triton.__version__}, sm_90a")
    bad = 0
    for one in everything() if arguments.full else usual() if arguments.usual else shipped():
        if arguments.only and one.stem != arguments.only:
            continue
        found = report(compiled(one), one.kept in ("int8", "fp8", "bf16+8", *_WEIGHTS_IN_CODES))
        bad += not found.good
        print(
            f"{'ok ' if found.good else 'BAD'} {found.registers} registers, {found.spilled} bytes spilled, "
            f"{found.shared} bytes shared, accesses of 16 bytes {found.vectors}, narrower {found.scalars}: {one}"
            + "".join(f"\n    {line}" for line in found.warnings),
            flush=True,
        )
    if bad:
        raise SystemExit(f"{bad} configurations spill, are serialised or access memory narrowly")


if __name__ == "__main__":
    main()
