"""What `forge-gen SPECS -o OUT` does: compile everything, then write everything, or say why not."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_dsl import writer
from forge_dsl.inputs import check_leftovers, check_package, compile_specs, find_specs
from forge_dsl.leftovers import Leftovers
from forge_dsl.leftovers import find as find_leftovers
from forge_dsl.report import Report, colourful, show

if TYPE_CHECKING:
    from forge_dsl.compile import Compiled


# Files of other specs that a run names.
_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """The arguments of one run."""

    specs: tuple[Path, ...]
    out: Path
    docs: Path | None = None
    check: bool = False
    strict: bool = False
    prune: bool = False
    as_json: bool = False


def generate(run: Run) -> int:
    """Compile `run.specs` and make `run.out` hold the result; returns the exit status."""
    start = time.perf_counter()
    report = Report()
    paths = find_specs(run.specs, report)
    with _progress(len(paths), quiet=run.as_json) as advance:
        compiled = compile_specs(paths, report, advance)
    changes = None
    stems = {path.stem for path in paths} | {item.stem for item in compiled}
    others = Leftovers() if run.prune else find_leftovers(run.out, stems)
    check_package(run.out, report)
    check_leftovers(compiled, run.out, others, report)
    if not report.fails(run.strict):
        trees = _trees(compiled, run)
        try:
            changes = writer.compare(trees()) if run.check else writer.write(trees(), run.prune, trees)
        except writer.OutputError as error:
            report.add_output(error)
    if run.as_json:
        show(report, as_json=True, **_facts(changes, run), notes=others.notes)
    else:
        show(report, as_json=False)
        for note in others.notes:
            print(f"note: {note}", file=sys.stderr)
        _summarise(compiled, changes, report, run, time.perf_counter() - start)
    return int(changes is None or (run.check and changes.stale))


def _trees(compiled: Sequence[Compiled], run: Run) -> Callable[[], writer.Trees]:
    """What the folders are to hold; asked again, the package offers what has come into the folder since."""
    from forge_dsl.emit.folder import render, render_page
    from forge_dsl.emit.module import render_package

    own = render(compiled)
    # Whoever writes where they stand imports the modules themselves.
    package = run.out.name if run.out.name != ".." else ""
    pages = {f"{item.spec.stem}.md": render_page(item, package) for item in compiled}
    stems = {item.stem for item in compiled}

    def trees() -> writer.Trees:
        others = () if run.prune else find_leftovers(run.out, stems).modules
        found = {run.out: {**own, "__init__.py": render_package(compiled, others)}}
        return found if run.docs is None else {**found, run.docs: pages}

    return trees


def _facts(changes: writer.Changes | None, run: Run) -> dict[str, object]:
    """What a JSON document says beside the diagnostics."""
    facts: dict[str, object] = {"out": str(run.out), "written": changes is not None and not run.check}
    if changes is not None:
        for kind in ("create", "update", "unchanged", "orphans"):
            facts[kind] = [str(path) for path in getattr(changes, kind)]
    return facts


# ------------------------------------------------------------------ for people


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Path], None]]:
    """A bar on a terminal, gone when done; nothing elsewhere."""
    if quiet or total < 2 or not colourful(sys.stderr):
        yield lambda path: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda path: progress.update(task, advance=1, description=path.name)


def _summarise(
    compiled: Sequence[Compiled], changes: writer.Changes | None, report: Report, run: Run, seconds: float
) -> None:
    if changes is None:
        reason = " (warnings are errors under --strict)" if not report.errors else ""
        print(f"nothing was written{reason}", file=sys.stderr)
        return
    count = f"{len(compiled)} optimizer{'s' * (len(compiled) != 1)}"
    if run.check:
        for kind, paths in (("missing", changes.create), ("stale", changes.update), ("orphan", changes.orphans)):
            for path in paths:
                print(f"{kind}: {path}")
        print(f"{run.out}: {'not up to date' if changes.stale else 'up to date'} ({count})")
        if changes.stale:
            print(f"repair with: {_repair(run, prune=bool(changes.orphans))}")
        return
    if colourful(sys.stdout):
        _table(compiled)
    written = len(changes.create) + len(changes.update)
    print(f"{run.out}: {count}, {written} files written, {len(changes.unchanged)} unchanged, in {seconds:.1f} s")
    if run.prune:
        for path in changes.orphans:
            print(f"removed: {path}")
    elif changes.orphans:
        names = ", ".join(str(path) for path in changes.orphans[:_SHOWN])
        more = f" and {len(changes.orphans) - _SHOWN} more" if len(changes.orphans) > _SHOWN else ""
        print(f"kept, of specs that this run was not given: {names}{more}")
        print("(--prune removes what no spec of a run accounts for)")


def _repair(run: Run, prune: bool) -> str:
    """The command that makes the folders what `--check` expects."""
    words = ["forge-gen", *map(str, run.specs), "-o", str(run.out)]
    words += ["--docs", str(run.docs)] if run.docs is not None else []
    return shlex.join([*words, *["--strict"] * run.strict, *["--prune"] * prune])


def _table(compiled: Sequence[Compiled]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("optimizer", "states", "hyper-parameters", "flags"):
        table.add_column(column)
    for item in compiled:
        spec = item.spec
        table.add_row(spec.name, *(", ".join(names) for names in (spec.state_names, spec.hyper_names, spec.flag_names)))
    Console().print(table)
