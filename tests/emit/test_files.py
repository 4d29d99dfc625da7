"""The generated files as a whole: what they say, that they are formatted, and that they are the same every time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_dsl import testing
from forge_dsl.compile import Compiled, compile_source
from forge_dsl.emit.folder import render, render_page
from forge_dsl.loading import module_of
from tests.golden import Golden

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SPECS = sorted([*(ROOT / "optimizers").glob("*.opt"), *(ROOT / "examples" / "specs").glob("*.opt")])


def compiled(path: Path) -> Compiled:
    return compile_source(path.read_text(encoding="utf-8"), path.name)


EVERYTHING = compiled(GOLDEN / "everything.opt")


@pytest.mark.parametrize("name", ["everything.py", "tests/test_everything.py", "everything.md"])
def test_every_construct_is_written_as_before(name: str, golden: Golden) -> None:
    files = render([EVERYTHING]) | {"everything.md": render_page(EVERYTHING)}
    # The fingerprint changes with every template.
    text = re.sub(r"\b[0-9a-f]{16}\b", "0" * 16, files[name])
    golden(text, GOLDEN / f"{Path(name).name}.txt")


RULE = module_of(EVERYTHING).RULE
CASES = testing.cases(RULE)


def test_the_spec_of_the_golden_files_has_every_combination() -> None:
    assert len(CASES) == 8


@pytest.mark.skipif(not testing.can_launch(RULE), reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("how", ["elementwise", "fused", "many"])
def test_what_the_golden_files_say_is_what_the_reference_does(case: testing.Case, how: str) -> None:
    testing.assert_bitwise(RULE, case, how, (3, 4, 5))


def ruff(*arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "120", "-"]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_generated_python_is_formatted_and_free_of_lint(path: Path) -> None:
    pytest.importorskip("ruff")
    for name, content in render([compiled(path)]).items():
        formatted = ruff("format", "--stdin-filename", name, stdin=content)
        assert formatted.stdout == content, f"{name}: {formatted.stderr}"
        # F401, unused imports; F821, undefined names; F841, unused variables; F811, redefinitions; I, order of imports.
        checked = ruff("check", "--select", "F,I,E9,B,UP", "--target-version", "py311", stdin=content)
        found = [line for line in checked.stdout.splitlines() if re.match(r"[A-Z]\d+ ", line)]
        assert not found, f"{name}: {found}"


_SCRIPT = """
import hashlib, pathlib, sys
from forge_dsl.compile import compile_source
from forge_dsl.emit.folder import render, render_page
specs = [pathlib.Path(name) for name in sys.argv[1:]]
compiled = [compile_source(path.read_text(encoding="utf-8"), path.name) for path in specs]
files = render(compiled) | {f"{one.stem}.md": render_page(one) for one in compiled}
print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())
"""


@pytest.mark.parametrize("seed", ["0", "1", "31"])
def test_files_are_the_same_in_every_process(seed: str) -> None:
    specs = [*SPECS, GOLDEN / "everything.opt"]
    every = [compiled(path) for path in specs]
    files = render(every) | {f"{one.stem}.md": render_page(one) for one in every}
    here = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _SCRIPT, *map(str, specs)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == here


def test_the_order_of_specs_changes_no_module() -> None:
    every = [compiled(path) for path in SPECS]
    assert render(every) == render(every[::-1])


def test_the_header_names_the_spec_and_a_fingerprint_of_all_that_went_in() -> None:
    text = (ROOT / "optimizers" / "sgd.opt").read_text(encoding="utf-8")
    one, other = compile_source(text, "sgd.opt"), compile_source(text + "# more\n", "sgd.opt")
    assert one.digest != other.digest
    for name, content in render([one]).items():
        if "sgd" in name:
            assert f"from sgd.opt, sha256 {one.digest}" in content.splitlines()[0]
