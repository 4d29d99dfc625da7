"""Reading a spec from disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.language.source import MAX_BYTES, SourceText, read_spec
from tests.specs import codes, rule


def refusal(path: Path | str) -> tuple[str, str]:
    with pytest.raises(DiagnosticError) as caught:
        read_spec(path)
    (found,) = caught.value.diagnostics
    assert caught.value.filename == str(path)
    assert str(caught.value)
    return found.code, found.message


def test_text_is_normalised(tmp_path: Path) -> None:
    path = tmp_path / "a.opt"
    path.write_bytes(b"\xef\xbb\xbfoptimizer X\r\n# caf\xc3\xa9\rend\n")
    assert read_spec(path) == "optimizer X\n# caf\u00e9\nend\n"


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.opt")[0] == "E0001"


def test_a_folder(tmp_path: Path) -> None:
    code, message = refusal(tmp_path)
    assert code == "E0001" and "directory" in message


def test_a_name_that_no_file_can_have() -> None:
    assert refusal("a\0b.opt")[0] == "E0001"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.opt"
    os.mkfifo(path)
    code, message = refusal(path)
    assert code == "E0001" and "not a regular file" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_forbidden_file(tmp_path: Path) -> None:
    path = tmp_path / "a.opt"
    path.write_text("")
    path.chmod(0)
    assert refusal(path)[0] == "E0001"


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge.opt"
    with path.open("wb") as file:
        file.truncate(10**10)
    code, message = refusal(path)
    assert code == "E0003" and "10,000,000,000" in message and f"{MAX_BYTES:,}" in message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.opt"
    path.write_bytes(b"optimizer X\n\xff")
    code, message = refusal(path)
    assert code == "E0002" and "0xff" in message and "line 2" in message


@pytest.mark.parametrize("ch", ["\0", "\x07", "\x1b", "\x7f", "\x85", "\x0c", "\u2028", "\u202e", "\u2066", "\ud800"])
@pytest.mark.parametrize("where", ["comment", "message", "code"])
def test_characters_that_a_reader_cannot_see_are_refused(ch: str, where: str) -> None:
    texts = {
        "comment": rule() + f"# a{ch}b",
        "message": rule(declare=f'require lr >= 0, "a{ch}b"'),
        "code": rule(f"weight = weight - lr{ch}* grad"),
    }
    assert codes(texts[where]) == ["E0002"]


def test_letters_of_all_scripts_may_stand_in_comments_and_messages() -> None:
    assert codes(rule(declare='require lr >= 0, "na\u00efve \u6f22\u5b57 \U0001f600"') + "# \u03b2 \u2264 1\n") == []


def test_spans_know_their_lines() -> None:
    source = SourceText("ab\n\ncd", "x")
    assert [(source.span(i, i).line, source.span(i, i).column) for i in range(7)] == [
        *((1, 1), (1, 2), (1, 3)),
        *((2, 1), (3, 1), (3, 2), (3, 3)),
    ]
    span = source.span(1, 5)
    assert (span.line, span.column, span.end_line, span.end_column) == (1, 2, 3, 2)
