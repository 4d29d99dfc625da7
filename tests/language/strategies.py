"""Hypothesis strategies for syntax trees, refused nodes among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from forge_dsl.language import syntax

RESERVED = {
    *("optimizer", "hyper", "flag", "state", "scalar", "let", "require", "update", "in", "when", "if", "elif", "else"),
    *("for", "while", "and", "or", "not", "true", "false", "inf"),
    *("return", "print", "lambda", "is", "match", "case"),
}
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in RESERVED)
numbers = st.sampled_from(["0", "1", "2.5", "1e-8", ".5", "7.", "3E4", "inf", "0.0"]).map(
    lambda text: syntax.Number(float(text), text)
) | st.floats(0, 1e20).map(syntax.Number)
leaves = numbers | names.map(syntax.Name) | st.booleans().map(syntax.Boolean)
# Any text that may stand in a comment: no control characters, no separators of lines, nothing that reorders.
text = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"]), max_size=12)
comments = st.lists(text.map(lambda s: s.rstrip()) | st.none(), max_size=3).map(tuple)


comparisons = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


def _extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    args = st.lists(inner, max_size=3).map(tuple)
    keywords = st.lists(st.tuples(names, inner), max_size=2).map(tuple)
    return st.one_of(
        st.builds(syntax.Unary, st.sampled_from(["-", "+", "not"]), inner),
        st.builds(syntax.Binary, st.sampled_from(["+", "-", "*", "/", "%", "**", "@", "//"]), inner, inner),
        st.builds(syntax.Conditional, inner, inner, inner),
        st.integers(2, 4).flatmap(
            lambda n: st.builds(
                syntax.Compare,
                st.lists(inner, min_size=n, max_size=n).map(tuple),
                st.lists(comparisons, min_size=n - 1, max_size=n - 1).map(tuple),
            )
        ),
        st.builds(syntax.Logical, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(syntax.Call, names, args, keywords),
        st.builds(syntax.Tuple, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(syntax.Subscript, inner, st.lists(inner, max_size=2).map(tuple)),
        st.builds(syntax.Attribute, inner, names),
        st.builds(syntax.MethodCall, inner, names, args, keywords),
    )


expressions = st.recursive(leaves, _extend, max_leaves=12)
bounds = st.builds(syntax.Bounds, expressions, expressions, st.booleans(), st.booleans())
maybe_bounds = st.none() | bounds
maybe = st.none() | expressions
messages = text


def _with_comments(node: Any, above: Any, beside: str | None) -> Any:
    return replace(node, leading=above, trailing=beside)


def _commented(nodes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    trailing = st.none() | text.map(lambda s: s.rstrip())
    return st.builds(_with_comments, nodes, comments, trailing)


declarations = _commented(
    st.one_of(
        st.builds(syntax.Hyper, names, maybe, st.lists(bounds, max_size=2).map(tuple)),
        st.builds(syntax.Flag, names, maybe),
        st.builds(syntax.State, names, maybe, maybe_bounds, maybe),
        st.builds(syntax.Scalar, names, maybe, maybe_bounds),
        st.builds(syntax.Let, st.lists(names, min_size=1, max_size=3).map(tuple), expressions),
        st.builds(syntax.Require, expressions, messages),
        st.builds(syntax.Assign, names, expressions, maybe),
    )
)
_plain = _commented(
    st.one_of(
        st.builds(syntax.Assign, names, expressions, maybe),
        st.builds(syntax.AugmentedAssign, names, st.sampled_from(["+=", "*=", "**=", "//=", "@="]), expressions),
        st.builds(syntax.ExpressionStatement, expressions),
    )
)


def _blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return _commented(
        st.one_of(
            st.builds(lambda k, c, b: syntax.Block(k, (c,), b), st.sampled_from(["if", "while"]), expressions, body),
            st.builds(lambda b: syntax.Block("else", (), b), body),
            st.builds(lambda n, x, b: syntax.Block("for", (syntax.Name(n), x), b), names, expressions, body),
        )
    )


statements = st.recursive(_plain, _blocks, max_leaves=4)
specs = st.builds(
    syntax.Spec,
    names,
    st.lists(declarations, max_size=4).map(tuple),
    st.lists(statements, min_size=1, max_size=4).map(tuple),
    leading=comments,
    trailing=st.none() | text.map(lambda s: s.rstrip()),
    update_leading=comments,
    update_trailing=st.none() | text.map(lambda s: s.rstrip()),
    # Blank lines above the footer are the footer's.
    closing=comments.filter(lambda lines: not lines or lines[-1] is not None),
    footer=comments,
)
