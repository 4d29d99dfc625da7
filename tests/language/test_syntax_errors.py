"""Syntax errors speak about what the author meant."""

from __future__ import annotations

import pytest

from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.language.parser import parse
from tests.specs import diagnose, rule

# A line of the body, the code it gets, and words of the message or the help.
LINES = [
    ("x = (lr", "E0103", "never closed"),
    ("x := lr", "E0111", "write `=`"),
    ("weight = lr * (x := 2)", "E0111", "on a line of its own"),
    ("x <- grad", "E0603", "write the arrow as `=`"),
    ("x <- x - lr * grad", "E0603", "write the arrow as `=`"),
    ("x < grad", "E0603", "assign it"),
    ("Let x = lr", "E0101", "write `let` in small letters"),
    ('x = einsum("ij,ij->", grad)', "E0502", "rows and columns"),
    ('x = torch.einsum("ij,ij->", grad, (grad))', "E0502", "rows and columns"),
    ('x = sqrt(norm(grad, p="fro"))', "E0501", "combines all coordinates"),
    ('x = norm(grad) + sqrt("x")', "E0115", "message of a `require`"),
    ("x = await grad", "E0208", "`await` is Python"),
    ("pass", "E0208", "leave the line out"),
    ("for i in range(3)", "E0601", "write the repeated statements out"),
    ("weight = grad.clamp(min=0)", "E0506", "write `max(grad, 0)`"),
    ("weight = grad.clamp(max=lr)", "E0506", "write `min(grad, lr)`"),
    ("weight = torch.clamp(grad, -1, max=1)", "E0208", "write `clamp(grad, -1, 1)`"),
    ("weight = clamp(grad, min=0)", "E0305", "write `max(grad, 0)`"),
    ("weight = grad.tanh(out=lr)", "E0506", "write `tanh(x)`"),
    ("x = lr when step > 3", "E0310", "write `x = ... if step > 3 else ...`"),
    ("weight = lr when step", "E0310", "write `weight = ... if step else weight`"),
    ("weight = 1e400", "E0401", "written `inf`"),
    ("x = lr)", "E0103", "closes nothing"),
    ("x = (lr]", "E0103", "does not close"),
    ("x = lr grad", "E0101", "write `lr * grad`"),
    ("x = 2 lr", "E0101", "operator is missing"),
    ("x = grad if lr > 1", "E0101", "needs an `else`"),
    ("x = grad else 1", "E0101", "has no `if`"),
    ("x = grad when", "E0101", "an expression is expected"),
    ("x = (grad when lr)", "E0112", "`when` stands at the end"),
    ("x = grad in lr", "E0101", "`in` gives the range"),
    ("x =", "E0101", "the line ends where an expression is expected"),
    ("x = * 2", "E0101", "unexpected `*`"),
    ("x = [1, 2]", "E0101", "a list is not a value"),
    ("x = {1}", "E0111", "group with parentheses"),
    ("x = a = b", "E0113", "an assignment is not a value"),
    ("x := lr", "E0111", "`:=`"),
    ("x = f(y := 1)", "E0111", "`:=`"),
    ("x = 1 if lr = 2 else 3", "E0111", "write `==`"),
    ("x = sqrt(grad = 2 = 3)", "E0111", "write `==`"),
    ("x = lr && grad", "E0111", "write `and`"),
    ("x = lr || grad", "E0111", "write `or`"),
    ("x = !lr", "E0111", "write `not x`"),
    ("x = lr ^ 2", "E0111", "x ** 2"),
    ("x = lr ? 1 : 2", "E0111", "a if c else b"),
    ("x = lr; y = 2", "E0111", "line of its own"),
    ("x = 'lr'", "E0111", "double quotes"),
    ('x = "lr"', "E0115", "message of a `require`"),
    ('x = state["exp_avg"]', "E0203", "a word of the language"),
    ("update = grad", "E0203", "call it `update_`"),
    ("state = grad", "E0203", "call it `state_`"),
    ("x = lr * update", "E0203", "call it `update_`"),
    ("optimizer = lr", "E0203", "a word of the language"),
    ('x = group["lr"]', "E0115", "write `lr`"),
    ("x = lr \\", "E0111", "no backslash"),
    ("x = 1_000", "E0114", "write `1000`"),
    ("x = 0x1F", "E0114", "decimal"),
    ("x = 2lr", "E0114", "write `2 * lr`"),
    ("x = 1e", "E0114", "`1e` is not a number"),
    ("x = 1.2.3", "E0114", "`1.2.3` is not a number"),
    ("x = lambda g: g", "E0208", "`lambda` is Python"),
    ("return weight", "E0208", "`return` is Python"),
    ("import torch", "E0208", "`import` is Python"),
    ("def f(x):", "E0208", "`def` is Python"),
    ("x = 1 if lr is 2 else 3", "E0208", "compare with `==`"),
    ("x[0] = 1", "E0113", "every coordinate is updated alike"),
    ("self.x = 1", "E0113", "plain names"),
    ("x, y = betas", "E0113", "one name"),
    ("x = 1, 2", "E0112", "parentheses"),
    ("when = 1", "E0203", "a word of the language"),
    ("if grad", "E0601", "there is no `if` statement"),
    ("while grad > 0", "E0601", "there is no `while` statement"),
    ("x = grad[1:]", "E0503", "slicing"),
    ("x = grad[:, 0]", "E0503", "slicing"),
    ("x = grad[..., None]", "E0503", "slicing"),
    ("x = lr \u2212 1", "E0102", "write `-`"),
    ("x = lr \u00b7 1", "E0102", "write `*`"),
    ("x = \u03b2", "E0204", "write `beta`"),
    ("x = g\u00b2", "E0204", "for a power write `g ** 2`, for a name `g2`"),
    ("x = \u03b2\u00b9\u2070", "E0204", "`beta ** 10`"),
    ("x = v\u2081", "E0204", "write `v1`"),
    ("x = m\u0663", "E0204", "write `m3`"),
    ("x = \u0663", "E0102", "`\u0663` (U+0663, arabic-indic digit three)"),
    ("x = lr * \u0663", "E0102", "in ASCII: `3`"),
    ("x = 0.\uff15", "E0102", "in ASCII: `5`"),
    ("x = 1\u0663", "E0102", "in ASCII: `3`"),
    ("x = 1e\u0663", "E0114", "`\u0663` (U+0663, arabic-indic digit three) is not ASCII"),
    ("x = 1e\u0663", "E0114", "write `1e3`"),
    ("x = 1e-\u0663", "E0102", "in ASCII: `3`"),
    ("x = 2\u00b2", "E0114", "write `2 ** 2`"),
    ("x = \u00b2", "E0102", "superscript two"),
    ("x = lr * \u00bd", "E0102", "in ASCII: `(1 / 2)`"),
    ("x = lr * \u2163", "E0102", "roman numeral four"),
    ("x = 2\u03b2", "E0204", "write `beta`"),
    ("x = \u6f22x", "E0204", "not plain ASCII"),
    ("x = r\u00e9sum\u00e9", "E0204", "not plain ASCII"),
    ("x = lr @", "E0101", "an expression is expected"),
    ("x = lr -", "E0101", "to go on from one line to the next"),
    ("x = lr **", "E0101", "to go on from one line to the next"),
    ("x = 1 if lr > 1 and", "E0101", "to go on from one line to the next"),
    ("* lr", "E0101", "to go on from one line to the next"),
    ("** 2", "E0101", "to go on from one line to the next"),
    ("== 2", "E0101", "to go on from one line to the next"),
    ("or lr > 1", "E0101", "to go on from one line to the next"),
    ("- lr * grad", "E0603", "to go on from one line to the next"),
    ("+ lr - grad", "E0603", "to go on from one line to the next"),
    ("lr - grad", "E0603", "assign it"),
]
# The same for a line among the declarations.
DECLARATIONS = [
    ("hyper beta 0.9", "E0101", "write `hyper beta = ...`"),
    ("hyper", "E0112", "a name is expected after `hyper`"),
    ("hyper in = 1", "E0203", "a word of the language"),
    ("state when", "E0203", "call it `when_`"),
    ("let true = 1", "E0203", "a word of the language"),
    ("hyper a = 1 in [0, 1", "E0103", "never closed"),
    ("hyper a = 1 in 0, 1", "E0101", "`(` or `[`"),
    ("hyper a = 1 when lr > 0", "E0112", "takes no `when`"),
    ("flag a in [0, 1]", "E0112", "a flag has no range"),
    ("let a = lr when b", "E0112", "takes no `when`"),
    ("require lr > 0", "E0112", "needs a message"),
    ('require lr > 0 "message"', "E0112", "comma"),
    ('require lr > 0, "a', "E0104", "never closed"),
    ('require lr > 0, "a\\n"', "E0104", "unknown escape"),
    ("require lr > 0, 'a'", "E0111", "double quotes"),
    ("momentum = 0.9 in [0, 1]", "E0101", "`in` gives the range"),
    ("  state m", "E0105", "must not be indented"),
]


