"""Every kernel once on small weights with borders, for tools that watch memory. One NVIDIA GPU.

    compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/small_shapes.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/small_shapes.py

AdamW by the kernel for Hopper (if this GPU is one), the portable kernel, bands and the element-wise kernel, with its
tensors kept in every way of hopper_sweep.py. Nothing is timed or compared here: the tests compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_sweep import KEPT, kept_step
from benchmarks.systems import Update

# Rows, columns, tokens: several tiles, borders in every direction, whole tiles, and as many tokens as warps that load
# are for, beside narrow tiles and wide ones.
SHAPES = [(136, 264, 65), (256, 512, 64), (256, 512, 1100), (256, 512, 3104)]


def main() -> None:
    """Run them all."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/small_shapes.py runs kernels and needs an NVIDIA GPU; there is none here")
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    for rows, columns, tokens in SHAPES:
        update = Update("adamw", rows, columns, tokens)
        update.banded()
        update.elementwise()
        for how in KEPT:
            kept_step(update, how, portable=True)()
            if on_hopper:
                kept_step(update, how)()
        torch.cuda.synchronize()
        print(f"{rows} x {columns}, {tokens} tokens: done", flush=True)


if __name__ == "__main__":
    main()
