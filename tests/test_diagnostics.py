"""How diagnostics look, on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import json
import re
from unicodedata import category, east_asian_width

import pytest

from forge_dsl.diagnostics import CODES, EXCERPT, Diagnostic, DiagnosticError, ordered, render, to_json
from forge_dsl.language.source import SourceText
from forge_dsl.language.syntax import NOWHERE
from tests.specs import diagnose


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


@pytest.mark.parametrize(
    "pad", ["x", "\t", "\u6f22", "e\u0301", "\u2764\ufe0f", "a" + "\u0301" * 30, "\u0301", " ", "\x1b"]
)
@pytest.mark.parametrize("before", [0, 1, 70, 100_000])
@pytest.mark.parametrize("after", [0, 1, 70, 100_000])
def test_a_line_of_any_characters_is_cut_to_a_width(pad: str, before: int, after: int) -> None:
    source = pad * before + " y " + pad * after
    line, marks = carets(source, "y")
    assert columns(line) <= EXCERPT + 8 and len(line) <= 4 * EXCERPT
    place = next(i for i in range(len(line)) if columns(line[:i]) == marks.index("^") and line[i] == "y")
    assert marks.strip() == "^" and columns(line[:place]) == len(marks) - 1
    if before != 70:
        assert line.startswith("... ") == (before > 1)


def test_a_place_wider_than_the_window_is_marked_as_far_as_it_is_shown() -> None:
    source = "a = " + "\u6f22" * 50_000
    line, marks = carets(source, "\u6f22" * 50_000)
    assert columns(line) <= EXCERPT + 8
    assert marks.strip("^") == "    " and len(marks) == columns(line.removesuffix(" ..."))


def test_of_a_place_in_many_lines_only_the_first_is_shown() -> None:
    source = "f(a,\n" + "  b,\n" * 100_000 + ")"
    assert carets(source, source) == ("f(a,", "^^^^")


@pytest.mark.parametrize("code", [info.code for info in CODES.values() if not info.failing.startswith("$")])
def test_no_diagnostic_grows_with_its_line(code: str) -> None:
    source = "\n".join(f"{line}{' ' * 400}# {'comment ' * 60}" for line in CODES[code].failing.split("\n"))
    for found in diagnose(source):
        shown = render([found], source, "a.opt", color=False).split("\n")
        assert max(map(len, shown[2:5])) <= EXCERPT + 16
        assert len(shown) <= 12 and max(map(len, shown)) <= 500
        marks = shown[4]
        under = shown[3][marks.index("^") :].replace("\ufffd", "\x07")
        assert under.startswith(source[found.span.start : found.span.start + 1].strip())


def columns(text: str) -> int:
    """How many columns a terminal gives these characters."""
    zero = {"Mn", "Me"}
    return sum(0 if category(ch) in zero else 1 + (east_asian_width(ch) in "WF") for ch in text)


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