def words(text: str) -> tuple[set[str], str]:
    found = diagnose(text)
    return {d.code for d in found}, "\n".join(f"{d.message} {d.help}" for d in found)


@pytest.mark.parametrize(("line", "code", "said"), LINES)
def test_a_line_of_the_body(line: str, code: str, said: str) -> None:
    codes, text = words(rule(line, "weight = weight - lr * grad"))
    assert codes == {code}
    assert said in text


@pytest.mark.parametrize(("line", "code", "said"), DECLARATIONS)
def test_a_declaration(line: str, code: str, said: str) -> None:
    codes, text = words(rule(declare=line))
    assert codes == {code}
    assert said in text


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "E0107", "this file is empty"),
        ("\n\n  \n", "E0107", "this file is empty"),
        ("# only a comment", "E0107", "begins with `optimizer`"),
        ("hyper lr = 1\nupdate:\n  weight = lr", "E0107", "begins with `optimizer`"),
        ("optimizer X", "E0108", "there is no `update:`"),
        ("optimizer X\nupdate:", "E0109", "is empty"),
        ("optimizer X\nupdate:\n# nothing", "E0109", "is empty"),
        ("optimizer X\nupdate\n  weight = grad", "E0106", "write `update:`"),
        ("optimizer X\nupdate: weight = grad", "E0105", "next line"),
        ("optimizer X\nupdate:\nweight = grad", "E0105", "is indented"),
        ("optimizer X\nupdate:\n\tweight = grad", "E0105", "tab"),
        ("optimizer X\nupdate:\n  weight = grad\n    weight = weight", "E0105", "indented by 4"),
        ("optimizer X\nupdate:\n    weight = grad\n  weight = weight", "E0105", "indented by 2"),
        ("optimizer X\nupdate:\n  weight = grad\n    - weight", "E0105", "to go on from one line to the next"),
        ("optimizer X\nupdate:\n  weight = grad\nlr = 3", "E0110", "nothing may follow"),
        ("optimizer X\nupdate:\n  weight = grad\nhyper lr = 3", "E0110", "before `update:`"),
        ("optimizer X\nupdate:\n  weight = grad\nupdate:\n  weight = 2", "E0110", "one `update:`"),
        ("optimizer X\noptimizer Y\nupdate:\n  weight = grad", "E0110", "one `optimizer` line"),
        ("hyper lr = 1\noptimizer X\nupdate:\n  weight = grad", "E0110", "comes first"),
        ("optimizer Adam-W\nupdate:\n  weight = grad", "E0112", "one word"),
        ('optimizer "AdamW"\nupdate:\n  weight = grad', "E0112", "a name is expected"),
        ("optimizer\nupdate:\n  weight = grad", "E0112", "a name is expected"),
    ],
)
def test_the_frame_of_a_file(text: str, code: str, said: str) -> None:
    codes, found = words(text)
    assert codes == {code}
    assert said in found


def test_every_bad_line_is_reported() -> None:
    found = diagnose(rule("a = ^", "b = 2 3", "weight = (", declare="hyper 2 = 3\nflag = true"))
    assert [d.span.line for d in found] == [3, 4, 6, 7, 8]


def test_an_open_bracket_does_not_swallow_the_declarations_below() -> None:
    found = diagnose("optimizer X\nlet a = (1\nhyper lr = 1\nupdate:\n  weight = grad *")
    assert [(d.code, d.span.line) for d in found] == [("E0103", 2), ("E0101", 5)]


def test_the_caret_points_at_the_character() -> None:
    with pytest.raises(DiagnosticError) as caught:
        parse("optimizer X\nupdate:\n  weight = grad $ 2")
    (found,) = caught.value.diagnostics
    assert (found.span.line, found.span.column) == (3, 17)
