"""Hazard: reading torch's older switch of TF32 raises for users of the newer one, in the middle of backward."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch
from forge_dsl.runtime.devices import allows_tf32
{setting}
print(allows_tf32())
"""
OLDER = ["torch.backends.cuda.matmul.allow_tf32 = {}", "torch.set_float32_matmul_precision({})"]
NEWER = ["torch.backends.cuda.matmul.fp32_precision = {}", "torch.backends.fp32_precision = {}"]
VALUES = [("True", "False"), ("'high'", "'highest'"), ("'tf32'", "'ieee'"), ("'tf32'", "'ieee'")]


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(("way", "values"), list(zip([*OLDER, *NEWER], VALUES, strict=True)))
def test_either_switch_is_understood(way: str, values: tuple[str, str], allowed: bool) -> None:
    if way in NEWER and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has one switch")
    script = SCRIPT.format(setting=way.format(values[not allowed]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (str(allowed), 0), done.stderr
