"""The canonical form: it loses nothing, is stable, and looks like this."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr, format_spec
from forge_dsl.language.parser import parse
from tests.language.strategies import expressions, specs
from tests.specs import HERE

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(expressions)
def test_an_expression_reads_back_as_itself(expr: syntax.Expr) -> None:
    (statement,) = parse(f"optimizer X\nupdate:\n  weight = {format_expr(expr)}").update
    assert isinstance(statement, syntax.Assign)
    assert statement.value == expr


@RELAXED
@given(specs)
def test_a_spec_reads_back_as_itself_and_stays_as_printed(tree: syntax.Spec) -> None:
    text = format_spec(tree)
    again = parse(text)
    assert again == tree
    assert format_spec(again) == text


def all_comments(tree: syntax.Spec) -> list[str]:
    found = [*tree.leading, tree.trailing, *tree.update_leading, tree.update_trailing]
    found += [*tree.closing, *tree.footer]
    for node in syntax.walk(tree):
        if isinstance(node, syntax.Statement):
            found += [*node.leading, node.trailing]
    return sorted(text.removeprefix(" ") for text in found if text is not None)


@RELAXED
@given(specs)
def test_no_comment_is_lost(tree: syntax.Spec) -> None:
    again = parse(format_spec(tree))
    assert [c.removeprefix(" ") for c in all_comments(again)] == [c.removeprefix(" ") for c in all_comments(tree)]


@pytest.mark.parametrize("path", sorted(HERE.glob("r*/*.opt")), ids=lambda path: path.stem)
def test_the_form_of_real_specs_is_stable(path) -> None:  # type: ignore[no-untyped-def]
    text = format_spec(parse(path.read_text()))
    assert format_spec(parse(text)) == text


LOOSE = """

#title
optimizer   X   # name


hyper lr=1e-3 in [0,inf)
hyper betas = (0.9,0.999) in [0 , 1)
flag a = false
flag longer
state m
state variance in [0,inf)
state extra in [0, inf) when a and(not longer)
state other when a
let b1,b2 = betas
let x = (b1)
let longer_x = b2 ** - step
require a or longer and lr>0,"say \\"so\\""
update:

  # first
  g = ((grad))
  variance = (x * variance) + (1-x)*g*g


  a_name_that_is_long = m when a   #kept
  weight = weight - (lr *  # inside
    a_name_that_is_long)

   # last

  # really
#end
  #of the file
"""
CANONICAL = """\
# title
optimizer X  # name

hyper lr    = 1e-3          in [0, inf)
hyper betas = (0.9, 0.999)  in [0, 1)
flag  a = false
flag  longer
state m
state variance in [0, inf)
state extra    in [0, inf)  when a and not longer
state other    when a
let b1, b2 = betas
let x        = b1
let longer_x = b2 ** -step
require a or (longer and lr > 0), "say \\"so\\""

update:
  # first
  g        = grad
  variance = x * variance + (1 - x) * g * g

  a_name_that_is_long = m  when a  # kept
  # inside
  weight = weight - lr * a_name_that_is_long

  # last

  # really
# end
# of the file
"""


def test_the_canonical_form() -> None:
    assert format_spec(parse(LOOSE)) == CANONICAL


def test_a_long_statement_is_broken_at_its_loosest_operator() -> None:
    sides = ["first_quite_long_name * second_quite_long_name", "third_quite_long_name", "fourth_quite_long_name / 2"]
    text = f"optimizer X\n\nupdate:\n  weight = {' + '.join(sides)} - {' - '.join(sides)}\n"
    assert format_spec(parse(text)) == (
        "optimizer X\n\nupdate:\n  weight = (\n"
        "    first_quite_long_name * second_quite_long_name\n    + third_quite_long_name\n"
        "    + fourth_quite_long_name / 2\n    - first_quite_long_name * second_quite_long_name\n"
        "    - third_quite_long_name\n    - fourth_quite_long_name / 2\n  )\n"
    )
    choice = f"optimizer X\n\nupdate:\n  weight = {sides[0]} + 1 if {sides[1]} > {sides[2]} else {sides[0]}\n"
    assert "\n    if third_quite_long_name > fourth_quite_long_name / 2\n    else " in format_spec(parse(choice))
