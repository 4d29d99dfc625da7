"""Reading the specs of this folder. `E0201.bad.opt` gets E0201 and nothing else, `E0201.good.opt` gets nothing."""

from __future__ import annotations

from pathlib import Path

from forge_dsl.analysis.check import check
from forge_dsl.analysis.checked import Checked
from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.language.parser import parse
from forge_dsl.language.source import read_spec

HERE = Path(__file__).parent


def diagnose(text: str, filename: str = "rule.opt") -> tuple[Diagnostic, ...]:
    """Everything the front end says about a text."""
    try:
        return check(parse(text, filename), text, filename)[1]
    except DiagnosticError as error:
        return error.diagnostics


def diagnose_file(path: Path) -> tuple[str, tuple[Diagnostic, ...]]:
    """The text of a file, as far as it can be read, and everything the front end says about it."""
    try:
        text = read_spec(path)
    except DiagnosticError as error:
        return error.source, error.diagnostics
    return text, diagnose(text, path.name)


def codes(text: str) -> list[str]:
    """The codes that a text gets, in order."""
    return [diagnostic.code for diagnostic in diagnose(text)]


def checked(text: str) -> Checked:
    """A text that must be a good spec, checked."""
    return check(parse(text), text, "rule.opt")[0]


def rule(*update: str, declare: str = "") -> str:
    """A spec around statements: `lr` is declared, and so is what `declare` says."""
    body = "\n".join(f"  {line}" for line in update or ("weight = weight - lr * grad",))
    return f"optimizer Example\nhyper lr = 1e-3 in [0, inf)\n{declare}\nupdate:\n{body}\n"
