"""Separability: the refusal of everything that is not element-wise."""

from __future__ import annotations

from forge_dsl.analysis.names import Names
from forge_dsl.analysis.report import Report
from forge_dsl.language import syntax


def check(tree: syntax.Spec, names: Names, report: Report) -> None:
    """Reports every expression and statement that couples coordinates."""
