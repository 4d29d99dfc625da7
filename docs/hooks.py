"""Formulas as MathML when the site is built, so that a page shows them without a script from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of a page: replace what arithmatex has marked."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    # The converter knows `split`, which means the same; GitHub, where the pages are read too, knows `aligned`.
    formula = html.unescape(match[3]).replace("{aligned}", "{split}")
    if match[2] == "(":
        return str(convert(formula))
    return f'<div class="formula">{convert(formula, display="block")}</div>'
