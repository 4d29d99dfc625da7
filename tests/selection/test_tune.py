"""`forge-gen tune`: what it measures, prints, writes and refuses, with kernels in the interpreter and made-up times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_dsl import cli, testing
from forge_dsl.runtime import hopper, launch
from forge_dsl.selection import choose, command, table, tune
from forge_dsl.selection.table import Device, Table

ROOT = Path(__file__).parents[2]
DEVICE = Device(name="Made-up GPU", capability=(8, 6), versions={"torch": "2.11.0", "triton": "3.6.0"})
WISH = command.Wish(
    shapes=((24, 40),),
    tokens=(8, 16),
    optimizers=("adamw",),
    operand="bf16",
    state="bf16",
    device=0,
    dry_run=False,
    as_json=False,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "forge-dsl" / "schedules"
    choose.forget()


def times(**milliseconds: float) -> Any:
    """A clock that runs each schedule once and reports these times."""

    def time(runs: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        for run in runs.values():
            run()
        return {name: milliseconds[name] for name in runs}

    return time


def wish(**changes: Any) -> command.Wish:
    return command.Wish(**{**vars(WISH), **changes})


def test_what_was_measured_is_written_and_then_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.tune(WISH, times(portable=2.0, banded=1.0), DEVICE) == 0
    out = capsys.readouterr().out
    assert "24 x 40" in out and "banded" in out and str(table.cache_file(DEVICE)) in out.replace("\n", "")
    kept = table.read(DEVICE)
    assert kept is not None and [(m.rows, m.columns, m.tokens, m.stored) for m in kept.measured] == [
        (24, 40, 8, 6),
        (24, 40, 16, 6),
    ]
    monkeypatch.setattr(table, "this_device", lambda index: DEVICE)
    choose.forget()
    assert choose.measured_order(0, "bfloat16", 6, False, *map(table.bucket, (24, 40, 8))) == ("banded", "portable")


def without_path(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, but for where it was stored: such a path may hold any number."""
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if ".json" not in line)


def test_bits_of_the_gradient_are_a_class_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    command.tune(wish(tokens=(8,)), times(portable=2.0, banded=1.0), DEVICE)
    assert "32" not in without_path(capsys)
    command.tune(wish(tokens=(8,), gradient_bits=32), times(portable=1.0, banded=2.0), DEVICE)
    assert "32" in without_path(capsys)
    kept = table.read(DEVICE)
    assert kept is not None
    assert [(m.gradient_bits, m.order[0]) for m in kept.measured] == [(24, "banded"), (32, "portable")]


