"""Error of optimizer states and weights after 1,000 AdamW steps in each storage format, against float64. CPU, one core.

    python benchmarks/state_formats.py                       # print the tables
    python benchmarks/state_formats.py --plot errors.svg     # and draw the first one

A gradient is `scale * (mean + noise)` for each coordinate, its amplitude falling tenfold over the run. Scales are
log-uniform from 1e-8 to 1: of whole rows ("rows"), of rows with a log-normal spread of one e-fold within them
("spread"), or of every coordinate by itself ("mixed", eight decades within each block).

Other libraries' formats are re-computed here from their published formulas: FlashOptim (arXiv:2602.23349: groups of 32,
fp16 scales, companding 2x / (1 + |x|) and the square root), dynamic tree codes (arXiv:2110.02861; blocks of 256 as in
torchao, whose scales are at least 1e-12, and bitsandbytes, or of 2048 as in the paper), float8 e4m3 in blocks of 256.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forge_dsl.formats import codes, registry, rounding
from forge_dsl.formats.extended import Extended

ROWS, COLUMNS, STEPS = 16, 256, 1000
LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8
PROBLEMS = ("rows", "spread", "mixed")
MARKERS = ("x", "+", "v", "^", "s", "D")  # of formats that are not the project's
Store = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Stored:
    """A way to keep the two moments: what each is after a step, and bytes a parameter of both."""

    name: str
    bytes: float
    first: Store
    second: Store
    ours: bool = False


def ours(name: str, nonnegative: bool, stream: int, stochastic: bool = True) -> Store:
    """Through one of the project's formats, by its own draws."""
    form = registry.of_state(name, nonnegative)

    def store(values: Tensor, step: int) -> Tensor:
        draws = draws_of(step, stream) if stochastic else None
        return form.decode(*form.encode(values, draws))

    return store


def pair(name: str, first: str, second: str, stochastic: bool = True) -> Stored:
    total = sum(
        registry.bytes_of(registry.of_state(form, nonnegative), (ROWS, COLUMNS))
        for form, nonnegative in ((first, False), (second, True))
    )
    stores = (ours(first, False, 1, stochastic), ours(second, True, 2, stochastic))
    return Stored(name, total / (ROWS * COLUMNS), *stores, ours=True)


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The nearest of ascending levels."""
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


def in_groups(block: int, code: Callable[[Tensor], Tensor], least: float = 0.0) -> Store:
    """Through a code of numbers in [-1, 1], scaled by the largest magnitude of each block."""

    def store(values: Tensor, _: int) -> Tensor:
        groups = values.reshape(-1, block)
        scale = groups.abs().amax(1, keepdim=True).clamp(min=least)
        return (code(groups / torch.where(scale > 0, scale, 1.0)) * scale).reshape(values.shape)

    return store


def tree_levels(signed: bool) -> Tensor:
    """The 256 levels of the dynamic tree code: decades from 1e-6 to 1, each with twice the levels of the one below."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = (10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2).tolist()
        levels += middles + [-x for x in middles] * signed
    return torch.tensor(sorted(levels)).float()


def half_scale(groups: Tensor) -> Tensor:
    return groups.abs().amax(1, keepdim=True).half().float()


def flash_first(values: Tensor, _: int) -> Tensor:
    groups = values.reshape(-1, 32)
    scale = half_scale(groups)
    x = (groups / torch.where(scale > 0, scale, 1.0)).clamp(-1, 1)
    z = torch.round(2 * x / (1 + x.abs()) * 127) / 127
    return (z / (2 - z.abs()) * scale).reshape(values.shape)


def flash_second(values: Tensor, _: int) -> Tensor:
    groups = values.sqrt().reshape(-1, 32)
    scale = half_scale(groups)
    z = torch.round((groups / torch.where(scale > 0, scale, 1.0)).clamp(max=1) * 255) / 255
    return ((z * scale) ** 2).reshape(values.shape)


def to_float8(x: Tensor) -> Tensor:
    return (x * 448).to(torch.float8_e4m3fn).float() / 448


def linear(x: Tensor) -> Tensor:
    return torch.round(x * 127) / 127


def square_root(x: Tensor) -> Tensor:
    return (torch.round(x.sqrt() * 255) / 255) ** 2


def four_bits(x: Tensor) -> Tensor:
    """Signed squares in 4 bits."""
    return torch.round(x.abs().sqrt() * 7) ** 2 / 49 * x.sign()


