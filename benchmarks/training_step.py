"""Memory and time of a training step of a Qwen3-shaped model, fused against torch's fused AdamW. NVIDIA GPUs.

    python benchmarks/training_step.py --json results.json            # 8B: takes 75 GiB with torch's AdamW
    python benchmarks/training_step.py --model 0.6B
    python benchmarks/training_step.py --from results.json --plot docs/assets/step-memory.svg

The model has random weights (the shape is what counts), bf16 throughout, and activation checkpointing, as people train
when memory is short. All runs start from the same weights and see the same tokens. The timeline is the allocator's own
record of one step after two warm ones; times are medians of synchronised steps, in the better of two runs, which take
turns with those of the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BATCH, CONTEXT, STEPS = 4, 1024, 10
_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "use_cache": False}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
SYSTEMS = ("torch AdamW(fused)", "forge-dsl", "forge-dsl, states in fp8")


def build_model(shape: dict[str, Any]) -> Any:
    """The model on the GPU, the same weights each time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def run(shape: dict[str, Any], make_optimizer: Callable[[Any], Any]) -> dict[str, Any]:
    """Train a fresh model; peak, timeline and time of a step, and the losses."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    model = build_model(shape)
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(1)
    losses, times, peak, timeline = [], [], 0, []
    for step in range(STEPS):
        tokens = torch.randint(shape["vocab_size"], (BATCH, CONTEXT), generator=generator).cuda()
        torch.cuda.synchronize()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(stacks="python", context=None)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if step == 2:
            peak = torch.cuda.max_memory_allocated()
            timeline = history(before)
            torch.cuda.memory._record_memory_history(enabled=None)
        losses.append(loss.item())
        del loss
    return {"peak": peak, "seconds": statistics.median(times[3:]), "losses": losses, "timeline": timeline}


def history(start: int, points: int = 600) -> list[float]:
    """Allocated GiB over the events of the recorded step, thinned out; each point is the largest of its stretch."""
    import torch

    total, levels = start, [start]
    for event in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        levels.append(total)
    stretch = max(1, len(levels) // points)
    return [max(levels[i : i + stretch]) / 2**30 for i in range(0, len(levels), stretch)]


def measure(model: str) -> dict[str, Any]:
    """All runs, and the machine."""
    import torch
    import triton

    import forge_dsl
    from generated import AdamW

    def unfused(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def fused(model: Any) -> Any:
        return forge_dsl.fuse(model, AdamW, lr=1e-4)

    def in_codes(model: Any) -> Any:
        return forge_dsl.fuse(model, AdamW, lr=1e-4, state_dtype="fp8")

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    results: dict[str, Any] = {"environment": {**about, "model": model}}
    for _ in range(2):
        for name, make in zip(SYSTEMS, (unfused, fused, in_codes), strict=True):
            one = run(SHAPES[model], make)
            if name not in results or one["seconds"] < results[name]["seconds"]:
                results[name] = one
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    """Allocated memory over one step."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "forge-dsl"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3.4))
    for name in SYSTEMS:
        line = results[name]["timeline"]
        axis.plot([i / max(1, len(line) - 1) for i in range(len(line))], line, label=name)
    axis.set(xlabel="one training step, in order of allocations", ylabel="allocated GiB", ylim=(0, None), xticks=[])
    axis.legend(frameon=False)
    axis.set_title(
        f"Qwen3-{results['environment']['model']} shape, bf16, {BATCH} × {CONTEXT} tokens, "
        f"{results['environment']['device']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8B", help="which shape of Qwen3")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="read results instead of measuring")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    arguments = parser.parse_args()
    results = json.loads(arguments.source.read_text()) if arguments.source else measure(arguments.model)
    about = results["environment"]
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}, Qwen3-{about['model']} shape")
    for name in SYSTEMS:
        one = results[name]
        losses = ", ".join(f"{loss:.4f}" for loss in one["losses"][-3:])
        print(f"{name}: peak {one['peak'] / 2**30:.2f} GiB, {one['seconds'] * 1e3:.0f} ms a step, losses {losses}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
