"""Time of a whole update, weight gradient included, against the limit and the strongest unfused pair. NVIDIA GPUs.

    python benchmarks/kernel.py --json results.json          # measure
    python benchmarks/kernel.py --from results.json --plot docs/assets/time-over-limit.svg

Every system is captured in a CUDA graph and all of them are replayed in turn, with the L2 cache flushed before each
replay; the median of the replays is reported. The limit is L = max(2 T O I / 790e12, bytes / 4.3e12) seconds, with the
bytes of the weight and the states, read and written once: rates that an H200 sustains.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES = [(4096, 4096), (14336, 4096)]
TOKENS = [512, 2048, 8192]
OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
MATRIX_RATE, MEMORY_RATE = 790e12, 4.3e12
REPLAYS = 30


def limit_ms(tokens: int, rows: int, columns: int, bytes_per_parameter: int) -> float:
    """Milliseconds that no kernel can beat."""
    return 1e3 * max(2 * tokens * rows * columns / MATRIX_RATE, rows * columns * bytes_per_parameter / MEMORY_RATE)


def captured(function: Callable[[], None]) -> Any:
    """`function` as a CUDA graph, after two runs that compile and warm up."""
    import torch

    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def interleaved(graphs: dict[str, Any], replays: int = REPLAYS) -> dict[str, float]:
    """Median milliseconds of each graph; every replay starts with a cold L2."""
    import torch

    flush = torch.empty(64 * 2**20, device="cuda")
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


class Update:
    """One weight in bf16 with bf16 states, and every way of ours to update it."""

    def __init__(self, stem: str, rows: int, columns: int, tokens: int) -> None:
        import torch

        from forge_dsl import testing

        module = importlib.import_module(f"generated.{stem}")
        self.rule = module.RULE
        plain = [case for case in testing.cases(self.rule) if not any(case.flags.values())]
        # With every state that the arguments, and not a flag, decide about: SGD with momentum, RMSprop with momentum.
        self.case = max(plain, key=lambda case: sum(self.rule.present(*case.switches)))
        self.x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        self.dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
        problem = testing.make_problem(self.rule, self.case, (rows, columns), torch.bfloat16, torch.bfloat16, 0)
        self.weight, self.states = problem.weight, problem.states
        self.table = testing.next_table(self.rule, self.case, problem)
        self.grad = torch.empty_like(self.weight)
        self.bytes = 2 * 2 * (1 + sum(state is not None for state in self.states))

    def arguments(self) -> tuple[Any, ...]:
        """What every route takes after its gradient."""
        return self.states, self.table, self.case.switches, False

    def fused(self) -> None:
        """The Triton kernel, gradient in registers."""
        from forge_dsl.runtime import launch

        launch.linear_step(self.rule, self.x, self.dy, self.weight, *self.arguments())

    def banded(self) -> None:
        """The library's product in fp32 bands, each followed by the element-wise kernel."""
        from forge_dsl.runtime.banded import linear_step_banded

        linear_step_banded(self.rule, self.x, self.dy, self.weight, *self.arguments())

    def elementwise(self) -> None:
        """The element-wise kernel alone, on a bf16 gradient."""
        from forge_dsl.runtime import launch

        launch.elementwise_step(self.rule, self.weight, self.grad, *self.arguments())

    def product(self) -> None:
        """cuBLAS alone, bf16 gradient."""
        import torch

        torch.mm(self.dy.T, self.x, out=self.grad)

    def peer(self) -> Callable[[], None]:
        """cuBLAS, then torch's fused AdamW."""
        import torch

        parameter = torch.nn.Parameter(self.weight.clone())
        parameter.grad = self.grad
        optimizer = torch.optim.AdamW([parameter], fused=True, capturable=True)

        def run() -> None:
            self.product()
            optimizer.step()

        return run


