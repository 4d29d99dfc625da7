"""From text to logical lines: where statements begin and end, how far they are indented, and which comments go with
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forge_dsl.diagnostics import Diagnostic
from forge_dsl.language.source import SourceText

_PIECE = re.compile(r"""\n|#[^\n]*|"(?:\\[^\n]|[^"\\\n])*"?|'[^'\n]*'|[\[({]|[\])}]""")
_TOP_LEVEL = re.compile(r"(?:optimizer|hyper|flag|state|scalar|let|require)[ \t]+\w|update[ \t]*:")
_BLANKS = " \t"


@dataclass(frozen=True, slots=True)
class LogicalLine:
    """One statement's text `[start, end)`, without comments around it.

    `leading` are the comments above it, and those inside its brackets; a blank line among or above them is None.
    `complete` is False when a bracket is left open: the line is reported already, and not worth parsing.
    """

    start: int
    end: int
    indent: int
    leading: tuple[str | None, ...]
    trailing: str | None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """The logical lines of a file, the comments after the last one, and what is wrong with brackets and indentation.

    `closing` are the comments after the last line that are indented like it, `footer` those below them.
    """

    lines: tuple[LogicalLine, ...]
    closing: tuple[str | None, ...]
    footer: tuple[str | None, ...]
    problems: tuple[Diagnostic, ...]


def split(source: SourceText) -> Layout:
    """Cuts the text into logical lines."""
    text = source.text
    lines: list[LogicalLine] = []
    problems: list[Diagnostic] = []
    pending: list[str | None] = []
    indented = 0  # how many of the pending lines there are up to the last comment before one that is not indented
    position = 0
    while position < len(text):
        newline = text.find("\n", position)
        line_end = len(text) if newline < 0 else newline
        start = position
        while start < line_end and text[start] in _BLANKS:
            start += 1
        if start == line_end:
            if pending[-1:] != [None] and (pending or lines):
                pending.append(None)
            position = line_end + 1
        elif text[start] == "#":
            same = indented == len(pending) or pending[indented:] == [None]
            pending.append(comment_text(text[start:line_end]))
            indented = len(pending) if start > position and same else indented
            position = line_end + 1
        else:
            if "\t" in text[position:start]:
                message = "this line is indented with a tab; indent with spaces"
                problems.append(Diagnostic("E0105", "error", message, source.span(position, start)))
            indent = len(text[position:start].expandtabs(4))
            line, position, unclosed = _scan(text, start, indent, pending)
            if unclosed is not None:
                message = f"this `{text[unclosed]}` is never closed"
                problems.append(Diagnostic("E0103", "error", message, source.span(unclosed, unclosed + 1)))
            lines.append(line)
            pending, indented = [], 0
    while pending and pending[-1] is None:
        pending.pop()
    return Layout(tuple(lines), tuple(pending[:indented]), tuple(pending[indented:]), tuple(problems))


def _scan(text: str, start: int, indent: int, pending: list[str | None]) -> tuple[LogicalLine, int, int | None]:
    """The logical line that begins at `start`, where the next physical line begins, and a bracket left open, if any."""
    opened: list[int] = []
    inner: list[str | None] = []
    trailing = None
    stop = after = len(text)
    unclosed = None
    for match in _PIECE.finditer(text, start):
        mark = text[match.start()]
        if mark == "\n":
            if not opened or _TOP_LEVEL.match(text, match.end()):
                stop, after = match.start(), match.end()
                break
        elif mark == "#":
            if opened:
                inner.append(comment_text(match.group()))
            else:
                trailing = comment_text(match.group())
        elif mark in "[({":
            opened.append(match.start())
        elif mark in "])}" and opened:
            opened.pop()
    if opened:
        unclosed = opened[0]
    body = text[start:stop]
    if trailing is not None:
        # A comment outside brackets runs to the end of the logical line, so the last `#` piece is the one to cut.
        body = body[: _comment_start(text, start, stop) - start]
    end = start + len(body.rstrip(" \t\n"))
    line = LogicalLine(start, end, indent, (*pending, *inner), trailing, complete=unclosed is None)
    return line, after, unclosed


def _comment_start(text: str, start: int, stop: int) -> int:
    position = stop
    for match in _PIECE.finditer(text, start, stop):
        if text[match.start()] == "#":
            position = match.start()
    return position


def comment_text(comment: str) -> str:
    """What a comment says: without `#`, without one blank after it, without blanks at the end."""
    return comment[1:].removeprefix(" ").rstrip()
