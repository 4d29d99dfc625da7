"""Compile the portable kernels of every optimizer with no GPU present, for several GPUs; registers, shared memory,
spills.

    python benchmarks/portable_registers.py                        # default flags; exit 1 if one spills
    python benchmarks/portable_registers.py --full                 # every combination of flags too
    python benchmarks/portable_registers.py --capability 80 --only adamw --kernel linear

The kernels are compiled as the launcher would have them: it is given tensors without memory and told of a device, and
what it would launch is compiled. So the tiles are the shipped ones, whatever `choose_tiles` decides. What must hold of
each: no spilled register, no stack frame, and shared memory that the device has.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = "0"

OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
KERNELS = ("linear", "elementwise", "many")


@dataclass(frozen=True)
class Device:
    """What the launcher and the compiler ask about a GPU. shared: bytes that one program may have."""

    name: str
    capability: int
    shared: int
    multiprocessors: int


DEVICES = {
    80: Device("A100", 80, 166_912, 108),
    89: Device("L40S", 89, 101_376, 142),
    90: Device("H200", 90, 232_448, 132),
    100: Device("B200", 100, 232_448, 148),
}


@dataclass(frozen=True)
class Configuration:
    """One launch: an optimizer's case, the kernel, types, tokens, and the side of a square weight.

    in_8_bits: which operands are, "x", "both" (a power of two a row) or "blocks" (both, an fp32 scale for 128 columns).
    """

    stem: str
    case: Any
    kernel: str
    weight: Any
    state: Any
    operand: Any
    tokens: int = 2048
    side: int = 4096
    exact: bool = False
    in_8_bits: str = ""

    def __str__(self) -> str:
        types = "/".join(str(kind)[6:] for kind in (self.operand, self.weight, self.state))
        more = f" T={self.tokens} {self.side}²" if self.kernel == "linear" else ""
        more += f" in 8 bits: {self.in_8_bits}" if self.in_8_bits else ""
        return f"{self.kernel} {self.stem} {self.case} {types}{more}{' exact' if self.exact else ''}"


def stand_in(device: Device) -> None:
    """Let Triton compile for a device that is not there, and the launcher choose its tiles."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from forge_dsl.runtime import launch, tiles

    class Properties:
        @staticmethod
        def get_device_properties(index: int) -> dict[str, int]:
            return {
                "max_shared_mem": device.shared,
                "multiprocessor_count": device.multiprocessors,
                "max_num_regs": 65536,
                "warpSize": 32,
            }

    class Driver:
        utils = Properties

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", device.capability, 32)

        def get_current_device(self) -> int:
            # Triton keeps what it compiled, and for which target, by this number.
            return device.capability

        def get_current_stream(self, index: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

    driver.set_active(Driver())
    tiles.choose_tiles.cache_clear()
    tiles.capability = lambda _: (device.capability // 10, device.shared)
    tiles.multiprocessors = launch.multiprocessors = lambda _: device.multiprocessors


class Compiler:
    """In the place of a kernel: compiles what is launched, and keeps it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names, self.made = kernel, kernel.arg_names, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **named: self.made.append(self.kernel.warmup(*arguments, grid=grid, **named))


def compiled(one: Configuration) -> Any:
    """The kernel that the launcher would launch."""
    import torch

    from forge_dsl.runtime import launch

    rule = importlib.import_module(f"generated.{one.stem}").RULE
    fields = ("linear_kernel", "elementwise_kernel", "many_kernel")
    rule = replace(rule, **{field: Compiler(getattr(rule, field)) for field in fields})
    there = rule.present(*one.case.switches)

    def tensor(kind: Any, *shape: int) -> Any:
        return torch.empty(shape, dtype=kind, device="meta")

    weight = tensor(one.weight, one.side, one.side)
    states = [tensor(one.state, one.side, one.side) if present else None for present in there]
    table = tensor(torch.float32, 16)
    if one.kernel == "linear":
        x = dy = tensor(one.operand, one.tokens, one.side)
        if one.in_8_bits:
            x = in_8_bits(one, torch.float8_e4m3fn)
            dy = dy if one.in_8_bits == "x" else in_8_bits(one, torch.float8_e5m2)
        launch.linear_step_portable(rule, x, dy, weight, states, table, one.case.switches, one.exact)
    elif one.kernel == "elementwise":
        grad = tensor(one.operand, one.side, one.side)
        launch.elementwise_step(rule, weight, grad, states, table, one.case.switches, one.exact)
    else:
        items = [launch.Item(weight, tensor(one.operand, one.side, one.side), states, table)] * 2
        launch.many_step(rule, items, one.case.switches, one.exact)
    (kernel,) = getattr(rule, f"{one.kernel}_kernel").made
    return kernel


def in_8_bits(one: Configuration, kind: Any) -> Any:
    """An operand of the configuration without memory."""
    import torch

    from forge_dsl import Scaled

    width, scales = (-(-one.side // 128), torch.float32) if one.in_8_bits == "blocks" else (1, torch.uint8)
    codes = torch.empty(one.tokens, one.side, dtype=kind, device="meta")
    return Scaled(codes, torch.empty(one.tokens, width, dtype=scales, device="meta"))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes of a multiprocessor. stack: bytes of local memory a thread, where spilled registers go."""

    registers: int
    stack: int
    shared: int
    warps: int

    def good(self, device: Device) -> bool:
        """What a shipped configuration must be."""
        return not self.stack and self.shared <= device.shared


def usage(kernel: Any) -> Usage:
    """As the assembled kernel says itself, through the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def number(name: str) -> int:
        return max(map(int, re.findall(rf"\b{name}:(\d+)", found)))

    stack = max(number("STACK"), number("LOCAL"))
    return Usage(number("REG"), stack, kernel.metadata.shared, kernel.metadata.num_warps)


def shipped(stems: tuple[str, ...]) -> Iterator[Configuration]:
    """Default flags with every state that arguments decide about; each kernel with the types that it is chosen for."""
    import torch

    narrow, wide = torch.bfloat16, torch.float32
    for stem in stems:
        case = default_case(stem)
        for tokens in (512, 2048):
            yield Configuration(stem, case, "linear", narrow, narrow, narrow, tokens)
        for side in (512, 1000, 4097, 4112):
            yield Configuration(stem, case, "linear", narrow, narrow, narrow, 1000, side)
        yield Configuration(stem, case, "linear", narrow, wide, narrow)
        for which in ("x", "both", "blocks"):
            for tokens, side in ((512, 4096), (2048, 4096), (1000, 1000)):
                yield Configuration(stem, case, "linear", narrow, narrow, narrow, tokens, side, in_8_bits=which)
        yield Configuration(stem, case, "linear", narrow, wide, narrow, in_8_bits="both")
        yield Configuration(stem, case, "elementwise", narrow, narrow, wide)
        yield Configuration(stem, case, "elementwise", wide, wide, wide)
        yield Configuration(stem, case, "many", narrow, narrow, narrow)
        yield Configuration(stem, case, "many", wide, wide, wide)


def default_case(stem: str) -> Any:
    """No flag set; of the variants that arguments choose, the one with the most states."""
    from forge_dsl import testing

    rule = importlib.import_module(f"generated.{stem}").RULE
    plain = [case for case in testing.cases(rule) if not any(case.flags.values())]
    return max(plain, key=lambda case: sum(rule.present(*case.switches)))


def everything(stems: tuple[str, ...]) -> Iterator[Configuration]:
    """Every combination of switches, types and arithmetic."""
    import torch

    from forge_dsl import testing

    narrow, wide = torch.bfloat16, torch.float32
    for stem in stems:
        for case in testing.cases(importlib.import_module(f"generated.{stem}").RULE):
            for weight, state in ((narrow, narrow), (narrow, wide), (wide, wide)):
                for exact in (False, True):
                    for tokens, side in ((512, 4096), (2048, 4096), (1000, 1000), (1000, 4097)):
                        yield Configuration(stem, case, "linear", weight, state, narrow, tokens, side, exact)
                    yield Configuration(stem, case, "elementwise", weight, state, wide, exact=exact)
                    yield Configuration(stem, case, "many", weight, state, weight, exact=exact)


def main() -> None:
    """Compile and report; exit 1 if a configuration spills or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all combinations of flags, types and arithmetic")
    parser.add_argument("--only", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS, help="these optimizers")
    parser.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS, help="these kernels")
    parser.add_argument("--capability", nargs="+", type=int, default=[80, 90, 100], choices=DEVICES, help="GPUs")
    parser.add_argument("--tokens", type=int, help="only the linear kernel for this many tokens")
    arguments = parser.parse_args()
    import triton

    if not hasattr(triton, "__version__"):
        raise SystemExit("cannot compile: Triton is not installed")
    bad, begun = 0, time.perf_counter()
    for capability in arguments.capability:
        device = DEVICES[capability]
        stand_in(device)
        print(f"triton {triton.__version__}, sm_{capability} as in {device.name}: up to {device.shared} bytes shared")
        for one in (everything if arguments.full else shipped)(tuple(arguments.only)):
            if one.kernel not in arguments.kernel or arguments.tokens not in (None, one.tokens):
                continue
            found = usage(compiled(one))
            bad += not found.good(device)
            print(
                f"{'ok ' if found.good(device) else 'BAD'} sm_{capability} {found.registers} registers x "
                f"{found.warps} warps, {found.stack} bytes spilled, {found.shared} bytes shared: {one}",
                flush=True,
            )
    print(f"{time.perf_counter() - begun:.0f} s")
    if bad:
        raise SystemExit(f"{bad} configurations spill or do not fit")


if __name__ == "__main__":
    main()