def measure_adamw() -> list[dict[str, Any]]:
    """AdamW against its peers over shapes and tokens."""
    found = []
    for rows, columns in SHAPES:
        for tokens in TOKENS:
            update = Update("adamw", rows, columns, tokens)
            systems = {
                "cuBLAS dW alone": update.product,
                "cuBLAS + torch AdamW(fused)": update.peer(),
                "forge-dsl fused": update.fused,
                "forge-dsl banded": update.banded,
                "forge-dsl element-wise alone": update.elementwise,
            }
            times = interleaved({name: captured(run) for name, run in systems.items()})
            limit = limit_ms(tokens, rows, columns, update.bytes)
            found.append({"rows": rows, "columns": columns, "tokens": tokens, "limit": limit, "ms": times})
            print(f"{rows}x{columns} T={tokens}: " + ", ".join(f"{k} {v:.3f}" for k, v in times.items()), flush=True)
    return found


def measure_all(rows: int = 4096, columns: int = 4096, tokens: int = 2048) -> list[dict[str, Any]]:
    """Every optimizer's fused update at one shape."""
    updates = {stem: Update(stem, rows, columns, tokens) for stem in OPTIMIZERS}
    times = interleaved({stem: captured(update.fused) for stem, update in updates.items()})
    return [
        {
            "optimizer": stem,
            "ms": times[stem],
            "limit": limit_ms(tokens, rows, columns, update.bytes),
            "bytes": update.bytes,
        }
        for stem, update in updates.items()
    ]


def environment() -> dict[str, str]:
    """The machine and the versions that the numbers belong to."""
    import torch
    import triton

    name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def report(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    about = results["environment"]
    lines = [
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}; bf16 weight and states; milliseconds.",
        "",
    ]
    systems = list(results["adamw"][0]["ms"])
    lines += ["| weight, tokens | L | " + " | ".join(systems) + " | peer / fused | fused / L |"]
    lines += ["|---" * (len(systems) + 4) + "|"]
    for row in results["adamw"]:
        ms = row["ms"]
        fused, peer = ms["forge-dsl fused"], ms["cuBLAS + torch AdamW(fused)"]
        cells = [f"{row['rows']} × {row['columns']}, {row['tokens']}", f"{row['limit']:.3f}"]
        cells += [f"{ms[name]:.3f}" for name in systems] + [f"{peer / fused:.2f}", f"{fused / row['limit']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| optimizer, 4096 × 4096, 2048 tokens | bytes per parameter | L | fused | fused / L |",
        "|---|---|---|---|---|",
    ]
    for row in results["optimizers"]:
        cells = [
            row["optimizer"],
            str(row["bytes"]),
            f"{row['limit']:.3f}",
            f"{row['ms']:.3f}",
            f"{row['ms'] / row['limit']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Time over limit against tokens, one line per system, one panel per weight."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "forge-dsl"
    import matplotlib.pyplot as plt

    shown = ("cuBLAS + torch AdamW(fused)", "forge-dsl banded", "forge-dsl fused")
    shapes = sorted({(row["rows"], row["columns"]) for row in results["adamw"]})
    figure, axes = plt.subplots(1, len(shapes), figsize=(9, 3.4), sharey=True)
    for axis, (rows, columns) in zip(axes, shapes, strict=True):
        series = [row for row in results["adamw"] if (row["rows"], row["columns"]) == (rows, columns)]
        for name in shown:
            axis.plot(
                [r["tokens"] for r in series], [r["ms"][name] / r["limit"] for r in series], marker="o", label=name
            )
        axis.axhline(1, color="0.6", linewidth=1)
        axis.set(xscale="log", title=f"weight {rows} × {columns}", xlabel="tokens", xticks=TOKENS, xticklabels=TOKENS)
        axis.minorticks_off()
    axes[0].set_ylabel("time / limit")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.suptitle(f"AdamW update with its weight gradient, bf16, {results['environment']['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="read results instead of measuring")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.source:
        results = json.loads(arguments.source.read_text())
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("benchmarks/kernel.py measures kernels and needs an NVIDIA GPU; there is none here")
        results = {"environment": environment(), "adamw": measure_adamw(), "optimizers": measure_all()}
    print(report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
