"""No text exhausts the stack or the time: the bounds of a spec."""

from __future__ import annotations

import time

import pytest

from forge_dsl.language.format import format_spec
from forge_dsl.language.parser import parse
from forge_dsl.language.source import MAX_BYTES, MAX_DEPTH
from tests.specs import codes, diagnose, rule

SECONDS = 2.0
N = 60_000
HUGE = {
    "open brackets": "(" * N,
    "brackets": "(" * (N // 2) + "grad" + ")" * (N // 2),
    "minus signs": "-" * N + "grad",
    "nots": "not " * (N // 4) + "grad",
    "powers": "2**" * (N // 3) + "grad",
    "terms": "x+" * (N // 2) + "grad",
    "conjunctions": "x and " * (N // 6) + "grad",
    "comparisons": "x<" * (N // 2) + "grad",
    "conditionals": "x if x else " * (N // 12) + "grad",
    "calls": "f(" * (N // 3) + "grad" + ")" * (N // 3),
    "arguments": "f(" + "x," * (N // 2) + "grad)",
    "attributes": "grad" + ".a" * (N // 2),
    "subscripts": "grad" + "[0]" * (N // 3),
    "nested subscripts": "x[" * (N // 3) + "1" + "]" * (N // 3),
    "digits": "1" * N,
    "a name": "x" * N,
    "strings": '"' * N,
    "dollars": "$" * N,
    "a comment": "grad #" + "(" * N,
}


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_expression_is_refused_quickly(what: str) -> None:
    start = time.process_time()
    found = diagnose(rule(f"weight = {HUGE[what]}"))
    assert time.process_time() - start < SECONDS
    assert all(d.severity == "error" for d in found) and found


@pytest.mark.parametrize(
    "text",
    [
        "\n" * N,
        "#\n" * (N // 2),
        "$\n" * (N // 2),
        "optimizer X\nupdate:\n" + "  weight = lr\n" * (N // 14),
        "optimizer X\nupdate:\n" + "".join(" " * (i + 1) + "if x:\n" for i in range(300)),
        "optimizer X\nupdate:\n" + "".join(f"  weight = {'n' * 50}{i}\n" for i in range(390)),
        "optimizer X\n" + "".join(f"hyper {'n' * 50}{i}x = 1\n" for i in range(190)) + "update:\n"
        + "".join(f"  weight = {'n' * 50}{i}\n" for i in range(190)),
        "optimizer X\n" + "".join(f"state {'n' * 50}{i}x\n" for i in range(190)) + "update:\n"
        + "".join(f"  {'n' * 50}{i} = grad\n" for i in range(190)),
    ],
    ids=["blank lines", "comments", "junk", "statements", "blocks", "unknown names", "misspelled names", "unread"],
)  # fmt: skip
def test_a_huge_file_is_refused_quickly(text: str) -> None:
    start = time.process_time()
    assert diagnose(text)
    assert time.process_time() - start < SECONDS


def nested(depth: int) -> str:
    return "grad" if depth == 1 else f"-{nested(depth - 1)}"


def test_the_deepest_expression_passes_every_stage() -> None:
    text = rule(f"weight = {nested(MAX_DEPTH)} + lr")
    assert codes(text) == ["E0004"]
    text = rule(f"weight = {nested(MAX_DEPTH - 2)} + lr")
    assert codes(text) == []
    assert parse(format_spec(parse(text))) == parse(text)


def test_a_chain_is_as_deep_as_it_has_links() -> None:
    for sign in ("<", "and"):
        for links, expected in ((MAX_DEPTH + 1, ["E0004"]), (MAX_DEPTH - 8, [])):
            chain = f" {sign} ".join(["grad > 0" if sign == "and" else "grad"] * (links + 1))
            text = rule(f"weight = weight - lr * (1 if {chain} else grad)")
            assert codes(text) == expected, (sign, links)


def test_worst_cases_within_the_bounds_are_checked_quickly() -> None:
    flags = "\n".join(f"flag f{i}" for i in range(8))
    choice = "lr * grad"
    for i in range(20):
        choice = f"(sqrt({choice}) if f{i % 8} and grad > {choice.count('(')} else lr)"
    quotient = "grad" + " / lr" * 58
    for line, count, declare in ((choice, 12, flags), (quotient, 60, "")):
        text = rule(*[f"weight = weight - {line}"] * count, declare=declare)
        start = time.process_time()
        assert "E" not in {d.code[0] for d in diagnose(text)}
        assert time.process_time() - start < SECONDS


def test_nested_choices_inside_conditions_do_not_take_exponential_time() -> None:
    choice = "grad"
    for _ in range(28):
        choice = f"(lr if grad > {choice} else lr)"
    start = time.process_time()
    diagnose(rule(f"weight = weight - {choice}"))
    assert time.process_time() - start < SECONDS


def test_the_size_is_counted_in_bytes() -> None:
    text = rule() + "# " + "\u00e9" * (MAX_BYTES // 2 - 200)
    assert codes(text) == []
    assert codes(text + "\u00e9" * 200) == ["E0003"]


def test_folding_takes_no_time() -> None:
    assert codes(rule("weight = weight - lr * a", declare="hyper a = 9 ** 9 ** 9 ** 9")) == ["E0401"]
    assert codes(rule("weight = weight - lr * a", declare="hyper a = 9 ** 9 ** 9 ** 9 in [0, 9 ** 999]")) == [
        "E0401",
        "E0401",
    ]
