"""The documentation is true: its commands run, its snippets run, its specs compile, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from forge_dsl.analysis.builtins import RESERVED, RESERVED_CLASSES, STATE_ENTRIES
from forge_dsl.ir import words
from tests.golden import Golden

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SPEC = re.compile(r"^```opt[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FRAMEWORKS = ("transformers", "accelerate", "lightning", "peft")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return page.name


def environment(folder: Path) -> dict[str, str]:
    """An environment in which `forge-gen` is this source tree's, installed or not, and `python` this Python."""
    commands = folder / "bin"
    commands.mkdir()
    for name, arguments in (("python", ""), ("forge-gen", "-m forge_dsl ")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if re.search(r"^```(python|console)", p.read_text(), re.M)], ids=name
)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    if page.name == "frameworks.md":
        for module in FRAMEWORKS:
            pytest.importorskip(module, reason="needs forge-dsl[frameworks]")
    shutil.copytree(ROOT / "optimizers", tmp_path / "optimizers")
    runner = [sys.executable, str(Path(__file__).with_name("run_page.py")), str(page)]
    done = subprocess.run(runner, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if SPEC.search(p.read_text())], ids=name)
def test_every_spec_on_a_page_compiles_without_a_warning(page: Path) -> None:
    from forge_dsl.compile import compile_source

    for text in SPEC.findall(page.read_text()):
        assert compile_source(text, "page.opt").warnings == ()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_local_link_leads_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if not target.startswith("mailto")]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_commands_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text())}
    assert named - targets == set()


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "language" / "index.html").exists()


def reserved_names() -> str:
    """The Markdown list of every name that is reserved, by the reason that its refusal gives."""
    reasons: dict[str, list[str]] = {}
    for word, reason in RESERVED.items():
        reasons.setdefault(reason, []).append(word)
    reasons["of a state or scalar: an entry that checkpoints hold beside the states"] = [*STATE_ENTRIES]
    classes = {*RESERVED_CLASSES, *words.MODULE} - set(RESERVED)
    reasons["of an optimizer: a name that the generated module uses itself"] = [*classes]
    lines = (f"- {reason}: {', '.join(f'`{word}`' for word in sorted(names))}" for reason, names in reasons.items())
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def test_the_list_of_reserved_names_is_current(golden: Golden) -> None:
    page = ROOT / "docs" / "language.md"
    begin, end = "<!-- reserved names -->\n", "\n<!-- end of reserved names -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end.lstrip())
    assert before and after
    golden(f"{before}{begin}\n{reserved_names()}\n{end}{after}", page)