def with_scales(nonnegative: bool, stream: int, bf16_scale: bool) -> Store:
    """The int8 codes under a scale that is the largest magnitude itself, in fp32 or rounded up to bf16."""
    top = 255.0**4 if nonnegative else 127.0**2

    def store(values: Tensor, step: int) -> Tensor:
        groups = values.reshape(-1, 64)
        scale = groups.abs().amax(1, keepdim=True)
        if bf16_scale:
            scale = (scale.view(torch.int32) + 0xFFFF & -65536).view(torch.float32)
        units = (groups.abs() / torch.where(scale > 0, scale, 1.0) * top).clamp(max=top)
        draws = draws_of(step, stream).reshape(units.shape)
        if nonnegative:
            coded = codes.fourth_value(codes.fourth_code(units, draws))
        else:
            coded = codes.square_value(codes.square_code(units, draws)) * groups.sign()
        return (coded / top * scale).reshape(values.shape)

    return store


def float_second(fraction: int, root: bool) -> Store:
    """A float of so many fraction bits and any exponent, of the second moment or its root; unbiased in the moment."""

    def store(values: Tensor, step: int) -> Tensor:
        bits = (values.sqrt() if root else values).view(torch.int32) & -(1 << 23 - fraction)
        low, high = (x.view(torch.float32) ** (2 if root else 1) for x in (bits, bits + (1 << 23 - fraction)))
        return torch.where(draws_of(step, 2) + 0.5 < (values - low) / (high - low) * 65536, high, low)

    return store


def by_its_own_mean(values: Tensor, step: int) -> Tensor:
    """Fourth powers, but the upper code with the chance that makes the mean of the moment right, not of its root."""
    form = registry.of_state("int8", True)
    always_down, always_up = (form.decode(*form.encode(values, torch.full(values.shape, d))) for d in (0, 65535))
    chance = (values - always_down) / (always_up - always_down).clamp_min(1e-38)
    return torch.where(draws_of(step, 2) + 0.5 < chance * 65536, always_up, always_down)


def draws_of(step: int, stream: int) -> Tensor:
    return rounding.draws_of(rounding.key(rounding.base(0, 0), step, stream), ROWS, COLUMNS)


def to_bf16(values: Tensor, _: int) -> Tensor:
    return values.bfloat16().float()


def systems() -> list[Stored]:
    tree1, tree2 = tree_levels(True), tree_levels(False)
    return [
        pair("fp32", "fp32", "fp32"),
        pair("bf16", "bf16", "bf16"),
        pair("int8 + bf16", "int8", "bf16"),
        pair("int8", "int8", "int8"),
        pair("fp8", "fp8", "fp8"),
        Stored("bf16, nearest (torch)", 4.0, to_bf16, to_bf16),
        Stored("FlashOptim 8-bit", 2 + 2 * 2 / 32, flash_first, flash_second),
        Stored(
            "dynamic 8-bit, 256 (torchao)",
            2 + 2 * 4 / 256,
            in_groups(256, lambda x: nearest(x, tree1), 1e-12),
            in_groups(256, lambda x: nearest(x, tree2), 1e-12),
        ),
        Stored(
            "dynamic 8-bit, 256 (bitsandbytes)",
            2 + 2 * 4 / 256,
            in_groups(256, lambda x: nearest(x, tree1)),
            in_groups(256, lambda x: nearest(x, tree2)),
        ),
        Stored(
            "dynamic 8-bit, 2048 (its paper)",
            2 + 2 * 4 / 2048,
            in_groups(2048, lambda x: nearest(x, tree1)),
            in_groups(2048, lambda x: nearest(x, tree2)),
        ),
        Stored(
            "float8 e4m3, 256 (torchao)",
            2 + 2 * 4 / 256,
            in_groups(256, to_float8, 1e-12),
            in_groups(256, to_float8, 1e-12),
        ),
    ]


def rejected() -> list[Stored]:
    """What the formats could have been: other scales, other floats, linear and square-root codes, four bits."""
    eight = ours("int8", True, 2)
    return [
        Stored("int8 with fp32 scales", 2.125, with_scales(False, 1, False), with_scales(True, 2, False)),
        Stored("int8 with bf16 scales", 2.062, with_scales(False, 1, True), with_scales(True, 2, True)),
        Stored("int8, by the mean of the second moment", 2.031, ours("int8", False, 1), by_its_own_mean),
        Stored("fp8, second moment e5m3", 2.031, ours("fp8", False, 1), float_second(3, root=False)),
        Stored("fp8, second moment e5m2", 2.031, ours("fp8", False, 1), float_second(2, root=False)),
        Stored("fp8, root of the second e4m3", 2.031, ours("fp8", False, 1), float_second(3, root=True)),
        pair("int8, to nearest", "int8", "int8", stochastic=False),
        Stored("linear + square root, to nearest", 2.125, in_groups(64, linear), in_groups(64, square_root)),
        Stored("first moment linear, second int8", 2.08, in_groups(64, linear), eight),
        Stored("first moment bf16, second int8", 3.02, ours("bf16", False, 1), eight),
        Stored("first moment 4 bits, second int8", 1.58, in_groups(64, four_bits), eight),
    ]


