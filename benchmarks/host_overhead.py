"""Host time that a fused linear layer adds over `F.linear` with its own dX and dW, forward and backward.

    python benchmarks/host_overhead.py --json results.json

Chains of small layers, so that the host and not the device decides, of two lengths: from their difference follows what
a layer takes, and what is left is taken once a step, as by `step()` and the table of scalars. The fused side makes the
whole update, the plain side only its gradients. On a GPU, `captured` is a whole fused step replayed from a CUDA graph:
what is left is one launch, whatever the number of layers. Runs on a CPU too, where the numbers include the arithmetic
of the update.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# A model of 24 blocks has some 168 linear layers.
SHORT, LONG, WIDTH, TOKENS, ROUNDS = 24, 168, 256, 64, 60


def timed(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Seconds until `run` returns to the host, the device being idle before; the least of many, undisturbed."""
    for _ in range(10):
        run()
    seconds = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    wait()
    return min(seconds)


def steps(layers: int) -> dict[str, Callable[[], None]]:
    """A training step of a chain of so many layers, each way."""
    import torch
    import torch.nn.functional as F

    from generated import AdamW, adamw_linear

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype)
    weights = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device, dtype=dtype) / 20) for _ in range(layers)]
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = AdamW(weights)

    def fused() -> None:
        y = x
        for weight in weights:
            y = adamw_linear(y, weight)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        y = x
        for weight in copies:
            y = F.linear(y, weight)
        y.sum().backward()
        for weight in copies:
            weight.grad = None

    return {"plain": plain, "fused": fused}


def measure() -> dict[str, Any]:
    """Microseconds a layer of each way, what a fused step takes besides, and the machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    chains = {(layers, name): run for layers in (SHORT, LONG) for name, run in steps(layers).items()}
    seconds = dict.fromkeys(chains, float("inf"))
    for _ in range(4):
        for chain, run in chains.items():
            seconds[chain] = min(seconds[chain], timed(run, wait))
    layer = {name: (seconds[LONG, name] - seconds[SHORT, name]) / (LONG - SHORT) * 1e6 for name in ("plain", "fused")}
    layer["added"] = layer["fused"] - layer["plain"]
    step = (seconds[SHORT, "fused"] - seconds[SHORT, "plain"]) * 1e6 - SHORT * layer["added"]
    if on_gpu:
        layer["captured"] = timed(capture(chains[SHORT, "fused"]), wait) / SHORT * 1e6
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    environment = {"device": name, "torch": torch.__version__}
    return {"environment": environment, "microseconds a layer": layer, "microseconds added a step": step}


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = measure()
    print(f"{results['environment']['device']}, torch {results['environment']['torch']}; layers of {WIDTH}²")
    for name, value in results["microseconds a layer"].items():
        print(f"{name}: {value:.1f} us a layer")
    print(f"added: {results['microseconds added a step']:.1f} us a step")
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
