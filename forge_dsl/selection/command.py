"""`forge-gen tune`: measure the schedules of this machine's GPU, show and keep what was found.

Exit status: 0 good, 1 a wrong result or nothing measured, 2 usage, and where there is no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_dsl.selection import table

if TYPE_CHECKING:
    from forge_dsl.selection.table import Device, Measurement
    from forge_dsl.selection.timer import Timer
    from forge_dsl.selection.tune import Outcome

TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Wish:
    """What the command line asks for. shapes: weights [out, in]; optimizers: names of the package, or spec files."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    optimizers: tuple[str, ...]
    operand: str
    state: str
    device: int
    dry_run: bool
    as_json: bool
    gradient_bits: Literal[24, 32] = 24


def parse_shape(text: str) -> tuple[int, int]:
    """`4096x1024`: rows (out) and columns (in). Raises ValueError."""
    try:
        rows, columns = map(int, text.lower().split("x"))
    except ValueError:
        raise ValueError(f"a shape is written OUTxIN, for example 14336x4096, and not {text!r}") from None
    if rows < 1 or columns < 1:
        raise ValueError(f"a weight needs rows and columns, and {text!r} has none")
    return rows, columns


def optimizer_names() -> list[str]:
    """The optimizers that come with the package, by the names of their specs."""
    from forge_dsl.resources import optimizers_dir

    return sorted(path.stem for path in optimizers_dir().glob("*.opt"))


def tune(wish: Wish, time: Timer | None = None, device: Device | None = None) -> int:
    """Measure, print, and write the user's cache; returns the exit status.

    time and device: instead of a GPU's own times and name, for tests; kernels then run wherever they can here.
    """
    import torch

    from forge_dsl import testing
    from forge_dsl.diagnostics import DiagnosticError
    from forge_dsl.selection.tune import classes, measure_all

    if device is None:
        if not torch.cuda.is_available() or wish.device >= torch.cuda.device_count():
            print(_no_device(wish.device, torch.cuda.is_available()), file=sys.stderr)
            return 2
        torch.cuda.set_device(wish.device)
        device = table.this_device(wish.device)
        place = torch.device("cuda", wish.device)
    else:
        place = testing.device()
    from forge_dsl.selection.timer import interleaved

    operand, state = getattr(torch, TYPES[wish.operand]), getattr(torch, TYPES[wish.state])
    try:
        rules = [_rule(name) for name in wish.optimizers]
    except DiagnosticError as error:
        print(error, file=sys.stderr)
        return 1
    wanted = classes(rules, operand, state, wish.shapes, wish.tokens, wish.gradient_bits)
    outcomes: list[Outcome] = []
    progress, begin = _progress(len(wanted))
    with progress:
        for outcome in measure_all(wanted, place, time or interleaved, begin):
            outcomes.append(outcome)
            progress.advance(progress.task_ids[0])
    return _finish(wish, device, outcomes)


def _no_device(index: int, some: bool) -> str:
    if some:
        import torch

        return f"forge-gen tune: there is no GPU {index}; this machine has {torch.cuda.device_count()}, counted from 0"
    return (
        "forge-gen tune measures kernels and needs an NVIDIA GPU that torch can use; there is none here. "
        "On a CPU there is one schedule and nothing to choose."
    )


def _rule(name: str) -> Any:
    """A rule by the name of its spec in the package, or by the path of a spec."""
    from forge_dsl.loading import load
    from forge_dsl.resources import optimizers_dir

    path = Path(name)
    return load(path if path.suffix == ".opt" else optimizers_dir() / f"{name}.opt").RULE


def _progress(total: int) -> tuple[Any, Any]:
    """A progress bar on stderr, and what tells it the class that begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task("compiling and measuring", total=total)
    return progress, lambda one: progress.update(progress.task_ids[0], description=str(one))


def _finish(wish: Wish, device: Device, outcomes: Sequence[Outcome]) -> int:
    """Write what was measured, unless a result was wrong or nothing is to be written, and print it."""
    measured = [outcome.measured for outcome in outcomes if outcome.measured is not None]
    faulty = any(outcome.fault for outcome in outcomes)
    written: Path | None = None
    if measured and not faulty and not wish.dry_run:
        known = table.read(device) or table.Table(device=device, measured=())
        try:
            written = table.write(known.with_more(measured))
        except OSError as error:
            print(f"forge-gen tune: cannot write {table.cache_file(device)}: {error.strerror}", file=sys.stderr)
            return 1
    for outcome in outcomes:
        if outcome.reason:
            print(f"{'error' if outcome.fault else 'left out'}: {outcome.one}: {outcome.reason}", file=sys.stderr)
    if wish.as_json:
        facts = {"device": device.model_dump(), "measured": [one.model_dump() for one in measured]}
        print(json.dumps({**facts, "written": None if written is None else str(written)}, indent=1))
    else:
        render(device, measured)
        if written is not None:
            print(f"wrote {written}; programs that start from now on use it")
        elif faulty:
            print("nothing was written, since results differ")
        elif measured:
            print("nothing was written (--dry-run)")
    return int(faulty or not measured)


def render(device: Device, measured: Sequence[Measurement]) -> None:
    """Print measurements as a table; the fastest schedule of each in bold, and by name in the last column."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{table.described(device)}; milliseconds", title_justify="left", box=None, pad_edge=False)
    # Of the gradient; with 24, as nearly always, there is nothing to say about them.
    with_bits = any(one.gradient_bits != 24 for one in measured)
    more = ("bits",) if with_bits else ()
    for name in ("weight", "tokens", "type", "bytes stored", *more, *table.SCHEDULES, "fastest"):
        left = name in ("weight", "type", "fastest")
        shown.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one in measured:
        best = one.order[0]
        times = [_cell(one.milliseconds.get(name), name == best) for name in table.SCHEDULES]
        stored = f"{one.stored}{', fp32' if one.wide else ''}"
        operand = next(short for short, name in TYPES.items() if name == one.operand)
        bits = (str(one.gradient_bits),) if with_bits else ()
        shown.add_row(f"{one.rows} x {one.columns}", str(one.tokens), operand, stored, *bits, *times, best)
    Console().print(shown)


def _cell(milliseconds: float | None, best: bool) -> str:
    text = "-" if milliseconds is None else f"{milliseconds:.4f}"
    return f"[bold]{text}[/bold]" if best else text


def show(as_json: bool) -> int:
    """Print the package's tables and the user's; a file that cannot be read is named."""
    from pydantic import ValidationError

    tables = [("in the package", one) for one in table.packaged()]
    status = 0
    for path in table.cached():
        try:
            tables.append((str(path), table.Table.model_validate_json(path.read_bytes())))
        except (OSError, ValidationError):
            print(f"forge-gen tune: {path} cannot be read; remove it with --clear", file=sys.stderr)
            status = 1
    if as_json:
        print(json.dumps([{"where": where, **one.model_dump()} for where, one in tables], indent=1))
        return status
    for where, one in tables:
        print(where)
        render(one.device, one.measured)
    return status


def clear(as_json: bool) -> int:
    """Remove the user's tables and say so."""
    try:
        removed = table.clear()
    except OSError as error:
        print(f"forge-gen tune: cannot remove {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"removed": [str(path) for path in removed]}))
        return 0
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"there is nothing in {table.cache_folder()}")
    return 0
