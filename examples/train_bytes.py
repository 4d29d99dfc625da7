"""Train a small byte-level transformer without ever allocating the gradient of a linear weight, and compare.

    python examples/train_bytes.py --optimizer adamw --steps 200

Both runs start from the same weights and see the same batches. The first uses a generated optimizer, whose linear
layers update their weight inside the backward pass; the second uses its unfused counterpart. Printed at the end: both
losses, their largest difference, the peak memory of a training step of each, and the bytes of weight gradient that the
first run never allocated. The loss curves go to a picture.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from byte_model import ByteModel, LinearFunction, batches, standard_library_text
from counterparts import COUNTERPARTS, Counterpart
from memory import peak_bytes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

ROOT = Path(__file__).resolve().parent.parent
WATCHED_STEP = 2  # by then every optimizer state exists
console = Console()


@dataclass(frozen=True)
class Run:
    """What one training run did: the loss of each step, its seconds, and its peak memory in bytes."""

    label: str
    losses: list[float]
    seconds: float
    peak: int


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    counterpart = COUNTERPARTS[args.optimizer]
    fused_optimizer, fused_linear = load_generated(args.optimizer, counterpart)
    torch.manual_seed(args.seed)
    first = make_model(F.linear, args)
    weights = first.state_dict()
    data = batches(standard_library_text(), args.steps, args.batch, args.context, args.seed)
    parameters = sum(p.numel() for p in first.parameters())
    console.print(
        f"{parameters / 1e6:.1f} M parameters, {args.batch * args.context} tokens a step, {args.steps} steps "
        f"on {device}, {args.dtype}; the text is the Python standard library"
    )
    runs = []
    for label, linear, make in (
        (f"forge {counterpart.name}", fused_linear, fused_optimizer),
        (counterpart.label, F.linear, unfused(counterpart)),
    ):
        model = make_model(linear, args)
        model.load_state_dict(weights)
        model.to(device, getattr(torch, args.dtype))
        optimizer = make(model.parameters(), lr=args.lr or counterpart.lr, **counterpart.arguments)
        runs.append(train(label, model, optimizer, [batch.to(device) for batch in data]))
    never = sum(w.numel() for w in first.linear_weights) * getattr(torch, args.dtype).itemsize
    settings = f"{parameters / 1e6:.1f} M parameters, {args.batch * args.context} tokens a step, {args.dtype}, {device}"
    report(runs, never, plot(runs, args.output / f"{args.optimizer}.png", settings))


def train(label: str, model: ByteModel, optimizer: Optimizer, data: list[Tensor]) -> Run:
    """An ordinary training loop: warm-up and cosine decay of the learning rate, one optimizer step per batch."""
    rates = [group["lr"] for group in optimizer.param_groups]
    device = data[0].device
    losses: list[Tensor] = []
    peak = 0

    def step(batch: Tensor) -> None:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    start = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task(label, total=len(data), loss=math.nan)
        for index, batch in enumerate(data):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(index, len(data))
            if index == WATCHED_STEP or (device.type == "cuda" and index > WATCHED_STEP):
                present = [*model.parameters(), *(t for s in optimizer.state.values() for t in tensors(s))]
                peak = max(peak, peak_bytes(lambda batch=batch: step(batch), present, device))
            else:
                step(batch)
            if index % 5 == 4 or index == len(data) - 1:
                progress.update(task, completed=index + 1, loss=losses[-1].item())
    return Run(label, torch.stack(losses).tolist(), time.perf_counter() - start, peak)


def schedule(index: int, total: int) -> float:
    """The learning rate of step `index` relative to the highest: a tenth of the run rising, then half a cosine."""
    warmup = max(total // 10, 1)
    if index < warmup:
        return (index + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (index - warmup) / max(total - warmup, 1)))


def make_model(linear: LinearFunction, args: argparse.Namespace) -> ByteModel:
    return ByteModel(linear, args.width, args.depth, heads=args.width // 64, context=args.context)


def load_generated(stem: str, counterpart: Counterpart):
    """The optimizer class and the linear function of `generated/<stem>.py`."""
    sys.path.insert(0, str(ROOT))
    try:
        module = importlib.import_module(f"generated.{stem}")
    except ModuleNotFoundError as error:
        if error.name not in {"generated", f"generated.{stem}"}:
            raise
        raise SystemExit(
            f"generated/{stem}.py is missing; write it with: forge-gen optimizers/ -o generated/"
        ) from None
    return getattr(module, counterpart.name), getattr(module, f"{stem}_linear")


def unfused(counterpart: Counterpart):
    """Its constructor, with torch's one-tensor-at-a-time path, which keeps no list of gradients."""
    return lambda parameters, **arguments: counterpart.unfused(parameters, foreach=False, **arguments)


