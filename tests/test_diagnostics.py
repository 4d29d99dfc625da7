"""How diagnostics look, on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from forge_dsl.diagnostics import Diagnostic, DiagnosticError, ordered, render, to_json
from forge_dsl.language.source import SourceText
from forge_dsl.language.syntax import NOWHERE


def at(source: str, piece: str, **rest: object) -> Diagnostic:
    start = source.index(piece)
    span = SourceText(source, "a.opt").span(start, start + len(piece))
    return Diagnostic("E0201", "error", "no such name", span, **rest)  # type: ignore[arg-type]


def carets(source: str, piece: str) -> tuple[str, str]:
    """The shown line and the marks under it, without the gutter."""
    lines = render([at(source, piece)], source, "a.opt", color=False).split("\n")
    return lines[3][4:], lines[4][4:]


def test_plain() -> None:
    source = "one\n  two = thre\n"
    found = at(source, "thre", notes=("a note",), help="did you mean `three`?\nor this")
    assert render([found], source, "a.opt", color=False) == (
        "error[E0201]: no such name\n"
        " --> a.opt:2:9\n"
        "  |\n"
        "2 |   two = thre\n"
        "  |         ^^^^\n"
        "  = note: a note\n"
        "  = help: did you mean `three`?\n"
        "          or this"
    )


def test_colour_changes_nothing_but_colour() -> None:
    source = "x = y\n"
    found = [at(source, "y", notes=("n",), help="h"), Diagnostic("W0802", "warning", "w", at(source, "x").span)]
    coloured = render(found, source, "a.opt", color=True)
    assert "\x1b[1;31merror[E0201]" in coloured and "\x1b[1;33mwarning[W0802]" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(found, source, "a.opt", color=False)


@pytest.mark.parametrize(
    ("source", "piece", "line", "marks"),
    [
        ("\tx = y", "y", "    x = y", "        ^"),
        ("\u6f22\u5b57 = y", "y", "\u6f22\u5b57 = y", "       ^"),
        ("\u6f22\u5b57 = y", "\u6f22\u5b57", "\u6f22\u5b57 = y", "^^^^"),
        ("e\u0301 = y", "y", "e\u0301 = y", "    ^"),
        ("a\x1b = y", "y", "a\ufffd = y", "     ^"),
        ("a = y", "a = y", "a = y", "^^^^^"),
        ("f(a,\n  b)", "f(a,\n  b)", "f(a,", "^^^^"),
    ],
)
def test_the_caret_stands_under_what_it_means(source: str, piece: str, line: str, marks: str) -> None:
    assert carets(source, piece) == (line, marks)


def test_an_end_of_line_has_a_caret() -> None:
    source = "x =\n"
    span = SourceText(source, "a").span(3, 3)
    shown = render([Diagnostic("E0101", "error", "m", span)], source, "a", color=False).split("\n")
    assert shown[4] == "  |    ^"


def test_a_long_line_is_cut_around_the_caret() -> None:
    source = "x" * 400 + " y " + "z" * 400
    line, marks = carets(source, "y")
    assert len(line) < 220 and line[marks.index("^")] == "y"


def test_what_is_no_place_in_a_text_has_no_line() -> None:
    shown = render([Diagnostic("E0001", "error", "cannot read", NOWHERE)], "", "a.opt", color=False)
    assert shown == "error[E0001]: cannot read\n --> a.opt"


def test_nothing_from_a_file_can_drive_a_terminal() -> None:
    source = "x\x1b[2J = y\u202e\n"
    found = Diagnostic("E0101", "error", "bad \x1b[2J \n name", at(source, "y").span, ("\x07",), "\x9b")
    shown = render([found], source, "a\x1b\n.opt", color=False)
    assert all(ch >= " " or ch == "\n" for ch in shown) and "\u202e" not in shown and "\x9b" not in shown


def test_json() -> None:
    source = "one\n  two = thre\n"
    (entry,) = to_json([at(source, "thre", notes=("n",), help="h")], "a.opt")
    assert json.loads(json.dumps(entry)) == {
        "code": "E0201",
        "name": "undefined-name",
        "severity": "error",
        "message": "no such name",
        "file": "a.opt",
        "start": {"line": 2, "column": 9, "offset": 12},
        "end": {"line": 2, "column": 13, "offset": 16},
        "notes": ["n"],
        "help": "h",
    }


def test_an_error_is_in_order_and_says_all() -> None:
    source = "a b"
    error = DiagnosticError([at(source, "b"), at(source, "a"), at(source, "b")], source, "a.opt")
    assert [d.span.column for d in error.diagnostics] == [1, 3]
    assert error.diagnostics == ordered(error.diagnostics)
    assert str(error).count("error[E0201]") == 2
