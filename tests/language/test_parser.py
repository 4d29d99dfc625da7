"""The tree of a spec: shapes, places, comments."""

from __future__ import annotations

import pytest

from forge_dsl.language import syntax
from forge_dsl.language.parser import parse
from forge_dsl.language.syntax import Binary, Name, Number, Unary
from tests.specs import HERE, rule

RULES = sorted((HERE / "rules").glob("*.opt"))


def expr(text: str) -> syntax.Expr:
    (statement,) = parse(f"optimizer X\nupdate:\n  weight = {text}").update
    assert isinstance(statement, syntax.Assign)
    return statement.value


A, B, C = Name("a"), Name("b"), Name("c")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a + b * c", Binary("+", A, Binary("*", B, C))),
        ("a - b - c", Binary("-", Binary("-", A, B), C)),
        ("a / b / c", Binary("/", Binary("/", A, B), C)),
        ("a ** b ** c", Binary("**", A, Binary("**", B, C))),
        ("-a ** b", Unary("-", Binary("**", A, B))),
        ("a ** -b", Binary("**", A, Unary("-", B))),
        ("(-a) ** b", Binary("**", Unary("-", A), B)),
        ("-a * b", Binary("*", Unary("-", A), B)),
        ("a @ b // c % a", Binary("%", Binary("//", Binary("@", A, B), C), A)),
        ("a < b <= c", syntax.Compare((A, B, C), ("<", "<="))),
        ("not a and b or c", syntax.Logical("or", (syntax.Logical("and", (Unary("not", A), B)), C))),
        ("a or b or c", syntax.Logical("or", (A, B, C))),
        ("not a < b", Unary("not", syntax.Compare((A, B), ("<",)))),
        ("a if b else c if a else b", syntax.Conditional(A, B, syntax.Conditional(C, A, B))),
        ("(a if b else c) if a else b", syntax.Conditional(syntax.Conditional(A, B, C), A, B)),
        ("max(a, b)", syntax.Call("max", (A, B))),
        ("f()", syntax.Call("f", ())),
        ("f(a, dim=b,)", syntax.Call("f", (A,), (("dim", B),))),
        ("a.norm(b)", syntax.MethodCall(A, "norm", (B,))),
        ("a.T", syntax.Attribute(A, "T")),
        ("math.inf", syntax.Attribute(Name("math"), "inf")),
        ("a[b, c]", syntax.Subscript(A, (B, C))),
        ("(a, b)", syntax.Tuple((A, B))),
        ("(a,)", syntax.Tuple((A,))),
        ("((a))", A),
        ("true", syntax.Boolean(True)),
        ("inf", Number(float("inf"))),
        ("1e-8", Number(1e-8)),
        (".5", Number(0.5)),
        ("7.", Number(7.0)),
        ("info", Name("info")),
        ("truest", Name("truest")),
        ("notable", Name("notable")),
        ("sum(sum)", syntax.Call("sum", (Name("sum"),))),
        ("(a\n  + # why\n  b)", Binary("+", A, B)),
    ],
)
def test_expressions(text: str, tree: syntax.Expr) -> None:
    assert expr(text) == tree


def test_declarations() -> None:
    tree = parse(
        rule(
            "weight = weight - lr * grad  when f and lr != 0",
            declare="hyper b = (0.9, 1) in [0, 1), (-inf, 2 * 3]\nflag f\nstate m = weight in [0, inf) when f\n"
            'scalar c = 1 in [0, 1]\nlet x, y = b\nc = c * x\nrequire lr > 0, "say \\"no\\" \\\\"',
        )
    )
    hyper, flag, state, scalar, let, assign, require = tree.declarations[1:]
    assert isinstance(hyper, syntax.Hyper) and isinstance(state, syntax.State) and isinstance(let, syntax.Let)
    assert [(r.low_open, r.high_open) for r in hyper.ranges] == [(False, True), (True, False)]
    assert flag == syntax.Flag("f", None)
    assert state.initial == Name("weight") and state.domain is not None and state.when == Name("f")
    assert isinstance(scalar, syntax.Scalar) and scalar.domain is not None
    assert let.names == ("x", "y")
    assert assign == syntax.Assign("c", Binary("*", Name("c"), Name("x")))
    assert isinstance(require, syntax.Require) and require.message == 'say "no" \\'
    (update,) = tree.update
    assert isinstance(update, syntax.Assign) and isinstance(update.when, syntax.Logical)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_spans_cover_what_they_name(path) -> None:  # type: ignore[no-untyped-def]
    text = path.read_text()
    lines = text.split("\n")
    for node in syntax.walk(parse(text)):
        span = node.span
        assert 0 <= span.start < span.end <= len(text)
        assert sum(len(line) + 1 for line in lines[: span.line - 1]) + span.column - 1 == span.start
        if isinstance(node, Name):
            assert text[span.start : span.end].strip("() ") == node.id
        if isinstance(node, syntax.Assign | syntax.State):
            assert text[node.name_span.start : node.name_span.end] == node.name


def test_comments_go_with_their_statement() -> None:
    tree = parse(
        "# title\n#\n#second\n\noptimizer X  # name\n# about lr\n\nhyper lr = 1  # rate\n# the rule\nupdate:  # go\n"
        "  # inside\n  weight = (lr *  # one\n    # two\n    grad)  # three\n  # closing\n# end\n"
    )
    assert tree.leading == ("title", "", "second", None)
    assert tree.trailing == "name"
    assert tree.declarations[0].leading == ("about lr", None)
    assert tree.declarations[0].trailing == "rate"
    assert (tree.update_leading, tree.update_trailing) == (("the rule",), "go")
    assert tree.update[0].leading == ("inside", "one", "two")
    assert tree.update[0].trailing == "three"
    assert (tree.closing, tree.footer) == (("closing",), ("end",))


def test_a_sign_of_a_comment_inside_a_message_is_text() -> None:
    tree = parse(rule(declare='require lr > 0, "a # b"  # c'))
    require = tree.declarations[1]
    assert isinstance(require, syntax.Require)
    assert (require.message, require.trailing) == ("a # b", "c")


def test_line_ends_and_a_byte_order_mark_do_not_matter() -> None:
    text = rule("g = (grad +\n  lr)", "weight = weight - g")
    assert parse("\ufeff" + text.replace("\n", "\r\n")) == parse(text) == parse(text.replace("\n", "\r"))


def test_blocks_parse_so_that_their_refusal_can_speak_of_them() -> None:
    tree = parse(rule("if lr > 1:", "  x = 1", "  if lr > 2:", "    x = 2", "else:", "  x = 3", "weight = x"))
    outer, alternative, last = tree.update
    assert isinstance(outer, syntax.Block) and isinstance(alternative, syntax.Block)
    assert outer.keyword == "if" and isinstance(outer.body[1], syntax.Block)
    assert alternative.header == ()
    assert last == syntax.Assign("weight", Name("x"))
