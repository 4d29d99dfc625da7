"""Domains: roots, logarithms and quotients that may leave the numbers."""

from __future__ import annotations

from collections.abc import Mapping

from forge_dsl.analysis.checked import Checked
from forge_dsl.analysis.report import Report
from forge_dsl.analysis.switches import Switches
from forge_dsl.spec import Range


def check(checked: Checked, scalar_domains: Mapping[str, Range], switches: Switches, report: Report) -> None:
    """Adds warnings."""
