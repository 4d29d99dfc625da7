"""Calling `forge-gen` in this process, and specs to call it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_dsl.cli import main

GOOD = """\
# {name}: plain descent, for tests.
optimizer {name}

hyper lr = 1e-2  in [0, inf)

update:
  weight = weight - lr * grad
"""
BAD = """\
optimizer Bad

hyper lr = 1e-2

update:
  weight = weight - lr * grad / norm(grad)
  weight = weight - lrr * grad
"""
WARNING = """\
optimizer Doubtful

hyper lr = 1e-2  in [0, inf)

state moment in [0, inf)

update:
  moment = moment - grad
  weight = weight - lr * sqrt(moment)
"""


@dataclass(frozen=True)
class Result:
    """What a call printed, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture
def forge_gen(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Call the command with arguments of any type."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        status = ended.value.code
        assert status is None or isinstance(status, int)
        return Result(status or 0, captured.out, captured.err)

    return call


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A folder with two good specs."""
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "one.opt").write_text(GOOD.format(name="One"))
    (folder / "two.opt").write_text(GOOD.format(name="Two"))
    return folder
