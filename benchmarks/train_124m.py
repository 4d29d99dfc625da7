"""A GPT-2-shaped model of 124M parameters, trained from scratch on real text in several number formats. One GPU.

    python benchmarks/train_124m.py --json runs.json --plot docs/assets/low-precision-training.svg
    python benchmarks/train_124m.py --arm fp32 bf16 --steps 2000 --json a.json    # or in parts of the same length,
    python benchmarks/train_124m.py --from a.json b.json --plot picture.svg       # merged here
    python benchmarks/train_124m.py --tiny --arm fp32 bf16                        # seconds, on a CPU too

The model: 12 layers of width 768, 12 heads, context 512, 25,344 tokens, biases, and a head that is not tied to the
embedding, which makes 124.4M parameters (GPT-2 has 124.4M with twice the tokens and a tied head). The text: the
documentation and Python source that lie on this machine, see installed_text.py; 16 x 512 tokens a step, drawn without
replacement until every window was seen, then again in another order.

Every arm has the same initial weights (as near as its type has them), order of data, schedule (linear warm-up, cosine
to a tenth) and activations (torch.autocast in bf16 over an fp32 residual stream); only the formats of weights and
states differ. Rate, warm-up and betas are such that runs which differ in nothing but rounding stay together: at 3e-4
they end 0.01 nats apart, to either side, and at 6e-4 after a warm-up of a twentieth, with 0.95, 0.05.

The number of steps is what the slowest arm manages in --seconds, found before the first one begins. On a GPU the whole
step is a CUDA graph. An arm passes if the mean loss of its last 200 steps is as near to the fp32 arm's as 0.003 nats,
or as the difference that another seed of the rounding makes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import installed_text
from gpt2 import TINY, Model, Shape, build

import forge_dsl
from generated import AdamW

EAGER_STEPS, PROBE_STEPS = 3, 40  # before the capture; to find out how long a step takes
WARM_UP, FLOOR = 0.1, 0.1  # of the steps; of the learning rate
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.99)
LAST, NATS = 200, 0.003


@dataclass(frozen=True)
class Arm:
    """A way to store weights and states; `options` go to the optimizer."""

    title: str
    weights: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)


BF16 = torch.bfloat16
ARMS = {
    "fp32": Arm("fp32 master", torch.float32, {"state_dtype": torch.float32}),
    "bf16": Arm("bf16 + rounding", BF16, {"state_dtype": BF16}),
    "bf16-seed1": Arm("bf16 + rounding, second seed", BF16, {"state_dtype": BF16, "seed": 1}),
    "bf16-seed2": Arm("bf16 + rounding, third seed", BF16, {"state_dtype": BF16, "seed": 2}),
    "int8": Arm("int8 states", BF16, {"state_dtype": "int8"}),
    "fp8": Arm("fp8 states", BF16, {"state_dtype": "fp8"}),
    "fp8-weights": Arm("fp8 weights, int8 states", BF16, {"weight_dtype": "fp8", "state_dtype": "int8"}),
    "nearest": Arm("bf16 to nearest", BF16, {"state_dtype": BF16, "stochastic_rounding": False}),
    "bf16+16": Arm("bf16 + 16 bits, bf16 states", BF16, {"state_dtype": BF16, "extra_bits": 16}),
}
DEFAULT = ("fp32", "bf16", "bf16-seed1", "int8", "fp8")


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Windows `[windows, context + 1]` of the text, int32 on the device, and what the text is."""

    windows: Tensor
    facts: installed_text.Facts

    def order(self, steps: int, batch: int) -> Tensor:
        """Windows of each step, `[steps, batch]`: one shuffled pass after the other, the same in every run."""
        generator = torch.Generator().manual_seed(1)
        count = len(self.windows)
        passes = math.ceil(steps * batch / count)
        drawn = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
        return drawn[: steps * batch].view(steps, batch).to(self.windows.device)


