"""Time of an update whose x and dy are in 8 bits: dequantised on load, or decoded first. One NVIDIA GPU, half a minute.

    python benchmarks/fp8_operands.py
    python benchmarks/fp8_operands.py --tokens 2048 --layouts "x by row" --json results.json

AdamW on a bf16 weight with bf16 states. Bursts: every system is captured in a CUDA graph and all are replayed in turn,
the L2 cache flushed before each replay; medians. *On load* is the portable kernel with codes and scales as they are;
*decode* is their decoding alone, *decode +* that and a kernel on bf16; *bf16* are the same kernels on operands that
were never in 8 bits. Before it is timed, each system's step is compared with that of the portable kernel on decoded
operands; the exit status is 1 if one differs. Temporary memory is what a step allocates at its peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.timing import captured, interleaved
from forge_dsl import Scaled, optim, testing
from forge_dsl.formats.operand import Operand
from forge_dsl.runtime import launch, scaled
from forge_dsl.runtime.trust import FLIPS, beyond_rounding

LAYOUTS = ("x by row", "both by row", "both by 128")
Step = Callable[[], None]


def operand(values: Tensor, block: int, codes: torch.dtype, scales: torch.dtype) -> Scaled:
    """Values [tokens, features] in 8 bits, with a power of two for each row (block 0) or block."""
    tokens, features = values.shape
    parts = values.float().view(tokens, -1, block or features)
    largest = parts.abs().amax(2, keepdim=True).clamp(min=2.0**-60)
    exponents = torch.ceil(torch.log2(largest / torch.finfo(codes).max))
    found = (parts * torch.exp2(-exponents)).view(tokens, features).to(codes)
    exponents = exponents.squeeze(2)
    return Scaled(found, torch.exp2(exponents) if scales == torch.float32 else (exponents + 127).to(torch.uint8))


class Update:
    """One weight's update. kept: the weight and its states, from which every check starts."""

    def __init__(self, rows: int, columns: int, tokens: int, layout: str) -> None:
        self.rule = optim.AdamW.rule
        self.case = testing.cases(self.rule)[0]
        self.problem = testing.make_problem(self.rule, self.case, (rows, columns), torch.bfloat16, torch.bfloat16, 0)
        self.table = testing.next_table(self.rule, self.case, self.problem)
        where = testing.device()
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(tokens, side, generator=generator).to(where, torch.bfloat16) for side in (columns, rows))
        block, kind = (128, torch.float32) if layout == "both by 128" else (0, torch.uint8)
        self.x: Operand = operand(x, block, torch.float8_e4m3fn, kind)
        self.dy: Operand = dy if layout == "x by row" else operand(dy, block, torch.float8_e5m2, kind)
        self.plain = self.decode()

    def decode(self) -> tuple[Tensor, Tensor]:
        """x and dy in bf16."""
        return scaled.decoded(self.x, torch.bfloat16), scaled.decoded(self.dy, torch.bfloat16)

    def portable(self, x: Operand, dy: Operand) -> None:
        """The portable kernel, on operands as they are given."""
        weight, states = self.problem.weight, self.problem.states
        launch.linear_step_portable(self.rule, x, dy, weight, states, self.table, self.case.switches, False)

    def hopper(self, x: Tensor, dy: Tensor) -> None:
        """The kernel for Hopper."""
        from forge_dsl.runtime import hopper

        weight, states = self.problem.weight, self.problem.states
        hopper.linear_step_hopper(self.rule, x, dy, weight, states, self.table, self.case.switches)

    def systems(self, on_hopper: bool) -> dict[str, Step]:
        """What is timed, by name."""
        found: dict[str, Step] = {
            "on load": lambda: self.portable(self.x, self.dy),
            "decode": lambda: self.decode() and None,
            "decode + portable": lambda: self.portable(*self.decode()),
            "bf16 portable": lambda: self.portable(*self.plain),
        }
        if on_hopper:
            found["decode + hopper"] = lambda: self.hopper(*self.decode())
            found["bf16 hopper"] = lambda: self.hopper(*self.plain)
        return found

    def differences(self, systems: dict[str, Step]) -> dict[str, float]:
        """The largest share of a tensor in which one step of a system differs from `bf16 portable`."""
        start, shares, want = self.problem, {}, None
        for name in ("bf16 portable", *(name for name in systems if name not in ("bf16 portable", "decode"))):
            self.problem = start.clone()
            systems[name]()
            found = [tensor for _, tensor in self.problem.tensors(self.rule)]
            want = want or found
            shares[name] = max(beyond_rounding(got, good) for got, good in zip(found, want, strict=True))
        self.problem = start
        return shares


def peak(step: Step) -> int:
    """Bytes that a step has allocated at its peak, over what there was before."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(rows: int, columns: int, tokens: int, layout: str, replays: int) -> dict[str, Any]:
    """One shape and layout: check, memory, bursts."""
    update = Update(rows, columns, tokens, layout)
    systems = update.systems(torch.cuda.get_device_capability() == (9, 0))
    wrong = {name: share for name, share in update.differences(systems).items() if share > FLIPS}
    memory = {name: peak(step) for name, step in systems.items()}
    ms = interleaved({name: captured(step) for name, step in systems.items()}, replays)
    print(f"{rows}x{columns} T={tokens}, {layout}: " + ", ".join(f"{k} {v:.4f} ms" for k, v in ms.items()), flush=True)
    print("    temporary MiB: " + ", ".join(f"{k} {v / 2**20:.1f}" for k, v in memory.items()), flush=True)
    for name, share in wrong.items():
        print(f"WRONG: {share:.2%} of a tensor differ in {name}", flush=True)
    shape = {"rows": rows, "columns": columns, "tokens": tokens, "layout": layout}
    return {**shape, "ms": ms, "memory": memory, "wrong": wrong}


def main() -> None:
    """Measure and report; exit 1 if a system's step differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 4096], metavar=("OUT", "IN"))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = [
        measure(*arguments.shape, tokens, layout, arguments.replays)
        for layout in arguments.layouts
        for tokens in arguments.tokens
    ]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if any(one["wrong"] for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
