"""Names of packages and modules: what Python could not import, and what would hide a library, is refused."""

from __future__ import annotations

import json
import keyword
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import GOOD, Result

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., Result]


def in_folder(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command with `tmp_path` as the current folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "forge_dsl", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch", "hide the library `torch`"),
        ("triton", "hide the library `triton`"),
        ("forge_dsl", "hide the library `forge_dsl`"),
        ("random", "Python's own module `random`"),
        ("test", "Python's own module `test`"),
        ("__init__", "the file that makes a folder a package"),
        ("typing", "Python's own module `typing`"),
        ("pydantic", "the installed package `pydantic`"),
        ("pytest", "the installed package `pytest`"),
        ("class", "a keyword of Python"),
        ("None", "a keyword of Python"),
        ("my-rules", "no name in Python"),
        ("1st", "no name in Python"),
        ("gen.v2", "no name in Python"),
        ("with blank", "no name in Python"),
        ("\ufb01rst", "no name in Python"),
        ("-o", "no name in Python"),
    ],
)
@pytest.mark.parametrize("above", ["", "build", "build/deep"])
def test_a_package_that_cannot_be_imported_or_hides_a_library_is_refused(
    forge_gen: Call, specs: Path, tmp_path: Path, name: str, reason: str, above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path(above, name), tmp_path / above / name, f"./{above}/{name}/"):
        for more in ((), ("--check",)):
            result = forge_gen(specs, f"--out={out}", *more)
            assert result.status == 1 and "error[E0904]" in result.err and reason in result.err
            help_ = re.search(r"= help: give it another name: -o (.*)", result.err)
            assert help_ is not None
    assert not (tmp_path / above / name).exists()
    # The advice helps.
    advised = Path(help_[1])
    assert forge_gen(specs, f"--out={advised}").status == 0
    assert advised.name.isidentifier() and not keyword.iskeyword(advised.name)


def test_the_root_of_the_file_system_is_no_package(forge_gen: Call, specs: Path) -> None:
    for more in ((), ("--check",)):
        result = forge_gen(specs, f"--out={Path(Path.cwd().anchor)}", *more)
        assert result.status == 1 and "error[E0904]" in result.err and "-o generated" in result.err


@pytest.mark.parametrize(
    "out", ["generated", "my-project/generated", "torch/rules", "class/_x1", "a b/Out", "regeln_\u00e4"]
)
def test_only_the_last_part_of_the_path_names_the_package(
    forge_gen: Call, specs: Path, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert forge_gen(specs, "-o", out).status == 0
    assert forge_gen(specs, "-o", tmp_path / out, "--check").status == 0
    assert forge_gen(specs, "-o", f"{out}/.", "--check").status == 0


@pytest.mark.parametrize("name", ["torch", "random", "pydantic"])
def test_inside_another_package_nothing_is_hidden(forge_gen: Call, specs: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").touch()
    assert forge_gen(specs, "-o", tmp_path / "project" / name).status == 0
    assert forge_gen(specs, "-o", tmp_path / "project" / "my-rules").status == 1


def test_where_one_stands_any_folder_will_do(specs: Path, tmp_path: Path) -> None:
    here = tmp_path / "my-rules"
    here.mkdir()
    assert in_folder(here, str(specs), "-o", ".").returncode == 0
    assert in_folder(here, str(specs), "-o", ".", "--check").returncode == 0


def test_a_package_in_the_current_folder_is_not_an_installed_one(specs: Path, tmp_path: Path) -> None:
    for out in ("rules", "rules", "elsewhere/rules"):
        done = in_folder(tmp_path, str(specs), "-o", out)
        assert done.returncode == 0, done.stderr


def test_the_name_of_the_package_is_reported_as_json(forge_gen: Call, specs: Path, tmp_path: Path) -> None:
    result = forge_gen(specs, "-o", tmp_path / "torch", "--format", "json")
    document = json.loads(result.out)
    assert result.status == 1 and not document["written"]
    assert [(d["code"], d["name"], d["file"]) for d in document["diagnostics"]] == [
        ("E0904", "package-name", str(tmp_path / "torch"))
    ]


@pytest.mark.parametrize("stem", ["torch", "triton", "numpy", "forge_dsl", "typing"])
def test_a_module_that_hides_a_library_is_refused(forge_gen: Call, tmp_path: Path, stem: str) -> None:
    (tmp_path / f"{stem}.opt").write_text(GOOD.format(name="Plain"))
    result = forge_gen(tmp_path / f"{stem}.opt", "-o", tmp_path / "out")
    assert result.status == 1 and "error[E0903]" in result.err and "hide a library" in result.err