def gradients(problem: str, seed: int = 0) -> Iterator[Tensor]:
    """fp32 gradients of 1,000 steps."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, COLUMNS)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    of_rows = torch.linspace(-8, 0, ROWS, dtype=torch.float64)[:, None].expand(shape)
    if problem == "rows":
        scales = 10**of_rows
    elif problem == "spread":
        scales = 10**of_rows * torch.exp(normal())
    else:
        scales = 10 ** (-8 * torch.rand(shape, generator=generator, dtype=torch.float64))
    mean = 0.3 * normal()
    for step in range(STEPS):
        yield (scales * 10 ** (-step / STEPS) * (mean + normal())).float()


@dataclass(frozen=True)
class Result:
    weight: Tensor
    first: Tensor
    second: Tensor


def train(problem: str, stored: Stored | None) -> Result:
    """1,000 steps from zero; None: in float64 throughout. The weight is kept in fp32, or in float64."""
    dtype = torch.float64 if stored is None else torch.float32
    w, m, v = (torch.zeros(ROWS, COLUMNS, dtype=dtype) for _ in range(3))
    for step, g in enumerate(gradients(problem), 1):
        g = g.to(dtype)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        w = w - LR / (1 - BETA1**step) * m / ((v / (1 - BETA2**step)).sqrt() + EPS)
        if stored is not None:
            m, v = stored.first(m, step), stored.second(v, step)
    return Result(w.double(), m.double(), v.double())


@dataclass(frozen=True)
class Errors:
    """`weight`: error of the weight's change over the change, in the 2-norm; `worst`: of one coordinate, over the mean
    change; `root`, `bias`: relative error of the root of the second moment, root mean square and mean; `first`: error
    of the first moment over that root, root mean square."""

    weight: float
    worst: float
    first: float
    root: float
    bias: float


def errors(got: Result, truth: Result) -> Errors:
    off = got.weight - truth.weight
    root = truth.second.sqrt()
    relative = got.second.sqrt() / root - 1
    return Errors(
        (off.norm() / truth.weight.norm()).item(),
        (off.abs().max() / truth.weight.abs().mean()).item(),
        ((got.first - truth.first) / root).square().mean().sqrt().item(),
        relative.square().mean().sqrt().item(),
        relative.mean().item(),
    )


def table(chosen: list[Stored], truths: dict[str, Result]) -> dict[str, dict[str, Errors]]:
    found: dict[str, dict[str, Errors]] = {}
    problems = list(truths)
    print("| states | bytes | " + " | ".join(f"{p}: weight, worst, m, sqrt(v), bias" for p in problems) + " |")
    print("|---|---|" + "---|" * len(problems))
    for stored in chosen:
        found[stored.name] = {p: errors(train(p, stored), truths[p]) for p in problems}
        cells = [
            f"{e.weight:.2g}, {e.worst:.2g}, {e.first:.1g}, {e.root:.2g}, {e.bias:+.1g}"
            for e in found[stored.name].values()
        ]
        label = f"**{stored.name}**" if stored.ours else stored.name
        print(f"| {label} | {stored.bytes:.3f} | " + " | ".join(cells) + " |", flush=True)
    return found


def flash_weight(w: Tensor, _: Tensor | None) -> Tensor:
    """bf16 and the rest as one of 255 parts of half a unit in its last place."""
    high = w.bfloat16().float()
    half = torch.ldexp(torch.ones_like(w), torch.frexp(high).exponent - 9)
    return high + torch.round(((w - high) / half).clamp(-1, 1) * 127) / 127 * half


def extended(bits: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    codec = Extended(bits)
    return lambda w, draws: codec.decode(*codec.encode(w, draws))


def bf16(w: Tensor, draws: Tensor | None) -> Tensor:
    rounded = w.bfloat16() if draws is None else rounding.rounded_stochastic(w, torch.bfloat16, draws)
    return rounded.float()


def weight_table() -> None:
    """1,000 AdamW steps with fp32 states from weights of deviation 0.02; lr 1e-3 to 1e-6.

    A weight starts as what its format makes of it, so that the change is compared and not the first rounding too.
    """
    formats: list[tuple[str, float, Callable[[Tensor, Tensor | None], Tensor], bool]] = [
        ("**fp8**, nearest", 1 + 1 / 64, through(registry.of_weight("fp8")), False),
        ("**fp8**", 1 + 1 / 64, through(registry.of_weight("fp8")), True),
        ("bf16, nearest", 2, bf16, False),
        ("**bf16**", 2, bf16, True),
        ("**bf16+8**, nearest", 3, extended(8), False),
        ("**bf16+8**", 3, extended(8), True),
        ("**bf16+16** (= fp32)", 4, extended(16), False),
        ("FlashOptim bf16 + int8", 3, flash_weight, False),
    ]
    rates = (1e-3, 1e-4, 1e-5, 1e-6)
    moves = {rate: weight_moves(rate) for rate in rates}
    print("\n| weight | bytes | " + " | ".join(f"lr {rate:g}: error, lost" for rate in rates) + " |")
    print("|---|---|" + "---|" * len(rates))
    for name, size, store, stochastic in formats:
        cells = []
        for start, changes in moves.values():
            w = begun = store(start.float(), None)
            for step, change in enumerate(changes, 1):
                key = rounding.key(rounding.base(0, 1), step, 0)
                w = store(w + change.float(), rounding.draws_of(key, ROWS, COLUMNS) if stochastic else None)
            moved, truth = w.double() - begun.double(), torch.stack(changes).sum(0)
            off = (moved - truth).norm() / truth.norm()
            lost = 1 - (moved * truth).sum() / truth.square().sum()
            cells.append(f"{off:.2g}, {lost:+.1%}")
        print(f"| {name} | {size:.3g} | " + " | ".join(cells) + " |")


def weight_moves(rate: float) -> tuple[Tensor, list[Tensor]]:
    """bf16 weights in float64, and what AdamW in float64 adds to them in each step."""
    start = (0.02 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))).bfloat16().double()
    m, v, changes = torch.zeros_like(start), torch.zeros_like(start), []
    for step, g in enumerate(gradients("spread"), 1):
        m = BETA1 * m + (1 - BETA1) * g.double()
        v = BETA2 * v + (1 - BETA2) * g.double() ** 2
        changes.append(-rate / (1 - BETA1**step) * m / ((v / (1 - BETA2**step)).sqrt() + EPS))
    return start, changes


def dead_zone() -> None:
    """Quarters of a unit in the last place, and a second moment without gradient."""
    print("\n| after 1,000 steps | to nearest | by draws | exact |\n|---|---|---|---|")
    shape = (ROWS, COLUMNS)
    rows: list[tuple[str, float, float, Callable[[Tensor], Tensor], Callable[[Tensor, Tensor | None], Tensor]]] = [
        ("bf16 weight 1, + 2^-9 each", 1.0, 1 + 1000 * 2.0**-9, lambda x: x + 2.0**-9, bf16)
    ]
    for name in ("bf16", "int8", "fp8"):
        form = registry.of_state(name, True)
        rows.append((f"{name} second moment 1, * 0.999 each", 1.0, 0.999**1000, lambda x: x * 0.999, through(form)))
    for name, start, exact, change, store in rows:
        ends = []
        for stochastic in (False, True):
            x = torch.full(shape, start)
            for step in range(1, STEPS + 1):
                key = rounding.key(rounding.base(0, 2), step, 1)
                x = store(change(x), rounding.draws_of(key, *shape) if stochastic else None)
            ends.append(f"{x.mean():.4f} ± {x.std():.4f}")
        print(f"| {name} | {ends[0]} | {ends[1]} | {exact:.4f} |")


def through(form: registry.Format | Extended) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda x, draws: form.decode(*form.encode(x, draws))


def plot(found: dict[str, dict[str, Errors]], chosen: list[Stored], path: Path) -> None:
    """The weight's error over bytes a parameter, one panel a problem."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "forge-dsl"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PROBLEMS), figsize=(12, 4.2), sharey=True)
    for axis, problem in zip(axes, PROBLEMS, strict=True):
        for number, stored in enumerate(chosen[1:]):
            error = found[stored.name][problem].weight
            style = {"marker": "o" if stored.ours else MARKERS[number % len(MARKERS)], "linestyle": ""}
            axis.plot(stored.bytes, error, **style, color=f"C{number}", label=stored.name)
        axis.set(title=problem, xlabel="bytes a parameter, both states", yscale="log", xlim=(1.9, 4.2))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("error of the weight's change")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the first table as an SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    truths = {problem: train(problem, None) for problem in PROBLEMS}
    chosen = systems()
    found = table(chosen, truths)
    print()
    table(rejected(), truths)
    weight_table()
    dead_zone()
    if arguments.plot:
        plot(found, chosen, arguments.plot)


if __name__ == "__main__":
    main()
