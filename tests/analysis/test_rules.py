"""Published optimizers: those that are element-wise pass without a warning, the others are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_dsl.analysis import papers
from forge_dsl.diagnostics import render
from tests.golden import Golden
from tests.specs import HERE, diagnose, diagnose_file, rule

REASONS = {
    "lamb": papers.TRUST_RATIO,
    "lars": papers.TRUST_RATIO,
    "adafactor": papers.FACTORED,
    "muon": papers.ORTHOGONAL,
    "muon_call": papers.ORTHOGONAL,
    "shampoo": papers.KRONECKER,
}


@pytest.mark.parametrize("path", sorted((HERE / "rules").glob("*.opt")), ids=lambda path: path.stem)
def test_an_element_wise_rule_gets_no_diagnostic(path: Path) -> None:
    assert diagnose_file(path)[1] == ()


@pytest.mark.parametrize("name", REASONS)
def test_a_rule_that_couples_coordinates_is_refused_in_the_words_of_its_paper(name: str, golden: Golden) -> None:
    path = HERE / "refused" / f"{name}.opt"
    source, found = diagnose_file(path)
    assert all(d.severity == "error" for d in found)
    assert REASONS[name] in {note for d in found for note in d.notes}
    assert papers.FUSION in {note for d in found for note in d.notes}
    golden(render(found, source, path.name, color=False) + "\n", path.with_suffix(".txt"))


def test_yogi_gets_one_warning() -> None:
    found = diagnose_file(HERE / "warned" / "yogi.opt")[1]
    assert [(d.code, d.severity) for d in found] == [("W0804", "warning")]


@pytest.mark.parametrize(
    ("expression", "code", "note"),
    [
        ("norm(weight) / norm(grad)", "E0501", papers.TRUST_RATIO),
        ("sqrt(sum(weight * weight))", "E0501", papers.TRUST_RATIO),
        ("(dot(weight, grad) + norm(weight))", "E0501", None),
        ("dot(weight, grad)", "E0501", None),
        ("dist(weight, grad)", "E0501", None),
        ("mean(grad * grad, dim=0)", "E0501", papers.FACTORED),
        ("(grad ** 2).mean(-1)", "E0501", papers.FACTORED),
        ("mean(grad, dim=0)", "E0501", papers.CENTRALISED),
        ("torch.mean(grad, 0)", "E0501", papers.CENTRALISED),
        ("grad.mean(dim=0)", "E0501", papers.CENTRALISED),
        ("grad.sum(dim=0)", "E0501", papers.FACTORED),
        ("grad.amax(dim=0)", "E0501", None),
        ("max(grad, dim=0)", "E0501", None),
        ("grad.mean()", "E0501", None),
        ("grad.numel()", "E0503", None),
        ("numel(grad)", "E0503", None),
        ("grad.numel", "E0503", None),
    ],
)
def test_a_refusal_names_the_paper_that_it_is_about_and_no_other(expression: str, code: str, note: str | None) -> None:
    found = diagnose(rule(f"weight = weight - lr * grad * {expression}"))[0]
    assert found.code == code
    assert found.notes == (papers.FUSION,) if note is None else found.notes == (note, papers.FUSION)
