"""Fuzzing of parser, checker, renderer and formatter: every text ends in a checked spec or in diagnostics, and quickly.

`python -m tests.fuzz.fuzz_frontend --count 20000`
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forge_dsl.analysis.check import check
from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.separability import certificate
from forge_dsl.diagnostics import CODES, Diagnostic, DiagnosticError, render, to_json
from forge_dsl.language.format import format_spec
from forge_dsl.language.parser import parse
from forge_dsl.language.source import read_spec
from tests.fuzz.spec_writer import SpecWriter, spoil

SECONDS = 1.0
OnValid = Callable[[Checked, str], object]


@dataclass
class Outcome:
    """How many texts were valid, the codes of the others, and the slowest of all."""

    valid: int = 0
    refused: int = 0
    slowest: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)


class FuzzFailure(AssertionError):
    """A text that broke a promise."""

    def __init__(self, seed: int, text: str, reason: str) -> None:
        super().__init__(f"{reason}\nseed {seed}, text {text!r}")
        self.text = text


def make(seed: int) -> str:
    """The text of one case: half of them as written, half of them spoiled."""
    rng = random.Random(seed)
    text = SpecWriter(rng).write()
    return spoil(text, rng) if rng.random() < 0.6 else text


def run(count: int, seed: int, on_valid: OnValid | None = None, seconds: float = SECONDS) -> Outcome:
    """Runs `count` cases; `on_valid(checked, text)` takes the valid ones further. Raises FuzzFailure."""
    outcome = Outcome()
    for case in range(seed, seed + count):
        text = make(case)
        start = time.process_time()
        try:
            _one(text, case, outcome)
        except (RecursionError, MemoryError, Exception) as error:
            raise FuzzFailure(case, text, f"{type(error).__name__}: {error}") from error
        spent = time.process_time() - start
        outcome.slowest = max(outcome.slowest, spent)
        if spent > seconds:
            raise FuzzFailure(case, text, f"took {spent:.2f} s")
        if on_valid is not None:
            try:
                checked, _ = check(parse(text), text, "fuzz.opt")
            except DiagnosticError:
                continue
            on_valid(checked, text)
    return outcome


def _one(text: str, case: int, outcome: Outcome) -> None:
    try:
        if case % 10 == 0:
            text = _through_a_file(text, case)
        tree = parse(text, "fuzz.opt")
        again = format_spec(tree)
        assert parse(again) == tree, f"printing changed the meaning:\n{again}"
        assert format_spec(parse(again)) == again, f"printing twice changed the text:\n{again}"
        checked, found = check(tree, text, "fuzz.opt")
    except DiagnosticError as error:
        outcome.refused += 1
        assert error.diagnostics, "an error without a diagnostic"
        assert any(d.severity == "error" for d in error.diagnostics)
        outcome.codes.update({d.code for d in error.diagnostics})
        _look_at(error.diagnostics, error.source)
        assert str(error)
        return
    outcome.valid += 1
    assert all(d.severity == "warning" for d in found)
    assert str(certificate(checked))
    _look_at(found, text)


def _look_at(found: tuple[Diagnostic, ...], source: str) -> None:
    for color in (False, True):
        shown = render(found, source, "fuzz.opt", color)
        shown.encode("utf-8")
        assert all(ch >= " " or ch in "\n\x1b" for ch in shown), "a control character was printed"
    json.dumps(to_json(found, "fuzz.opt"))
    for d in found:
        assert d.code in CODES and CODES[d.code].severity == d.severity, d
        assert 0 <= d.span.start <= d.span.end and d.span.line >= 1 and d.span.column >= 1, d


def _through_a_file(text: str, case: int) -> str:
    """The text as it comes back from a file into which some bytes fell."""
    rng = random.Random(case)
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.opt"
        path.write_bytes(bytes(data))
        return read_spec(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcome = run(arguments.count, arguments.seed)
    print(f"{outcome.valid} valid, {outcome.refused} refused, slowest {outcome.slowest * 1e3:.0f} ms")
    print(" ".join(f"{code}:{count}" for code, count in sorted(outcome.codes.items())))


if __name__ == "__main__":
    sys.exit(main())
