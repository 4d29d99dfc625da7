"""What is installed: the wheel works from an empty folder, and holds what it should and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "forge_dsl",
    "generated",
    "optimizers",
    "pyproject.toml",
    "setup.py",
    "templates",
)
STEP = """
import forge_dsl, torch
from generated import MyRule, my_rule_linear
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(5, 3))
optimizer = MyRule([weight], lr=0.1)
before = weight.detach().clone()
x = torch.randn(4, 3)
my_rule_linear(x, weight).square().sum().backward()
optimizer.step()
gradient = (2 * x @ before.T).T @ x
assert torch.equal(torch.sign(before - weight.detach()), torch.sign(gradient)), "a first step goes down the gradient"
print(forge_dsl.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree, built without the network from a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, source)
    pip(["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source)])
    (found,) = folder.glob("*.whl")
    return found


def pip(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_holds_the_package_with_specs_and_templates_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"forge_dsl", wheel.name.split("-py3")[0] + ".dist-info"}
    for spec in (ROOT / "optimizers").glob("*.opt"):
        assert f"forge_dsl/optimizers/{spec.name}" in names
    for template in (ROOT / "templates").glob("*"):
        assert f"forge_dsl/templates/{template.name}" in names
    for source in (ROOT / "forge_dsl").rglob("*"):
        if source.is_file() and source.suffix != ".pyc":
            assert str(source.relative_to(ROOT)) in names


def test_it_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    pip(["install", "--no-deps", "--no-index", "--target", str(site), str(wheel)])
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(str(site / "bin" / "forge-gen"), "new", "MyRule")
    run(str(site / "bin" / "forge-gen"), "my_rule.opt", "-o", "generated/", "--strict")
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{here}"
    assert run(sys.executable, "-c", STEP).strip().startswith(str(site))
    packaged = "from forge_dsl.optim import AdamW; import torch; AdamW([torch.nn.Parameter(torch.zeros(2, 2))])"
    run(sys.executable, "-c", packaged)
