"""Where checks put what they find."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_dsl.diagnostics import Diagnostic
from forge_dsl.language.syntax import Span


@dataclass(slots=True)
class Report:
    """Collects diagnostics, so that one run shows everything that is wrong."""

    found: list[Diagnostic] = field(default_factory=list)

    def error(self, code: str, message: str, span: Span, *notes: str, help: str | None = None) -> None:
        """Adds an error."""
        self.found.append(Diagnostic(code, "error", message, span, notes, help))

    def warning(self, code: str, message: str, span: Span, *notes: str, help: str | None = None) -> None:
        """Adds a warning."""
        self.found.append(Diagnostic(code, "warning", message, span, notes, help))

    @property
    def failed(self) -> bool:
        """Whether there is any error."""
        return any(d.severity == "error" for d in self.found)