def load_data(shape: Shape, device: torch.device) -> Data:
    """The text of this machine on the device."""
    tokens, facts = installed_text.load(shape.megabytes, shape.vocabulary)
    return Data(tokens.unfold(0, shape.context + 1, shape.context).contiguous().to(device), facts)


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of a step: linear warm-up, then a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """A fresh model with its optimizer, and the tensors that a step reads (`batch`) and writes (`loss`)."""

    def __init__(self, arm: Arm, shape: Shape, data: Data, steps: int, peak_rate: float) -> None:
        self.data, self.steps, self.peak_rate = data, steps, peak_rate
        self.device = data.windows.device
        self.model = build(shape, arm.weights, self.device)
        groups = forge_dsl.decay_groups(self.model, WEIGHT_DECAY)
        self.optimizer = forge_dsl.fuse(self.model, AdamW, params=groups, lr=peak_rate, betas=BETAS, **arm.options)
        self.order = data.order(steps, shape.batch)
        self.batch = torch.zeros(shape.batch, shape.context + 1, dtype=torch.int64, device=self.device)
        self.loss = torch.zeros((), device=self.device)

    def feed(self, step: int) -> None:
        """Batch and learning rate of a step."""
        self.batch.copy_(self.data.windows[self.order[step]])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, self.steps, self.peak_rate)

    def step(self) -> None:
        """Forward, backward and what of the update is left."""
        with torch.autocast(self.device.type, BF16):
            logits = self.model(self.batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss.copy_(loss.detach())

    def capture(self) -> Callable[[], None]:
        """The step as a CUDA graph, which follows the learning rate; recording it takes no step."""
        self.optimizer.prepare_replay()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()

        def replay() -> None:
            self.optimizer.prepare_replay()
            graph.replay()

        return replay

    def bytes_per_parameter(self) -> float:
        """Of weights and states as they lie in memory, scales included; without step counts."""
        parameters = list(self.model.parameters())
        tensors = [value for p in parameters for value in self.optimizer.state[p].values() if isinstance(value, Tensor)]
        total = sum(t.numel() * t.element_size() for t in [*parameters, *tensors] if t.dim() > 0)
        return total / sum(p.numel() for p in parameters)


def train(training: Training, until: int, graph: bool) -> dict[str, Any]:
    """The first `until` steps: every loss, seconds a step and memory. The first few are eager and not timed."""
    losses = torch.zeros(until, device=training.device)
    with side_stream(training.device):
        for step in range(EAGER_STEPS):
            training.feed(step)
            training.step()
            losses[step].copy_(training.loss)
    training.feed(EAGER_STEPS)
    run = training.capture() if graph else training.step
    wait(training.device)
    start = time.perf_counter()
    for step in range(EAGER_STEPS, until):
        training.feed(step)
        run()
        losses[step].copy_(training.loss)
        if (step + 1) % max(1, until // 4) == 0 and until > PROBE_STEPS:
            print(f"  step {step + 1}: loss {losses[max(0, step - 49) : step + 1].mean().item():.3f}", flush=True)
    wait(training.device)
    return {
        "seconds_per_step": (time.perf_counter() - start) / (until - EAGER_STEPS),
        "bytes_per_parameter": training.bytes_per_parameter(),
        "losses": [round(loss, 5) for loss in losses.tolist()],
    }


def run_arm(
    arm: Arm, shape: Shape, data: Data, steps: int, peak_rate: float, graph: bool, until: int | None = None
) -> dict[str, Any]:
    """Train a fresh model on all steps of the schedule, or on the first `until`, and leave no memory behind."""
    cuda = data.windows.is_cuda
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = train(Training(arm, shape, data, steps, peak_rate), until or steps, graph)
    if cuda:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    result["tokens_per_second"] = shape.batch * shape.context / result["seconds_per_step"]
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return result


def side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where steps before a capture run; what follows waits for them."""
    return on_side_stream() if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def wait(device: torch.device) -> None:
    """For the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def steps_within(seconds: float, names: Sequence[str], shape: Shape, data: Data, lr: float, graph: bool) -> int:
    """Steps that the slowest arm takes in that time, a multiple of 50; every arm also shows here that it runs."""
    slowest = 0.0
    for name in names:
        probe = run_arm(ARMS[name], shape, data, 10 * PROBE_STEPS, lr, graph, until=PROBE_STEPS)
        print(f"{name}: {probe['seconds_per_step'] * 1e3:.2f} ms a step", flush=True)
        slowest = max(slowest, probe["seconds_per_step"])
    return max(50, int(seconds / slowest) // 50 * 50)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every arm, its results written as soon as it ends."""
    import triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    graph = cuda and not arguments.no_graph
    shape = TINY if arguments.tiny else Shape()
    start = time.perf_counter()
    data = load_data(shape, device)
    print(f"{data.facts}\nread in {time.perf_counter() - start:.0f} s", flush=True)
    steps = arguments.steps or steps_within(arguments.seconds, arguments.arm, shape, data, arguments.lr, graph)
    parameters = sum(p.numel() for p in Model(shape).parameters())
    tokens = steps * shape.batch * shape.context
    print(f"{parameters / 1e6:.2f}M parameters, {steps} steps, {tokens / data.facts.tokens:.2f} passes over the text")
    name = torch.cuda.get_device_name() if cuda else "CPU"
    results: dict[str, Any] = {
        "environment": {"device": name, "torch": torch.__version__, "triton": triton.__version__},
        "text": asdict(data.facts),
        "setting": {**asdict(shape), "steps": steps, "lr": arguments.lr, "graph": graph, "parameters": parameters},
        "arms": {},
    }
    for key in arguments.arm:
        print(f"{ARMS[key].title}, {time.perf_counter() - start:.0f} s", flush=True)
        results["arms"][key] = run_arm(ARMS[key], shape, data, steps, arguments.lr, graph)
        if arguments.json:
            arguments.json.write_text(json.dumps(results) + "\n")
    print(f"all in {time.perf_counter() - start:.0f} s")
    return results


# -- results ----------------------------------------------------------------------------------------------------------


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """The arms of several files. Raises SystemExit if anything but the arms differs: they would not compare."""
    parts = [json.loads(path.read_text()) for path in paths]
    merged = {**parts[0], "arms": {}}
    for path, part in zip(paths, parts, strict=True):
        for what in ("environment", "text", "setting"):
            if part[what] != merged[what]:
                raise SystemExit(f"{path} has another {what} than {paths[0]}: {part[what]} and {merged[what]}")
        merged["arms"] |= part["arms"]
    merged["arms"] = {name: merged["arms"][name] for name in ARMS if name in merged["arms"]}
    return merged


def last_mean(arm: dict[str, Any]) -> float:
    """Mean loss of the last steps, nats a token."""
    return statistics.fmean(arm["losses"][-LAST:])


def show(results: dict[str, Any]) -> None:
    """A table in Markdown, with the criterion where the arms that it needs are there."""
    arms = results["arms"]
    means = {name: last_mean(arm) for name, arm in arms.items()}
    allowed = NATS
    if "bf16" in means and "bf16-seed1" in means:
        allowed = max(NATS, abs(means["bf16"] - means["bf16-seed1"]))
    last = min(LAST, results["setting"]["steps"])
    print(f"| arm | bytes a parameter | mean of the last {last} | beside fp32 | within | tokens/s | peak GiB |")
    print("|---|---:|---:|---:|---|---:|---:|")
    for name, arm in arms.items():
        beside = means[name] - means["fp32"] if "fp32" in means else math.nan
        verdict = "" if name == "fp32" or math.isnan(beside) else "yes" if abs(beside) <= allowed else "no"
        peak = f"{arm['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in arm else ""
        print(
            f"| {ARMS[name].title} | {arm['bytes_per_parameter']:.2f} | {means[name]:.4f} | {beside:+.4f} | {verdict} "
            f"| {arm['tokens_per_second']:,.0f} | {peak} |"
        )
    print(f"\nAllowed beside fp32: {allowed:.4f} nats, the larger of {NATS} and the difference of the two seeds.")


def smooth(values: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """Means of stretches of that many steps, and the middles of the stretches."""
    starts = range(0, len(values) - width + 1, width)
    return [start + width / 2 for start in starts], [statistics.fmean(values[s : s + width]) for s in starts]


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses of every arm, and their differences from fp32."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "forge-dsl"
    import matplotlib.pyplot as plt

    arms, steps = results["arms"], results["setting"]["steps"]
    width = max(1, steps // 60)
    figure, (losses, beside) = plt.subplots(1, 2, figsize=(10, 3.8))
    for name, arm in arms.items():
        losses.plot(*smooth(arm["losses"], width), label=ARMS[name].title, linewidth=1)
        if "fp32" in arms:
            differences = [a - b for a, b in zip(arm["losses"], arms["fp32"]["losses"], strict=True)]
            beside.plot(*smooth(differences, width), linewidth=1)
    losses.set(xlabel="step", ylabel="loss, nats a token")
    losses.legend(frameon=False)
    beside.set(xlabel="step", ylabel="difference from fp32 master, nats")
    millions = results["setting"]["parameters"] / 1e6
    figure.suptitle(
        f"{millions:.0f}M parameters, {results['environment']['device']}, means of {width} steps", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=DEFAULT, help="arms to train, five by default")
    parser.add_argument("--seconds", type=float, default=90, help="training time of the slowest arm")
    parser.add_argument("--steps", type=int, help="steps of every arm instead")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak of the learning rate")
    parser.add_argument("--no-graph", action="store_true", help="launch every kernel from the host")
    parser.add_argument("--tiny", action="store_true", help="a model for trying this script out")
    parser.add_argument("--json", type=Path, help="write the results here, after every arm")
    parser.add_argument("--from", dest="source", type=Path, nargs="+", help="read results instead of measuring")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps <= EAGER_STEPS:
        parser.error(f"--steps: more than {EAGER_STEPS}, which come before the steps that are timed")
    results = merge(arguments.source) if arguments.source else measure(arguments)
    about = results["environment"]
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}\n")
    show(results)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
