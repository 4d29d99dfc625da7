"""How long the command takes: to start, and to generate the specs of the project; and where the time goes.

    python benchmarks/compiler.py

Bounds: 0.3 s to start, 1.5 s for all eight specs, on two cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from forge_dsl.analysis.check import check
from forge_dsl.compile import compile_source
from forge_dsl.emit.folder import render, render_page
from forge_dsl.language.parser import parse
from forge_dsl.resources import optimizers_dir

REPEATS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forge_dsl"]
        everything = [*command, str(optimizers_dir()), "-o", f"{folder}/generated", "--docs", f"{folder}/docs"]
        show("forge-gen --version", lambda: run([*command, "--version"]))
        show("forge-gen optimizers/ -o generated/", lambda: run(everything))
    texts = {path.name: path.read_text() for path in sorted(optimizers_dir().glob("*.opt"))}
    trees = {name: parse(text, name) for name, text in texts.items()}
    compiled = [compile_source(text, name) for name, text in texts.items()]
    show("  parse", lambda: [parse(text, name) for name, text in texts.items()])
    show("  check", lambda: [check(tree, texts[name], name) for name, tree in trees.items()])
    show("  parse, check, lower, optimise", lambda: [compile_source(text, name) for name, text in texts.items()])
    show("  render modules and tests", lambda: render(compiled))
    show("  render pages", lambda: [render_page(item) for item in compiled])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def show(label: str, action: Callable[[], object]) -> None:
    """Print the median time of `action` in milliseconds, and the fastest."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - start))
    print(f"{label:<40} {statistics.median(times):8.1f} ms   (fastest {min(times):.1f})")


if __name__ == "__main__":
    main()
