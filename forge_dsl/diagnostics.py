"""What the compiler says about a spec: diagnostics, their rendering for people, their JSON for editors, and the page
of codes.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_dsl.codes import CODES, CodeInfo
from forge_dsl.language.syntax import NOWHERE, Span

__all__ = ["CODES", "CodeInfo", "Diagnostic", "DiagnosticError", "errors_page", "ordered", "render", "to_json"]

Severity = Literal["error", "warning"]

TAB = "    "
# Columns of a source line that are shown.
EXCERPT = 160
STYLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "frame": "\x1b[1;34m",
    "strong": "\x1b[1m",
    "help": "\x1b[1;36m",
}
RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding, at one place. `notes` say why, `help` says what to write instead."""

    code: str
    severity: Severity
    message: str
    span: Span
    notes: tuple[str, ...] = ()
    help: str | None = None


class DiagnosticError(Exception):
    """A spec was refused. Holds every diagnostic found and the text they point into; `str()` is the plain rendering."""

    def __init__(self, diagnostics: Iterable[Diagnostic], source: str, filename: str) -> None:
        self.diagnostics = ordered(diagnostics)
        self.source = source
        self.filename = filename
        super().__init__(self.diagnostics, filename)

    def __str__(self) -> str:
        return render(self.diagnostics, self.source, self.filename, color=False)


