"""A launch by addresses passes what Triton passes, under every release that is known; else Triton launches."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_dsl.runtime import direct_launch

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# Beside the environment's own packages; `tests/project/test_side_environments.py` installs some.
BESIDE = sorted(Path(sys.prefix).glob("triton-*"))
CALLS = {
    "hopper, torch.bfloat16",
    "hopper, torch.bfloat16, other operands",
    "hopper, torch.float16",
    "hopper, torch.float16, other operands",
    "portable, 64 tokens",
    "portable, 1 tokens",
    "scalars",
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", [None, *BESIDE], ids=lambda folder: folder.name if folder else "installed")
def test_triton_passes_the_same_arguments(folder: Path | None) -> None:
    if not direct_launch.is_known(triton.__version__ if folder is None else folder.name.removeprefix("triton-")):
        pytest.skip("Triton launches by itself under this release")
    path = [*([] if folder is None else [str(folder)]), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.runtime.launched_twice"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    release, *lines = found.stdout.splitlines()
    assert folder is None or folder.name == f"triton-{release}"
    assert set(lines) == {f"same: {name}" for name in CALLS}


class CudaLauncher:
    """As Triton's looks for a kernel that takes pointers."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations = kernel_signature = ()

    def __init__(self, **changes: Any) -> None:
        self.calls: list[Any] = []
        self.launch = lambda *arguments: self.calls.append(arguments)
        for name, value in changes.items():
            setattr(self, name, value)


class Compiled:
    """A kernel as Triton has compiled and loaded it."""

    function, packed_metadata = 1, (8, 1, 0)

    def __init__(self, run: Any) -> None:
        self.run = run


def of(run: Any, operand: Any = None) -> direct_launch.Direct | None:
    return direct_launch.of(Compiled(run), 0, (1, 1, 1), (operand, None))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A release that is known, and a current device 0."""
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 23, raising=False)
    return monkeypatch


@pytest.mark.parametrize("release", ["3.5.1", "3.10.0", "4.0.0", "3.60.0"])
def test_other_releases_launch_by_themselves(release: str, known: pytest.MonkeyPatch) -> None:
    assert of(CudaLauncher()) is not None
    known.setattr(triton, "__version__", release)
    assert of(CudaLauncher()) is None


class OtherLauncher(CudaLauncher):
    """One of another backend."""


@pytest.mark.parametrize(
    "run",
    [
        CudaLauncher(global_scratch_size=128),
        CudaLauncher(profile_scratch_size=128),
        CudaLauncher(gsan_enabled=True),
        OtherLauncher(),
        SimpleNamespace(),
    ],
    ids=["scratch memory", "a profile", "a sanitiser", "another backend", "something else"],
)
def test_what_needs_more_than_addresses_is_left_to_triton(run: Any, known: pytest.MonkeyPatch) -> None:
    assert of(run) is None


def test_a_loaded_operand_without_descriptors_is_left_to_triton(known: pytest.MonkeyPatch) -> None:
    operand = SimpleNamespace(shape=(4, 4), strides=(4, 1))
    assert of(CudaLauncher(), operand) is None  # no function around the launcher

    def around(launcher: Any, tensordesc_meta: Any, make_tensordesc_arg: Any = None) -> Any:
        return lambda *arguments: (launcher, tensordesc_meta, make_tensordesc_arg)

    for layouts in (None, [], [None], [{}, {}]):
        assert of(CudaLauncher(launch=around(print, layouts, print)), operand) is None
    assert of(CudaLauncher(launch=around(print, [{}], print)), operand) is not None


def test_descriptors_are_kept_by_address_and_not_without_end(known: pytest.MonkeyPatch) -> None:
    known.setattr(direct_launch, "_DESCRIPTORS", 4)
    made: list[int] = []
    operand = SimpleNamespace(shape=(4, 4), strides=(4, 1))
    kept = direct_launch._Arguments(operand, {}, lambda at, _: made.append(at.base.data_ptr()) or [made[-1], 4])
    assert [kept[address] for address in (16, 32, 16, 32)] == [[16, 4], [32, 4], [16, 4], [32, 4]]
    assert made == [16, 32]
    for address in range(0, 1600, 16):
        assert kept[address] == [address, 4] and len(kept) <= 4


def test_another_current_device_or_a_profiler_is_left_to_triton(known: pytest.MonkeyPatch) -> None:
    run, devices = CudaLauncher(), [0]
    known.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1])
    direct = of(run)
    assert direct is not None
    again = direct.bind((3, (4, 5)))
    assert again(16, 32)
    *_, arguments = run.calls[-1]
    assert arguments == (16, 32, 3, (4, 5))
    devices.append(1)
    assert not again(16, 32)
    devices.pop()
    runtime = triton.knobs.runtime
    for hook in (SimpleNamespace(calls=[print]), print, None):
        with known.context() as patch:
            patch.setattr(runtime, "launch_exit_hook", hook)
            assert not again(16, 32)
    assert again(16, 32) and len(run.calls) == 2


def test_the_kernel_stays_on_the_device_as_long_as_it_can_be_launched(known: pytest.MonkeyPatch) -> None:
    """Triton's own caches may let go of it, and then it would be unloaded under the address of its function."""
    compiled = Compiled(CudaLauncher())
    alive = weakref.ref(compiled)
    direct = direct_launch.of(compiled, 0, (1, 1, 1), (None, None))
    assert direct is not None
    again = direct.bind(())
    del compiled, direct
    gc.collect()
    assert alive() is not None and again(16, 32)
    del again
    gc.collect()
    assert alive() is None
