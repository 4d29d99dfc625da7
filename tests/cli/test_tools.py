"""`forge-gen explain`, `fmt` and `new`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import BAD, GOOD, Result

OPTIMIZERS = Path(__file__).resolve().parents[2] / "optimizers"
Call = Callable[..., Result]
UNTIDY = "optimizer   Untidy # why\nhyper lr=1e-2 in [0,inf)\n\nupdate:\n      weight=weight-(lr*grad)\n"


def test_new_writes_a_spec_that_passes_every_check(
    forge_gen: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = forge_gen("new", "AdaFoo")
    assert result.status == 0 and "wrote ada_foo.opt" in result.out
    assert forge_gen("ada_foo.opt", "-o", "out", "--strict").status == 0
    assert forge_gen("fmt", "--check", "ada_foo.opt").status == 0
    assert forge_gen("explain", "ada_foo.opt").status == 0


@pytest.mark.parametrize(
    ("name", "file", "optimizer"),
    [("AdamW", "adamw", "AdamW"), ("my_rule", "my_rule", "MyRule"), ("RMSprop", "rmsprop", "RMSprop"), ("X", "x", "X")],
)
def test_new_names_the_file_after_the_optimizer(
    forge_gen: Call, tmp_path: Path, name: str, file: str, optimizer: str
) -> None:
    assert forge_gen("new", name, "-o", tmp_path).status == 0
    assert f"\noptimizer {optimizer}\n" in (tmp_path / f"{file}.opt").read_text()


def test_new_writes_where_it_is_told(forge_gen: Call, tmp_path: Path) -> None:
    assert forge_gen("new", "AdaFoo", "-o", tmp_path / "deep" / "foo.opt").status == 0
    assert "foo_linear" in (tmp_path / "deep" / "foo.opt").read_text()


def test_new_overwrites_nothing(forge_gen: Call, tmp_path: Path) -> None:
    (tmp_path / "ada_foo.opt").write_text("mine")
    result = forge_gen("new", "AdaFoo", "-o", tmp_path)
    assert result.status == 1 and "exists and is not overwritten" in result.err
    assert (tmp_path / "ada_foo.opt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("class", "3D", "a b", "", "torch", "x\nupdate:", "Ünicode", "../up", 'A"; import os', "_x", "a.b", "Tensor"),
        "a" * 65,
    ],
)
def test_new_refuses_a_name_that_is_none(forge_gen: Call, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    result = forge_gen("new", name, "-o", folder)
    assert result.status == 1 and "error[" in result.err
    assert list(tmp_path.rglob("*.opt")) == []
    # No place in a file that does not exist, and none of its lines.
    assert not re.search(r":\d+:\d+|\n *\d* \|", result.err)


def test_new_says_that_a_name_is_none(forge_gen: Call, tmp_path: Path) -> None:
    assert "`3D` is not a name for an optimizer" in forge_gen("new", "3D", "-o", tmp_path).err


@pytest.mark.parametrize("name", ["foo.txt", "foo.opt.txt", "v1.2", ".opt"])
def test_new_makes_no_folder_of_what_looks_like_a_file(forge_gen: Call, tmp_path: Path, name: str) -> None:
    result = forge_gen("new", "Foo", "-o", tmp_path / name)
    assert result.status == 1 and f"-o names `{name}`" in result.err and list(tmp_path.iterdir()) == []
    (tmp_path / name).mkdir()
    assert forge_gen("new", "Foo", "-o", tmp_path / name).status == 0
    assert (tmp_path / name / "foo.opt").exists()


def test_fmt_rewrites_only_what_is_untidy(forge_gen: Call, specs: Path) -> None:
    (specs / "untidy.opt").write_text(UNTIDY)
    (specs / "untidy.opt").chmod(0o640)
    before = (specs / "one.opt").stat().st_mtime_ns
    result = forge_gen("fmt", specs, "--check")
    assert result.status == 1 and result.out == f"would change: {specs / 'untidy.opt'}\n"
    assert (specs / "untidy.opt").read_text() == UNTIDY
    result = forge_gen("fmt", specs)
    assert result.status == 0 and result.out == f"changed: {specs / 'untidy.opt'}\n"
    text = (specs / "untidy.opt").read_text()
    assert "weight = weight - lr * grad" in text and "# why" in text
    assert (specs / "untidy.opt").stat().st_mode & 0o777 == 0o640
    assert (specs / "one.opt").stat().st_mtime_ns == before
    assert forge_gen("fmt", specs, "--check").status == 0


def test_fmt_changes_nothing_if_one_file_does_not_parse(forge_gen: Call, specs: Path) -> None:
    (specs / "untidy.opt").write_text(UNTIDY)
    (specs / "broken.opt").write_text("optimizer\n")
    result = forge_gen("fmt", specs)
    assert result.status == 1 and "broken.opt:1:" in result.err
    assert (specs / "untidy.opt").read_text() == UNTIDY


def test_fmt_follows_a_link_to_the_file(forge_gen: Call, specs: Path, tmp_path: Path) -> None:
    (specs / "untidy.opt").write_text(UNTIDY)
    (tmp_path / "link.opt").symlink_to(specs / "untidy.opt")
    assert forge_gen("fmt", tmp_path / "link.opt").status == 0
    assert (tmp_path / "link.opt").is_symlink() and (specs / "untidy.opt").read_text() != UNTIDY


def test_explain_counts_bytes_operations_and_scalars(forge_gen: Call) -> None:
    result = forge_gen("explain", OPTIMIZERS / "adamw.opt", "--format", "json")
    facts = json.loads(result.out)
    assert result.status == 0 and facts["name"] == "AdamW" and facts["certificate"]
    default = facts["variants"][0]
    assert default["states"] == ["exp_avg", "exp_avg_sq"]
    costs = {(cost["weight"], cost["states"]): cost for cost in default["costs"]}
    # Weight and two moments, 2 bytes each, are read and written; unfused, a gradient is written and read beside them.
    bf16 = costs["bf16", "bf16"]
    assert (bf16["stored"], bf16["stored_unfused"], bf16["moved"], bf16["moved_unfused"]) == (6, 8, 12, 16)
    assert costs["bf16", "fp32"]["moved"] == 20 and costs["fp32", "fp32"]["moved"] == 24
    # docs/performance.md: "The limit", and the column L of its first table.
    assert bf16["crossover"] == 1102
    assert [round(ms, 3) for ms in bf16["limit_ms"]] == [0.047, 0.087, 0.348]
    amsgrad = next(variant for variant in facts["variants"] if variant["label"] == "amsgrad")
    assert amsgrad["states"] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert default["operations"]["fast"].get("pow", 0) == 0
    assert any("beta1 ** step" in line for line in facts["definitions"])


def test_explain_shows_the_same_to_people(forge_gen: Call) -> None:
    result = forge_gen("explain", OPTIMIZERS / "adamw.opt")
    assert result.status == 0 and "\x1b" not in result.out
    for words in ("Why it may be fused", "Once per step, in float64", "Bytes per parameter", "H200"):
        assert words in result.out


@pytest.mark.parametrize("spec", sorted(OPTIMIZERS.glob("*.opt")), ids=lambda path: path.stem)
def test_explain_works_for_every_spec_of_the_project(forge_gen: Call, spec: Path) -> None:
    assert forge_gen("explain", spec).status == 0


def test_explain_counts_one_statement_as_one(forge_gen: Call, specs: Path) -> None:
    result = forge_gen("explain", specs / "one.opt")
    assert "its one statement uses" in result.out and "1 statements" not in result.out


def test_explain_of_a_faulty_spec_shows_its_errors(forge_gen: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.opt").write_text(BAD)
    result = forge_gen("explain", tmp_path / "bad.opt")
    assert result.status == 1 and "bad.opt:6:" in result.err
    assert json.loads(forge_gen("explain", tmp_path / "bad.opt", "--format", "json").out)["diagnostics"]


def test_a_spec_called_like_a_tool_is_named_with_its_folder(
    forge_gen: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "one.opt").write_text(GOOD.format(name="One"))
    assert forge_gen("./new", "-o", "out").status == 0