def ordered(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """In the order of the source, without repetitions."""
    return tuple(sorted(dict.fromkeys(diagnostics), key=lambda d: (d.span.start, d.span.end, d.code)))


def render(diagnostics: Iterable[Diagnostic], source: str, filename: str, color: bool) -> str:
    """All diagnostics in the manner of rustc, separated by blank lines, without a final newline."""
    lines = source.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff").split("\n")
    return "\n\n".join(_render_one(d, lines, filename, color) for d in diagnostics)


def _render_one(d: Diagnostic, lines: Sequence[str], filename: str, color: bool) -> str:
    def paint(style: str, text: str) -> str:
        return f"{STYLES[style]}{text}{RESET}" if color else text

    number = str(d.span.line)
    gutter = " " * len(number)
    bar = paint("frame", "|")
    out = [paint(d.severity, f"{d.severity}[{d.code}]") + paint("strong", f": {_printable(d.message)}")]
    place = "" if d.span == NOWHERE and lines == [""] else f":{d.span.line}:{d.span.column}"
    out.append(f"{gutter}{paint('frame', '-->')} {_printable(filename)}{place}")
    if 1 <= d.span.line <= len(lines) and lines != [""]:
        text, marks = _underline(lines[d.span.line - 1], d.span)
        out.append(f"{gutter} {bar}")
        out.append(f"{paint('frame', number)} {bar} {text}".rstrip())
        out.append(f"{gutter} {bar} {paint(d.severity, marks)}".rstrip())
    notes = [("note", note) for note in d.notes]
    if d.help is not None:
        notes.append(("help", d.help))
    for label, text in notes:
        head, *rest = text.split("\n")
        tag = paint("help" if label == "help" else "strong", label)
        out.append(f"{gutter} {paint('frame', '=')} {tag}: {_printable(head)}")
        out.extend(f"{gutter}         {_printable(line)}".rstrip() for line in rest)
    return "\n".join(out)


def _underline(line: str, span: Span) -> tuple[str, str]:
    """The line as shown, and the blanks and carets below it: tabs, wide and invisible characters keep their columns.

    A line too wide for a screen is cut around the place, to EXCERPT columns at most.
    """
    first = min(span.column - 1, len(line))
    last = span.end_column - 1 if span.end_line == span.line else len(line.rstrip())
    last = max(last, first + 1)
    begin, end = _window(line, first)
    shown = [_cell(ch) for ch in line[begin:end]]
    before = sum(_width(cell) for cell in shown[: first - begin])
    under = sum(_width(cell) for cell in shown[first - begin : last - begin])
    lead, tail = ("... " if begin else ""), (" ..." if end < len(line) else "")
    return lead + "".join(shown) + tail, " " * (before + len(lead)) + "^" * max(1, under)


def _window(line: str, first: int) -> tuple[int, int]:
    """Which characters of a line to show so that the one at `first` is among them, and as much after it as before.

    Reads no more of the line than it shows. What takes no column counts too: a letter may carry any number of marks.
    """

    def reach(place: int, step: int, columns: int) -> int:
        for _ in range(2 * columns):
            ahead = place if step > 0 else place - 1
            if not 0 <= ahead < len(line):
                break
            columns -= _width(_cell(line[ahead]))
            if columns < 0:
                break
            place += step
        return place

    if reach(0, 1, EXCERPT) == len(line):
        return 0, len(line)
    begin = reach(first, -1, EXCERPT // 2)
    end = reach(begin, 1, EXCERPT)
    if end == len(line):
        begin = reach(end, -1, EXCERPT)
    while 0 < begin < first and not _width(_cell(line[begin])):
        begin += 1  # a mark whose letter is cut off would stand on the dots
    return begin, max(end, min(first + 1, len(line)))


def _cell(ch: str) -> str:
    if ch == "\t":
        return TAB
    return ch if _is_visible(ch) else "\ufffd"


def _width(cell: str) -> int:
    """Columns on a terminal. Not all marks that take none have a combining class: those that choose a glyph have 0."""
    marks = {"Mn", "Me"}
    return sum(
        0 if unicodedata.category(ch) in marks else 1 + (unicodedata.east_asian_width(ch) in "WF") for ch in cell
    )


def _is_visible(ch: str) -> bool:
    return ch == " " or unicodedata.category(ch) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _printable(text: str) -> str:
    """`text` on one line, with everything that would disturb a terminal replaced."""
    return "".join(ch if _is_visible(ch) else "\ufffd" for ch in text)


def to_json(diagnostics: Iterable[Diagnostic], filename: str) -> list[dict[str, Any]]:
    """JSON-ready dicts, one per diagnostic; lines and columns count from 1, offsets from 0, ends are exclusive."""
    return [
        {
            "code": d.code,
            "name": CODES[d.code].slug,
            "severity": d.severity,
            "message": d.message,
            "file": filename,
            "start": {"line": d.span.line, "column": d.span.column, "offset": d.span.start},
            "end": {"line": d.span.end_line, "column": d.span.end_column, "offset": d.span.end},
            "notes": list(d.notes),
            "help": d.help,
        }
        for d in diagnostics
    ]


def errors_page() -> str:
    """The Markdown of docs/errors.md: every code, what it means, a spec that fails and the same spec repaired."""
    parts = [
        "# Errors and warnings",
        "",
        "Made from the table of codes in `forge_dsl/codes.py`. An error stops the compiler and nothing is written;"
        " a warning",
        "does not, unless `--strict` is given. All errors of a file are reported together.",
        "",
        "| code | name | |",
        "|---|---|---|",
    ]
    parts += [f"| [{c.code}](#{c.code.lower()}-{c.slug}) | {c.slug} | {c.severity} |" for c in CODES.values()]
    for c in CODES.values():
        parts += ["", f"## {c.code}: {c.slug}", "", c.explanation.strip()]
        parts += ["", "Refused:" if c.severity == "error" else "Warned about:", "", "```", _shortened(c.failing), "```"]
        parts += ["", "Accepted:", "", "```", _shortened(c.fixed), "```"]
    return "\n".join(parts) + "\n"


def _shortened(example: str) -> str:
    """An example with all but the first of many equal lines left out, and a picture for what has none."""
    parts: list[str] = []
    shown = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), example)
    for line, same in itertools.groupby(shown.strip("\n").split("\n")):
        count = len(list(same))
        indent = line[: len(line) - len(line.lstrip())]
        parts += [line, f"{indent}... {count - 1} more such lines"] if count > 4 else [line] * count
    return "\n".join(parts)
