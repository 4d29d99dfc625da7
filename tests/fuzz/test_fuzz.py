"""A short run of the fuzzer; `python -m tests.fuzz.fuzz_frontend` takes the long one."""

from __future__ import annotations

from tests.fuzz.fuzz_frontend import make, run


def test_every_text_ends_in_a_checked_spec_or_in_diagnostics() -> None:
    seen: list[str] = []
    outcome = run(1500, seed=7_000_000, on_valid=lambda checked, text: seen.append(checked.tree.name), seconds=5.0)
    assert outcome.valid > 300 and outcome.refused > 300
    assert len(seen) > 300
    assert len(outcome.codes) > 20


def test_cases_are_reproducible() -> None:
    assert [make(seed) for seed in range(20)] == [make(seed) for seed in range(20)]
