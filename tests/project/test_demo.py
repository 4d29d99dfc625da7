"""The demo runs, its two runs agree, and its measure of memory is right."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "6", "--width", "512", "--depth", "1", "--batch", "1", "--context", "16", "--device", "cpu"]


def load(name: str) -> ModuleType:
    """A module of examples/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_both_runs_agree_and_the_fused_one_needs_less(optimizer: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train_bytes.py")
    command = [sys.executable, script, *SMALL, "--optimizer", optimizer, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"largest difference .*: (\S+)", done.stdout)[0]) < 1e-4
    fused, unfused = (float(size) for size in re.findall(r"([\d.]+) MiB │", done.stdout))
    assert fused < unfused
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / f"{optimizer}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "0"], "--context must be at least 1"),
        (["--depth", "-1"], "--depth must be at least 1"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--device", "cuda:77"], "--device cuda:77: "),
        (["--output", "{file}/here"], "--output "),
        (["--lr", "nan"], "--lr must be"),
    ],
)
def test_what_cannot_work_is_said_before_training(arguments: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, str(ROOT / "examples" / "train_bytes.py"), *(a.format(file=file) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train_bytes.py")
    command = [sys.executable, script, *SMALL, "--optimizer", "sgd", "--lr", "1e30", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "diverged: its loss is" in " ".join(done.stdout.split())


def test_live_bytes_count_a_storage_once_and_until_it_is_gone() -> None:
    memory = load("memory")
    present = torch.zeros(1000)

    def step() -> None:
        first = torch.ones(500)
        second = first.view(2, 250)
        del first
        third = second + 1
        del second
        torch.ones(100).add_(1)
        del third

    peak = memory.peak_bytes(step, [present, present.view(10, 100)], torch.device("cpu"))
    assert peak == 4 * (1000 + 500 + 500)


def test_every_spec_of_the_project_has_a_counterpart() -> None:
    counterparts = load("counterparts").COUNTERPARTS
    assert set(counterparts) == {path.stem for path in (ROOT / "optimizers").glob("*.opt")}