def test_the_clone_is_updated_with_the_bits_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for Hopper replaced by one that says with what it was called."""
    asked: list[Any] = []
    monkeypatch.setattr(hopper, "find", lambda *_, gradient_bits: asked.append(gradient_bits) or object())
    monkeypatch.setattr(hopper, "linear_step_hopper", lambda *arguments: asked.append(arguments[-1]))
    one = tune.Class(command._rule("adamw"), torch.bfloat16, torch.bfloat16, 24, 40, 8, 32)
    tune.Clone(one, testing.device()).runs()["hopper"]()
    assert asked == [32, 32]


def test_a_second_run_adds_to_the_first() -> None:
    command.tune(wish(tokens=(8,)), times(portable=2.0, banded=1.0), DEVICE)
    command.tune(wish(tokens=(16,)), times(portable=1.0, banded=2.0), DEVICE)
    kept = table.read(DEVICE)
    assert kept is not None and [one.order[0] for one in kept.measured] == ["banded", "portable"]


def test_a_dry_run_measures_and_writes_nothing(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert command.tune(wish(dry_run=True), times(portable=2.0, banded=1.0), DEVICE) == 0
    assert "1.0000" in capsys.readouterr().out and not cache.exists()


@pytest.mark.parametrize("stem", ["sgd", "sgd_momentum", "lion"])
@pytest.mark.parametrize("state", ["bf16", "fp32"])
def test_other_optimizers_are_classes_of_their_own(stem: str, state: str) -> None:
    assert (
        command.tune(wish(optimizers=(stem,), state=state, tokens=(8,)), times(portable=2.0, banded=1.0), DEVICE) == 0
    )
    kept = table.read(DEVICE)
    assert kept is not None
    states = {"sgd": 0, "sgd_momentum": 1, "lion": 1}[stem]
    assert kept.measured[0].stored == 2 + states * (2 if state == "bf16" else 4)
    assert kept.measured[0].wide == (state == "fp32" and states > 0)


def test_schedules_that_disagree_are_an_error_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    right = launch.linear_step_portable

    def wrong(rule: Any, x: Any, dy: Any, weight: Any, *rest: Any) -> None:
        right(rule, x, dy, weight, *rest)
        weight[:, -1] += 0.01

    monkeypatch.setattr(launch, "linear_step_portable", wrong)
    assert command.tune(WISH, times(portable=1.0, banded=2.0), DEVICE) == 1
    shown = capsys.readouterr()
    assert "2.50% of `weight` differ between the schedules portable and banded" in shown.err
    assert "nothing was written" in shown.out and not cache.exists()


def test_a_class_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = tune.measure

    def small_device(one: tune.Class, *rest: Any) -> Any:
        if one.tokens == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(one, *rest)

    monkeypatch.setattr(tune, "measure", small_device)
    assert command.tune(WISH, times(portable=1.0, banded=2.0), DEVICE) == 0
    assert "left out: AdamW 24 x 40, 16 tokens" in capsys.readouterr().err
    kept = table.read(DEVICE)
    assert kept is not None and [one.tokens for one in kept.measured] == [8]
    assert command.tune(wish(tokens=(16,)), times(portable=1.0, banded=2.0), DEVICE) == 1


def test_the_clone_is_as_before_after_the_check_and_every_schedule_was_run() -> None:
    one = tune.Class(command._rule("adamw"), torch.bfloat16, torch.bfloat16, 24, 40, 8)
    clone = tune.Clone(one, testing.device())
    before = [tensor.clone() for _, tensor in clone.tensors]
    ran = []
    runs = clone.runs()
    tune.check(clone, {name: lambda name=name, run=run: (ran.append(name), run()) for name, run in runs.items()})
    assert sorted(ran) == ["banded", "portable"]
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, clone.tensors, strict=True))


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *arguments])
    shown = capsys.readouterr()
    status = ended.value.code
    return int(status or 0), shown.out, shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_with_status_2(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    status, out, err = run_command(capsys, "--shape", "4096x4096", "--tokens", "512", "2048")
    assert (status, out) == (2, "") and "needs an NVIDIA GPU" in err and not cache.exists()


def test_several_values_follow_one_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[command.Wish] = []
    monkeypatch.setattr(command, "tune", lambda wish: asked.append(wish) or 0)
    line = "--shape 4096x4096 128x64 --tokens 512 2048 --optimizer lion sgd --dry-run --states fp32 --tokens 8 "
    line += "--gradient-bits 32"
    assert run_command(capsys, *line.split())[0] == 0
    found = asked[0]
    assert found.shapes == ((4096, 4096), (128, 64)) and found.tokens == (512, 2048, 8)
    assert found.optimizers == ("lion", "sgd") and (found.operand, found.state) == ("bf16", "fp32") and found.dry_run
    assert found.gradient_bits == 32


@pytest.mark.parametrize(
    "line",
    [
        "--shape 4096",
        "--shape 0x4",
        "--shape 4x4x4",
        "--tokens 0",
        "--tokens many",
        "--optimizer nope",
        "--optimizer missing.opt",
        "--dtype fp64",
        "--gradient-bits 16",
        "--show --clear",
        "stray",
    ],
)
def test_wrong_usage_has_status_2(capsys: pytest.CaptureFixture[str], line: str) -> None:
    status, _, err = run_command(capsys, *line.split())
    assert status == 2 and "Error" in err


def test_show_and_clear_need_no_gpu(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    path = table.write(Table(device=DEVICE, measured=()))
    status, out, _ = run_command(capsys, "--show")
    assert status == 0 and "in the package" in out and "NVIDIA H200" in out and "Made-up GPU" in out
    status, out, _ = run_command(capsys, "--show", "--format", "json")
    assert status == 0 and [one["device"]["name"] for one in json.loads(out)] == ["NVIDIA H200", "Made-up GPU"]
    (cache / "broken.json").write_text("{")
    status, _, err = run_command(capsys, "--show")
    assert status == 1 and "broken.json cannot be read" in err
    status, out, _ = run_command(capsys, "--clear")
    assert status == 0 and str(path) in out and list(cache.iterdir()) == []
    assert "there is nothing in" in run_command(capsys, "--clear")[1]
    path = table.write(Table(device=DEVICE, measured=()))
    for removed in ([str(path)], []):
        status, out, _ = run_command(capsys, "--clear", "--format", "json")
        assert status == 0 and json.loads(out) == {"removed": removed}


def test_results_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.tune(wish(as_json=True), times(portable=2.0, banded=1.0), DEVICE) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"]["name"] == "Made-up GPU" and facts["written"] == str(table.cache_file(DEVICE))
    assert facts["measured"][0]["milliseconds"] == {"portable": 2.0, "banded": 1.0}


def test_show_imports_no_torch_and_the_module_is_the_command() -> None:
    script = (
        "import sys; from forge_dsl.cli import main\n"
        "try: main(['tune', '--show', '--format', 'json'])\n"
        "finally: print([m for m in ('torch', 'triton') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    module = [sys.executable, "-m", "forge_dsl.tune", "--show", "--format", "json"]
    same = subprocess.run(module, capture_output=True, text=True, cwd=ROOT)
    assert (same.returncode, same.stdout) == (0, done.stdout)


def test_the_kernel_for_hopper_is_measured_and_checked_where_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*arguments: Any) -> None:
        assert arguments[-2:] == (False, 24)
        launch.linear_step_portable(*arguments[:-1])

    monkeypatch.setattr(hopper, "find", lambda *_, gradient_bits: object())
    monkeypatch.setattr(hopper, "linear_step_hopper", stand_in)
    assert command.tune(wish(tokens=(8,)), times(hopper=1.0, portable=2.0, banded=3.0), DEVICE) == 0
    kept = table.read(DEVICE)
    assert kept is not None and kept.measured[0].order == ("hopper", "portable", "banded")
    monkeypatch.setattr(hopper, "linear_step_hopper", lambda *_: None)
    assert command.tune(wish(tokens=(8,)), times(hopper=1.0, portable=2.0, banded=3.0), DEVICE) == 1
