"""What a run has to say: diagnostics of several files, shown to a person or to a program."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_dsl.diagnostics import Diagnostic, DiagnosticError, render, to_json
from forge_dsl.language.syntax import NOWHERE
from forge_dsl.writer import OutputError


@dataclass
class Report:
    """Diagnostics, file by file; a file's text is kept to show the lines in question."""

    files: list[tuple[str, str, tuple[Diagnostic, ...]]] = field(default_factory=list)

    def add(self, diagnostics: Iterable[Diagnostic], source: str, filename: str) -> None:
        """Note what was found in one file."""
        found = tuple(diagnostics)
        if found:
            self.files.append((filename, source, found))

    def add_error(self, error: DiagnosticError) -> None:
        """Note why a file was refused."""
        self.add(error.diagnostics, error.source, error.filename)

    def add_output(self, error: OutputError) -> None:
        """Note why nothing could be written."""
        for problem in error.problems:
            message = f"`{problem.path}` {problem.message}"
            self.add([Diagnostic("E0902", "error", message, NOWHERE, help=problem.help)], "", str(problem.path))

    def __iter__(self) -> Iterator[Diagnostic]:
        return (diagnostic for _, _, found in self.files for diagnostic in found)

    @property
    def errors(self) -> int:
        """How many errors."""
        return sum(diagnostic.severity == "error" for diagnostic in self)

    @property
    def warnings(self) -> int:
        """How many warnings."""
        return sum(diagnostic.severity == "warning" for diagnostic in self)

    def fails(self, strict: bool) -> bool:
        """Whether the run must stop here: on an error, and with `strict` on a warning too."""
        return bool(self.errors or (strict and self.warnings))

    def text(self, color: bool) -> str:
        """Every diagnostic with its source line, and a closing count; empty if there is none."""
        blocks = [render(found, source, filename, color) for filename, source, found in self.files]
        if not blocks:
            return ""
        counts = [_count(self.errors, "error"), _count(self.warnings, "warning")]
        return "\n\n".join([*blocks, ", ".join(filter(None, counts))])

    def json(self) -> list[dict[str, Any]]:
        """Every diagnostic as `diagnostics.to_json` writes it."""
        return [entry for filename, _, found in self.files for entry in to_json(found, filename)]


def show(report: Report, as_json: bool, **facts: Any) -> None:
    """Print the report: for people to stderr, in colour on a terminal; as one JSON document with `facts` to stdout."""
    if as_json:
        print(json.dumps({**facts, "diagnostics": report.json()}, indent=2))
        return
    text = report.text(color=colourful(sys.stderr))
    if text:
        print(text, file=sys.stderr)


def colourful(stream: Any) -> bool:
    """Whether to write colours to `stream`: to a terminal, unless NO_COLOR or a dumb terminal forbids it."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _count(number: int, noun: str) -> str:
    return "" if number == 0 else f"1 {noun}" if number == 1 else f"{number} {noun}s"