def tensors(state: dict[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def progress_bar() -> Progress:
    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console)


def report(runs: list[Run], never: int, picture: Path | None) -> None:
    table = Table()
    for column in ("", "first loss", "last 10 losses", "peak memory of a step", "time"):
        table.add_column(column, justify="left" if not column else "right")
    for run in runs:
        last = sum(run.losses[-10:]) / len(run.losses[-10:])
        table.add_row(run.label, f"{run.losses[0]:.4f}", f"{last:.4f}", mebibytes(run.peak), f"{run.seconds:.1f} s")
    console.print(table)
    differences = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
    for run in runs:
        lost = next((step for step, loss in enumerate(run.losses, 1) if not math.isfinite(loss)), None)
        if lost:
            console.print(
                f"{run.label} diverged: its loss is {run.losses[lost - 1]} from step {lost} on; try a lower --lr"
            )
    largest = max(filter(math.isfinite, differences), default=math.nan)
    console.print(f"largest difference between the two loss curves: {largest:.2e}")
    console.print(f"weight gradient that was never allocated: {mebibytes(never)}")
    saved = runs[1].peak - runs[0].peak
    if saved < 0.9 * never:
        console.print(
            f"The peak is lower by {mebibytes(max(saved, 0))} only: without the gradients it is reached elsewhere in "
            "the step, where activations or the loss take more than what is left."
        )
    if picture:
        console.print(f"loss curves: {picture}")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def plot(runs: list[Run], path: Path, settings: str) -> Path | None:
    """Both loss curves, and their difference below, as a PNG; None without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        console.print("no picture: matplotlib is missing (pip install 'forge-dsl[demo]')")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, height_ratios=(3, 1), figsize=(8, 5.5))
    steps = range(1, len(runs[0].losses) + 1)
    for run, style in zip(runs, ({"linewidth": 3.5, "alpha": 0.45}, {"linewidth": 1.2, "color": "black"}), strict=True):
        top.plot(steps, run.losses, label=run.label, **style)
    top.set_title(f"{runs[0].label} inside backward, and {runs[1].label}\n{settings}", fontsize=10)
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False)
    pairs = enumerate(zip(runs[0].losses, runs[1].losses, strict=True), 1)
    apart = [(step, abs(a - b)) for step, (a, b) in pairs if a != b and math.isfinite(a - b)]
    if apart:  # a zero has no place on a logarithmic axis
        bottom.semilogy(*zip(*apart, strict=True), linestyle="none", marker=".", markersize=4)
    else:
        bottom.text(0.5, 0.5, "none", transform=bottom.transAxes, ha="center", va="center")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=sorted(COUNTERPARTS), default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, help="highest learning rate (default: one that suits the optimizer)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--output", type=Path, default=ROOT / "examples" / "output", help="folder for the picture")
    args = parser.parse_args()
    if args.steps <= WATCHED_STEP:
        parser.error(f"--steps must be at least {WATCHED_STEP + 1}")
    for name in ("width", "depth", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.width % 64:
        parser.error("--width must be a multiple of 64")
    if args.lr is not None and not 0 <= args.lr < math.inf:
        parser.error("--lr must be a number from 0 up")
    problem = device_problem(args.device) or output_problem(args.output)
    if problem:
        parser.error(problem)
    return args


def device_problem(name: str | None) -> str | None:
    """Why nothing can be computed on this device; None if it can."""
    try:
        device = torch.device(name or "cpu")
        if device.type == "cuda" and not torch.cuda.is_available():
            return f"--device {name}: there is no usable NVIDIA GPU here; leave the option out for the CPU"
        torch.zeros(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return f"--device {name}: {str(error).splitlines()[0]}"
    return None


def output_problem(folder: Path) -> str | None:
    """Why no picture can be written to this folder; None if one can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"--output {folder}: {error.strerror}"
    return None


if __name__ == "__main__":
    main()
