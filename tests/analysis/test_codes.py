"""Every code is documented, has an example that gets it, and a pair of specs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forge_dsl
from forge_dsl.diagnostics import CODES, errors_page, render
from tests.golden import Golden
from tests.specs import HERE, diagnose, diagnose_file

ROOT = Path(forge_dsl.__file__).parent.parent
# What concerns files and folders rather than the text of one spec has no pair of specs.
OF_RUNS = {"E0001", "E0901", "E0902", "E0903", "E0904"}
PAIRED = sorted(set(CODES) - OF_RUNS)


@pytest.mark.parametrize("code", [info.code for info in CODES.values() if not info.failing.startswith("$")])
def test_the_documented_example_gets_its_code_and_the_repaired_one_nothing(code: str) -> None:
    info = CODES[code]
    assert {d.code for d in diagnose(info.failing)} == {code}
    assert diagnose(info.fixed) == ()


@pytest.mark.parametrize("code", PAIRED)
def test_a_bad_spec_is_reported_as_expected(code: str, golden: Golden) -> None:
    path = HERE / f"{code}.bad.opt"
    source, found = diagnose_file(path)
    assert {d.code for d in found} == {code}
    assert {d.severity for d in found} == {CODES[code].severity}
    golden(render(found, source, path.name, color=False) + "\n", path.with_suffix(".txt"))


@pytest.mark.parametrize("code", PAIRED)
def test_a_good_spec_gets_nothing(code: str) -> None:
    assert diagnose_file(HERE / f"{code}.good.opt")[1] == ()


def test_specs_stand_for_known_codes() -> None:
    assert {path.name.split(".")[0] for path in HERE.glob("*.opt")} == set(PAIRED)


def test_every_code_that_the_compiler_uses_is_known() -> None:
    used = set()
    for path in (ROOT / "forge_dsl").rglob("*.py"):
        if path.name != "codes.py":
            used |= set(re.findall(r'"([EW]\d{4})"', path.read_text(encoding="utf-8")))
    assert used == set(CODES)


def test_slugs_are_distinct() -> None:
    assert len({info.slug for info in CODES.values()}) == len(CODES)


def test_the_page_of_errors_is_current(golden: Golden) -> None:
    golden(errors_page(), ROOT / "docs" / "errors.md")
