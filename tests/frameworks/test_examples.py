"""The examples run, learn, and what they save is what they load."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "train_with_trainer": (["--steps", "20"], ("transformers", "accelerate")),
    "train_with_accelerate": (["--steps", "20"], ("transformers", "accelerate")),
    "train_with_lightning": (["--epochs", "2"], ("lightning",)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_and_resumes(name: str) -> None:
    options, needed = EXAMPLES[name]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    command = [sys.executable, str(ROOT / "examples" / "frameworks" / f"{name}.py"), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(float, re.findall(r"^loss (\S+) -> (\S+)$", done.stdout, re.MULTILINE)[0])
    assert last < first - 0.5
    assert done.stdout.rstrip().endswith("has the same bits: True")
