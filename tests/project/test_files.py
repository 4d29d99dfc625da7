"""The project's own files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_continuous_integration_runs_what_the_readme_names() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make \w+$", script.read_text(), re.MULTILINE) == ["make lint", "make test"]


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    assert set(re.findall(r"make ([\w-]+)", shown)) == targets


def test_every_optimizer_has_its_page_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for spec in (ROOT / "optimizers").glob("*.opt"):
        assert f"optimizers/{spec.stem}.md" in navigation
