"""Kernels compile, without a GPU and without a spilled register, under other releases of Triton than the installed one.

A release is installed beside the environment's own packages, without its dependencies, where `make check-kernels` looks
for it too; skipped where it cannot be had (offline, or no build for this Python). All optimizers, kernels and flags:
`make check-kernels`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ["3.6.0", "3.8.0"]


def side_environment(release: str) -> Path:
    """The folder of a release of Triton, installed if need be; skips the test where it cannot be."""
    folder = Path(sys.prefix) / f"triton-{release}"
    if (folder / "triton").is_dir():
        return folder
    if not os.access(folder.parent, os.W_OK):
        pytest.skip(f"{folder.parent} is not to be written to")
    # In a folder of its own first, so that a download that breaks off leaves nothing that looks complete.
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(partial),
        f"triton=={release}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"triton {release} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            assert (folder / "triton").is_dir()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def compile_under(release: str, cache: Path, script: str, *arguments: str) -> str:
    """What a script of benchmarks/ prints under a release, with nothing compiled before."""
    path = os.pathsep.join([str(side_environment(release)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"triton {release}"), done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no builds for this system")
@pytest.mark.parametrize("release", RELEASES)
def test_portable_kernels_compile_for_three_gpus_without_a_spilled_register(release: str, tmp_path: Path) -> None:
    few = ("--only", "adamw", "lion", "sgd", "--tokens", "2048")
    found = compile_under(release, tmp_path, "portable_registers.py", *few)
    # For each GPU and optimizer: the linear kernel with bf16 and fp32 states, four times with operands in 8 bits, two
    # element-wise kernels and two of many.
    assert [found.count(f"ok  sm_{capability} ") for capability in (80, 90, 100)] == [30, 30, 30]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no builds for this system")
@pytest.mark.parametrize("release", RELEASES)
def test_the_kernel_for_hopper_compiles_without_a_spilled_register(release: str, tmp_path: Path) -> None:
    found = compile_under(release, tmp_path, "hopper_registers.py", "--only", "sgd")
    # Shapes and types in plain storage, and each way of rounding and keeping.
    assert found.count("\nok ") == 24
