"""The text of a spec: reading it from disk, the bounds it must respect, and the map from offsets to lines and
columns.
"""

from __future__ import annotations

import stat
import unicodedata
from bisect import bisect_right
from pathlib import Path

from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.language.syntax import NOWHERE, Span

# Bounds. A published rule takes less than a tenth of each; they keep every later stage's time and stack bounded.
MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_STATEMENTS = 400
MAX_NODES = 8000
MAX_TOKENS = 20_000
MAX_SWITCHES = 8
MAX_NAME = 64
MAX_LITERAL = 40
MAX_MESSAGE = 500
MAX_ERRORS = 100

# Separators that Python's tokenizer or `str.splitlines` may take for a line's end, and marks that reorder the text
# shown.
_FORBIDDEN = frozenset("\x85\u2028\u2029\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class SourceText:
    """The normalised text of a spec, with its lines' offsets."""

    def __init__(self, text: str, filename: str) -> None:
        self.text = text
        self.filename = filename
        self._starts = [0]
        position = text.find("\n")
        while position >= 0:
            self._starts.append(position + 1)
            position = text.find("\n", position + 1)

    def span(self, start: int, end: int) -> Span:
        """The span of the characters from `start` up to, not including, `end`."""
        starts = self._starts
        line = bisect_right(starts, start)
        end_line = line if line == len(starts) or end < starts[line] else bisect_right(starts, end)
        return Span(start, end, line, start - starts[line - 1] + 1, end_line, end - starts[end_line - 1] + 1)


def normalise(text: str) -> str:
    """`text` without a byte-order mark and with every line's end written as one newline."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def check_text(source: SourceText) -> None:
    """Raises DiagnosticError if the text is too large or holds characters that no spec needs."""
    size = len(source.text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"this spec has {size:,} bytes; at most {MAX_BYTES:,} are read"
        raise DiagnosticError([Diagnostic("E0003", "error", message, NOWHERE)], "", source.filename)
    found = []
    for offset, ch in enumerate(source.text):
        if ch >= " " and ch < "\x7f":
            continue
        if ch in _FORBIDDEN or (unicodedata.category(ch) in {"Cc", "Cs"} and ch not in "\n\t"):
            name = unicodedata.name(ch, "control character")
            message = f"the character U+{ord(ch):04X} ({name.lower()}) is not allowed in a spec, not even in a comment"
            span = source.span(offset, offset + 1)
            found.append(Diagnostic("E0002", "error", message, span, help="delete it, or type it again in ASCII"))
            if len(found) == MAX_ERRORS:
                break
    if found:
        raise DiagnosticError(found, source.text, source.filename)


def read_spec(path: str | Path) -> str:
    """The text of the spec at `path`, normalised. Raises DiagnosticError if it cannot be read or is not UTF-8 text."""
    filename = str(path)
    try:
        info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
            raise _unreadable("E0001", f"cannot read `{filename}`: it is {kind}", filename)
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unreadable("E0001", f"cannot read `{filename}`: {reason}", filename) from None
    if len(data) > MAX_BYTES:
        size = max(info.st_size, len(data))
        raise _unreadable("E0003", f"this spec has {size:,} bytes; at most {MAX_BYTES:,} are read", filename)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"this file is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}, line {line}"
        raise _unreadable("E0002", message, filename) from None
    return normalise(text)


def _unreadable(code: str, message: str, filename: str) -> DiagnosticError:
    return DiagnosticError([Diagnostic(code, "error", message, NOWHERE)], "", filename)
