"""Time of a whole update, weight gradient included, against the limit and against the unfused pairs. NVIDIA GPUs.

    python benchmarks/kernel.py --json results.json                  # two weights, three numbers of tokens
    python benchmarks/kernel.py --shapes full --json results.json    # more shapes, and every optimizer
    python benchmarks/kernel.py --from results.json --plot docs/assets/time-over-limit.svg

*Burst*: every system is captured in a CUDA graph and all are replayed in turn, the L2 cache flushed before each
replay; the median is reported. *Sustained*: one system back to back for at least 0.4 s, after 0.25 s of the same, with
clock and power meanwhile: a card that is busy for long is limited by its power. Before a system of ours is timed, one
step of it is compared with the reference; the exit status is 1 if one differs. The limit is that of
`forge_dsl/explain.py`, from the matrix product and from the bytes of the weight and the states at rates that an H200
sustains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.systems import BANDED, FUSED_PEER, HOPPER, PORTABLE, PRODUCT, Update
from benchmarks.timing import Meter, captured, interleaved, sustained
from forge_dsl.explain import limit

SHAPES = [(4096, 4096), (14336, 4096)]
TOKENS = [512, 2048, 8192]
QUICK = [(rows, columns, tokens) for rows, columns in SHAPES for tokens in TOKENS]
# More tokens, a narrow projection, borders everywhere, and the head of a model of 8 billion parameters.
FULL = [
    *QUICK,
    *((rows, columns, 16384) for rows, columns in SHAPES),
    *((1024, 4096, tokens) for tokens in TOKENS),
    (4097, 4095, 1000),
    *((128256, 4096, tokens) for tokens in (2048, 8192)),
]
OPTIMIZERS = ("adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")
# The share of numbers that may differ from the reference: a rule with a jump may take its other side.
FLIPS = 1e-4


def limit_ms(tokens: int, rows: int, columns: int, bytes_per_parameter: int) -> float:
    """Milliseconds that no kernel can beat."""
    return 1e3 * limit(bytes_per_parameter, tokens, rows, columns)


def measure_adamw(shapes: Sequence[tuple[int, int, int]], replays: int) -> Iterator[dict[str, Any]]:
    """AdamW beside its peers, shape by shape. shapes: rows, columns, tokens."""
    import torch

    with Meter() as meter:
        for rows, columns, tokens in shapes:
            yield measure_one(rows, columns, tokens, meter, replays)
            torch.cuda.empty_cache()


def measure_one(rows: int, columns: int, tokens: int, meter: Meter, replays: int) -> dict[str, Any]:
    """One weight: check, bursts of every system, and the sustained time of the main ones."""
    update = Update("adamw", rows, columns, tokens)
    checked = update.check()
    peers, missing = update.peers()
    runs = {PRODUCT: update.product, **peers, **update.ours()}
    graphs = {}
    for name, run in runs.items():
        try:
            graphs[name] = captured(run)
        except RuntimeError as error:
            # Another library's step may ask the device for numbers, which no graph can hold.
            if name not in peers:
                raise
            missing[name] = f"cannot be captured in a CUDA graph ({str(error).splitlines()[0]})"
    ms = interleaved(graphs, replays)
    del graphs
    ours = min((HOPPER, PORTABLE, BANDED), key=lambda name: ms.get(name, float("inf")))
    main = [name for name in (PRODUCT, FUSED_PEER, ours) if name in ms]
    lasting = {name: sustained(runs[name], meter, ms[name]) for name in main}
    least = limit_ms(tokens, rows, columns, update.bytes)
    sizes = {"rows": rows, "columns": columns, "tokens": tokens}
    print(
        f"{rows}x{columns} T={tokens}: L {least:.4f}, " + ", ".join(f"{k} {v:.4f}" for k, v in ms.items()), flush=True
    )
    for name, share in checked.items():
        if share > FLIPS:
            print(f"WRONG: {share:.2%} of a tensor differ from the reference in {name}", flush=True)
    return {**sizes, "limit": least, "ms": ms, "sustained": lasting, "checked": checked, "missing": missing}


def measure_all(replays: int, rows: int = 4096, columns: int = 4096, tokens: int = 2048) -> list[dict[str, Any]]:
    """Every optimizer's fused update at one shape."""
    updates = {stem: Update(stem, rows, columns, tokens) for stem in OPTIMIZERS}
    checked = {stem: update.check() for stem, update in updates.items()}
    times = interleaved({stem: captured(update.fused) for stem, update in updates.items()}, replays)
    portable = interleaved({stem: captured(update.portable) for stem, update in updates.items()}, replays)
    return [
        {
            "optimizer": stem,
            "ms": times[stem],
            "portable": portable[stem],
            "limit": limit_ms(tokens, rows, columns, update.bytes),
            "bytes": update.bytes,
            "checked": checked[stem],
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
    """The results as Markdown."""
    about = results["environment"]
    title = (
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}; bf16 weight and states; milliseconds."
    )
    parts = [title, burst_table(results["adamw"]), sustained_table(results["adamw"])]
    if results.get("optimizers"):
        parts.append(optimizer_table(results["optimizers"]))
    missing = {name: reason for row in results["adamw"] for name, reason in row["missing"].items()}
    if missing:
        parts.append("\n".join(f"- {name}: {reason}." for name, reason in missing.items()))
    return "\n\n".join(parts)


def burst_table(rows: list[dict[str, Any]]) -> str:
    """Every system in bursts; ours is the fastest fused system."""
    systems = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    lines = [["burst: weight, tokens", "L", *systems, "peer / ours", "ours / L"]]
    for row in rows:
        ms, ours = row["ms"], _ours(row["ms"])
        ratios = [f"{ms[FUSED_PEER] / ours:.2f}", f"{ours / row['limit']:.2f}"]
        lines.append([_title(row), f"{row['limit']:.4f}", *(_number(ms.get(name)) for name in systems), *ratios])
    return _markdown(lines)


def sustained_table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, MHz and W of the main systems."""
    lines = [["sustained: weight, tokens", "system", "ms", "MHz", "W", "peer / system"]]
    for row in rows:
        peer = row["sustained"][FUSED_PEER]["ms"]
        for name, one in row["sustained"].items():
            rates = ["-" if one[unit] is None else f"{one[unit]:.0f}" for unit in ("MHz", "W")]
            lines.append([_title(row), name, f"{one['ms']:.4f}", *rates, f"{peer / one['ms']:.2f}"])
    return _markdown(lines)


def optimizer_table(rows: list[dict[str, Any]]) -> str:
    """Every optimizer beside its limit."""
    lines = [["optimizer, 4096 × 4096, 2048 tokens", "bytes per parameter", "L", "fused", "portable", "fused / L"]]
    for row in rows:
        times = [f"{row[name]:.4f}" for name in ("limit", "ms", "portable")]
        lines.append([row["optimizer"], str(row["bytes"]), *times, f"{row['ms'] / row['limit']:.2f}"])
    return _markdown(lines)


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def _title(row: dict[str, Any]) -> str:
    return f"{row['rows']} × {row['columns']}, {row['tokens']}"


def _number(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.4f}"


def _ours(ms: dict[str, float]) -> float:
    return min(ms[name] for name in (HOPPER, PORTABLE, BANDED) if name in ms)


def plot(results: dict[str, Any], path: Path) -> None:
    """Time over limit against tokens, one line per system, one panel per weight that has several numbers of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "forge-dsl"
    import matplotlib.pyplot as plt

    weights: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in sorted(results["adamw"], key=lambda row: row["tokens"]):
        weights.setdefault((row["rows"], row["columns"]), []).append(row)
    weights = {weight: series for weight, series in weights.items() if len(series) > 1}
    # Parts of an update are no systems; foreach would leave no room for the others.
    names = dict.fromkeys(name for series in weights.values() for row in series for name in row["ms"])
    shown = [name for name in names if "alone" not in name and "foreach" not in name]
    figure, axes = plt.subplots(1, len(weights), figsize=(4 + 3.5 * len(weights), 3.6), sharey=True, squeeze=False)
    for axis, ((rows, columns), series) in zip(axes[0], weights.items(), strict=True):
        for name in shown:
            points = [(row["tokens"], row["ms"][name] / row["limit"]) for row in series if name in row["ms"]]
            axis.plot(*zip(*points, strict=True), marker="o", label=name) if points else axis.plot([], label=name)
        axis.axhline(1, color="0.6", linewidth=1)
        tokens = [row["tokens"] for row in series]
        axis.set(xscale="log", title=f"weight {rows} × {columns}", xlabel="tokens", xticks=tokens, xticklabels=tokens)
        axis.minorticks_off()
    axes[0][0].set_ylabel("time / limit")
    axes[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"AdamW update with its weight gradient, bf16, {results['environment']['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def wrong(results: dict[str, Any]) -> bool:
    """Whether a system of ours differs from the reference."""
    rows = [*results["adamw"], *results["optimizers"]]
    return any(share > FLIPS for row in rows for share in row["checked"].values())


def save(results: dict[str, Any], path: Path | None) -> None:
    """Write what there is so far, if it is wanted."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("quick", "full"), default="quick")
    parser.add_argument("--optimizers", action="store_true", help="every optimizer at one shape too; part of full")
    parser.add_argument("--replays", type=int, default=30, help="of each system in bursts")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--from", dest="source", type=Path, help="read results instead of measuring")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.source:
        results = json.loads(arguments.source.read_text())
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("benchmarks/kernel.py measures kernels and needs an NVIDIA GPU; there is none here")
        full = arguments.shapes == "full"
        results = {"environment": environment(), "adamw": [], "optimizers": []}
        for row in measure_adamw(FULL if full else QUICK, arguments.replays):
            results["adamw"].append(row)
            save(results, arguments.json)  # after each shape, so that nothing is lost where a later one fails
        results["optimizers"] = measure_all(arguments.replays) if full or arguments.optimizers else []
    save(results, arguments.json)
    print(report(results))
    if arguments.markdown:
        arguments.markdown.write_text(report(results) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)
    if wrong(results):
        raise SystemExit("a system differs from the reference; see above")


if __name__ == "__main__":
    main()
