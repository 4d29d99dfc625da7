"""What `forge-gen fmt` does: put specs into their canonical form, none unless all of them parse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.inputs import find_specs, read_named
from forge_dsl.report import Report
from forge_dsl.writer import OutputError, replace_text


def format_files(paths: Iterable[Path], report: Report, write: bool) -> list[Path]:
    """The spec files that are not in canonical form; with `write`, and if every file parses, they are put into it."""
    from forge_dsl.language.format import format_spec
    from forge_dsl.language.parser import parse

    changed: list[tuple[Path, str]] = []
    for path in find_specs(paths, report):
        try:
            text = format_spec(parse(read_named(path), str(path)))
            if text.encode() != path.read_bytes():
                changed.append((path, text))
        except DiagnosticError as error:
            report.add_error(error)
    if write and not report.errors:
        for path, text in changed:
            try:
                replace_text(path, text)
            except OutputError as error:
                report.add_output(error)
    return [path for path, _ in changed]
