"""Syntax errors in words: what the author probably meant, from the token that does not fit and those around it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lark import Token
from lark.exceptions import UnexpectedToken

from forge_dsl.analysis.builtins import REFUSED
from forge_dsl.diagnostics import Diagnostic
from forge_dsl.language.layout import LogicalLine
from forge_dsl.language.source import SourceText
from forge_dsl.language.syntax import Span

CONTINUED = "to go on from one line to the next, enclose the whole value in parentheses"
# Signs of other languages, longest first: the sign, what to write, as a help line.
_FOREIGN = (
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("&", "write `and`"),
    ("|", "write `or`"),
    ("^", "a power is written `x ** 2`"),
    ("!", "write `not x`"),
    ("~", "write `not x`"),
    ("?", "a choice is written `a if c else b`"),
    (";", "put each statement on a line of its own"),
    ("'", 'a message is written in double quotes, "like this"'),
    ("\\", "a line goes on by itself inside brackets; no backslash is needed"),
    ("{", "group with parentheses"),
    ("}", "group with parentheses"),
    ("$", None),
    ("`", None),
)
# Characters that papers and word processors use for signs that have an ASCII spelling.
_TYPOGRAPHIC = {
    **dict.fromkeys("\u2212\u2013\u2014", "-"),
    **dict.fromkeys("\u00d7\u22c5\u00b7\u2217\u2299", "*"),
    **dict.fromkeys("\u2190\u2254", "="),
    **dict.fromkeys("\u201c\u201d\u2018\u2019", '"'),
    **dict.fromkeys("\u00a0\u3000\u2003\u2009", "a blank"),
    "\u00f7": "/",
    "\u2264": "<=",
    "\u2265": ">=",
    "\u2260": "!=",
    "\u221a": "sqrt(...)",
    "\u221e": "inf",
    "\u2227": "and",
    "\u2228": "or",
    "\u00ac": "not",
    "\u2211": "a sum over coordinates, which no element-wise rule can take",
    "\u200b": "nothing: it is invisible",
}
PYTHON_STATEMENTS = {
    *("return", "print", "def", "class", "import", "from", "pass", "break", "continue", "with", "try", "except"),
    *("finally", "assert", "raise", "lambda", "del", "global", "nonlocal", "yield", "async", "await", "match", "case"),
}
_KEYWORDS = {
    *("OPTIMIZER", "HYPER", "FLAG", "STATE", "SCALAR", "LET", "REQUIRE", "UPDATE", "IN", "WHEN", "IF", "ELIF", "ELSE"),
    *("FOR", "WHILE", "AND", "OR", "NOT", "TRUE", "FALSE", "INF"),
}
_BEGINNINGS = {"OPTIMIZER", "HYPER", "FLAG", "STATE", "SCALAR", "LET", "REQUIRE", "UPDATE"}
_ENDS = {"NAME", "NUMBER", "RPAR", "RSQB", "TRUE", "FALSE", "INF"}
_OPERATORS = {"PLUS", "MINUS", "TIMES", "POWER", "COMPARISON", "AND", "OR", "NOT"}
_OPENING = {")": "(", "]": "["}
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SPELLING = {
    "PLUS": "+",
    "MINUS": "-",
    "TIMES": "*",
    "POWER": "**",
    "COMPARISON": "<",
    "ASSIGN": "=",
    "AUGMENTED": "+=",
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "COMMA": ",",
    "COLON": ":",
    "DOT": ".",
    "ELLIPSIS": "...",
}


def unknown_character(source: SourceText, position: int, end: int) -> Diagnostic:
    """The diagnostic for a character that begins no token."""
    text = source.text
    if text[position] == '"':
        line_end = text.find("\n", position)
        span = source.span(position, min(end, line_end) if line_end >= 0 else end)
        return Diagnostic(
            "E0104", "error", "this message is never closed", span, (), 'close it with `"` on the same line'
        )
    for sign, help_ in _FOREIGN:
        if text.startswith(sign, position):
            span = source.span(position, position + len(sign))
            return Diagnostic("E0111", "error", f"`{sign}` is not a sign of this language", span, (), help_)
    ch = text[position]
    span = source.span(position, position + 1)
    meant = _TYPOGRAPHIC.get(ch)
    help_ = None
    if meant is not None:
        help_ = f"it stands for {meant}" if " " in meant else f"write `{meant}`"
    elif (number := _number_in_ascii(ch)) is not None:
        help_ = f"numbers are written in ASCII: `{number}`"
    return Diagnostic("E0102", "error", f"unknown character {_named(ch)}", span, (), help_)


def _named(ch: str) -> str:
    return f"`{ch}` (U+{ord(ch):04X}, {unicodedata.name(ch, 'unnamed character').lower()})"


def _number_in_ascii(ch: str) -> str | None:
    """`3` for a digit of another script, `(1 / 2)` for a fraction that is one character; None for what is neither."""
    digit = unicodedata.digit(ch, None)
    if digit is not None:
        return str(digit)
    above, slash, below = unicodedata.normalize("NFKD", ch).partition("\u2044")
    return f"({above} / {below})" if slash and below else None


def foreign_name(source: SourceText, token: Token, previous: Token | None) -> Diagnostic:
    """The diagnostic for a word outside ASCII, with what to write instead where there is something obvious.

    A word may be a name, or what the lexer takes for one: the rest of a number, as in `1e\u0663` after its `1`, or a
    fraction.
    """
    start, end = token.start_pos or 0, token.end_pos or 0
    power = token.rstrip("".join(filter(_is_superscript, token)))
    exponent = "".join(str(unicodedata.digit(ch)) for ch in token[len(power) :])
    spelled = _in_ascii(power)
    if previous is not None and previous.type == "NUMBER" and previous.end_pos == start:
        whole = f"{previous}{spelled}"
        written = f"{previous} ** {exponent}" if not power else whole if _NUMBER.fullmatch(whole) else None
        if written is not None:
            odd = next(ch for ch in token if not ch.isascii())
            message = f"`{previous}{token}` is not a number: {_named(odd)} is not ASCII"
            return Diagnostic(
                "E0114", "error", message, source.span(previous.start_pos or 0, end), (), f"write `{written}`"
            )
    if unicodedata.category(token[0]).startswith("N"):
        return unknown_character(source, start, end)
    help_ = f"write `{spelled}`" if spelled is not None and spelled.isidentifier() else None
    if help_ is not None and exponent:
        help_ = f"for a power write `{spelled} ** {exponent}`, for a name `{spelled}{exponent}`"
    return Diagnostic("E0204", "error", f"the name `{token}` is not plain ASCII", source.span(start, end), (), help_)


def _is_superscript(ch: str) -> bool:
    return unicodedata.decomposition(ch).startswith("<super>") and ch.isdigit()


def _in_ascii(word: str) -> str | None:
    """The obvious spelling of a word in ASCII; None if there is none."""
    spelled = ""
    for ch in unicodedata.normalize("NFKD", word):
        words = unicodedata.name(ch, "").split()
        if ch.isascii():
            spelled += ch
        elif words[:1] == ["GREEK"] and "LETTER" in words:
            spelled += words[words.index("LETTER") + 1].lower()
        elif ch.isdigit():
            spelled += str(unicodedata.digit(ch))
        elif not unicodedata.category(ch).startswith("M"):
            return None
    return spelled


@dataclass(frozen=True, slots=True)
class _Context:
    """The line around the token that does not fit: `index` is its place among `tokens`, their number at the line's
    end.
    """

    source: SourceText
    line: LogicalLine
    tokens: Sequence[Token]
    index: int
    expected: frozenset[str]

    @property
    def token(self) -> Token | None:
        return self.tokens[self.index] if self.index < len(self.tokens) else None

    @property
    def previous(self) -> Token | None:
        return self.tokens[self.index - 1] if self.index else None

    def before(self, kind: str) -> bool:
        return any(token.type == kind for token in self.tokens[: self.index])

    def span(self, token: Token | None = None) -> Span:
        token = token or self.token
        if token is None:
            return self.source.span(self.line.end, self.line.end)
        return self.source.span(token.start_pos or 0, token.end_pos or 0)

    def error(self, code: str, message: str, help_: str | None = None, span: Span | None = None) -> Diagnostic:
        return Diagnostic(code, "error", message, span or self.span(), (), help_)


def unexpected_token(
    source: SourceText, line: LogicalLine, tokens: Sequence[Token], error: UnexpectedToken
) -> Diagnostic:
    """The diagnostic for a line whose token `error.token` cannot follow what stands before it."""
    index = next((i for i, token in enumerate(tokens) if token is error.token), len(tokens))
    context = _Context(source, line, tokens, index, frozenset(error.expected))
    for explain in _EXPLANATIONS:
        found = explain(context)
        if found is not None:
            return found
    return _generic(context)


def _python_statement(c: _Context) -> Diagnostic | None:
    first = c.tokens[0]
    if str(first) in PYTHON_STATEMENTS and c.index <= 1:
        help_ = "the last assignment to `weight` is the result" if first == "return" else None
        return c.error("E0208", f"`{first}` is Python; an update rule has no such statement", help_, c.span(first))
    if c.previous is not None and str(c.previous) in {"await", "yield"}:
        return c.error("E0208", f"`{c.previous}` is Python; write the value itself", None, c.span(c.previous))
    lambdas = [token for token in c.tokens if token == "lambda"]
    if lambdas:
        return c.error("E0208", "`lambda` is Python; write the expression where it is used", None, c.span(lambdas[0]))
    return None


def _keyword_as_name(c: _Context) -> Diagnostic | None:
    token, first = c.token, c.tokens[0]
    if token is None:
        return None
    if c.index == 1 and token.type == "ASSIGN" and first.type in _KEYWORDS:
        # `flag = true` among the declarations lacks a name; in the body, or with `update`, the word is meant for one.
        taken = (
            first if c.line.indent or first.type in {"UPDATE", "OPTIMIZER"} or first.type not in _BEGINNINGS else None
        )
    elif token.type in _KEYWORDS and "NAME" in c.expected:
        assigned = c.index == 0 and len(c.tokens) > 1 and c.tokens[1].type == "ASSIGN"
        taken = token if "LPAR" not in c.expected or token.type in _BEGINNINGS or assigned else None
    else:
        taken = None
    if taken is None:
        return None
    message = f"`{taken}` is a word of the language and cannot be a name"
    return c.error("E0203", message, f"call it `{taken}_` or `{taken}_value`", c.span(taken))


def _missing_name(c: _Context) -> Diagnostic | None:
    first = c.tokens[0]
    if c.index == 1 and c.expected == {"NAME"}:
        example = {"optimizer": "optimizer AdamW", "hyper": "hyper lr = 1e-3", "let": "let b1, b2 = betas"}.get(
            first, f"{first} x"
        )
        return c.error("E0112", f"a name is expected after `{first}`", f"as in `{example}`")
    if first.type == "OPTIMIZER" and c.index > 1:
        return c.error("E0112", "the name of an optimizer is one word of letters and digits", "as in `optimizer AdamW`")
    return None


def _missing_colon(c: _Context) -> Diagnostic | None:
    first = c.tokens[0]
    if first.type == "UPDATE" and c.index == 1:
        return c.error("E0106", "a colon is expected after `update`", "write `update:`", c.span(first))
    if first.type == "UPDATE" and c.index > 1:
        return c.error("E0105", "the body of `update:` begins on the next line, indented")
    if first.type in {"IF", "ELIF", "ELSE", "FOR", "WHILE"}:
        loop = first.type in {"FOR", "WHILE"}
        help_ = "write the repeated statements out" if loop else "write `x = a if c else b`"
        return c.error("E0601", f"there is no `{first}` statement", help_, c.span(first))
    return None


def _assignment(c: _Context) -> Diagnostic | None:
    token = c.token
    if token is None:
        return None
    if token.type == "COLON" and c.index + 1 < len(c.tokens) and c.tokens[c.index + 1] == "=":
        help_ = "write `=`" if c.index == 1 else "write the assignment on a line of its own"
        return c.error("E0111", "`:=` is not a sign of this language", help_)
    if token.type != "ASSIGN" or c.previous is None or c.previous.type == "ASSIGN":
        return None
    depth = sum({"(": 1, "[": 1, ")": -1, "]": -1}.get(str(t), 0) for t in c.tokens[: c.index])
    conditional = any(t.type in {"IF", "WHEN", "REQUIRE", "AND", "OR", "NOT"} for t in c.tokens[: c.index])
    if conditional or depth > 0:
        return c.error("E0111", "`=` does not compare", "write `==`")
    return c.error("E0113", "an assignment is not a value: one `=` a line", "assign on two lines")


def _string(c: _Context) -> Diagnostic | None:
    if c.token is None or c.token.type != "STRING":
        return None
    previous = c.previous
    for function in reversed(_open_calls(c)):
        if function in REFUSED:  # `einsum("ij,ij->", a, b)`: what matters is not the text
            refusal = REFUSED[function]
            return c.error(refusal.code, f"`{function}` is not element-wise: {refusal.reason}", None, c.span(function))
    if previous is not None and previous.type == "LSQB":
        return c.error(
            "E0115", "states and hypers are plain names here, not entries of a dict", f"write `{c.token[1:-1]}`"
        )
    if c.tokens[0].type == "REQUIRE":
        return c.error("E0112", "a comma is expected before the message", 'write `require condition, "message"`')
    return c.error("E0115", "text is only the message of a `require`")


def _open_calls(c: _Context) -> list[Token]:
    """The names of the functions whose arguments the token is among, outermost first."""
    opened: list[Token] = []
    for before, token in zip([None, *c.tokens], c.tokens[: c.index], strict=False):
        if token.type == "LPAR":
            opened.append(before if before is not None and before.type == "NAME" else token)
        elif token.type == "RPAR" and opened:
            opened.pop()
    return opened


def _number(c: _Context) -> Diagnostic | None:
    token, previous = c.token, c.previous
    if token is None or previous is None or previous.type != "NUMBER" or token.type not in {"NAME", "NUMBER", "DOT"}:
        return None
    together = c.source.span(previous.start_pos or 0, token.end_pos or 0)
    if previous.end_pos == token.start_pos:
        digits = f"{previous}{token}".replace("_", "")
        help_ = f"write `{digits}`" if digits.isdigit() else None
        if previous == "0" and str(token)[:1] in "xXbBoO":
            help_ = "write it in decimal"
        elif token.type == "NAME" and help_ is None and len(token) > 1 and not token.startswith("_"):
            help_ = f"for a product write `{previous} * {token}`"
        return c.error("E0114", f"`{previous}{token}` is not a number", help_, together)
    return c.error("E0101", f"an operator is missing between `{previous}` and `{token}`", None, together)


def _missing_operator(c: _Context) -> Diagnostic | None:
    token, previous = c.token, c.previous
    if token is None or previous is None:
        return None
    if str(token) == "is" or str(previous) == "is":
        return c.error("E0208", "`is` is Python; compare with `==`", None)
    if c.tokens[0].type in {"HYPER", "FLAG", "STATE", "SCALAR", "LET"} and "ASSIGN" in c.expected:
        return c.error("E0101", f"`=` is expected after `{previous}`", f"write `{c.tokens[0]} {previous} = ...`")
    if previous.type in _ENDS and token.type in {"NAME", "NUMBER", "LPAR", "TRUE", "FALSE", "INF"}:
        together = c.source.span(previous.start_pos or 0, token.end_pos or 0)
        help_ = f"for a product write `{previous} * {token}`" if token.type != "LPAR" else "for a product write `*`"
        if len(c.tokens) > 1 and c.index == 1 and previous.type == "NAME":
            help_ = (
                "a statement is `name = expression`; hyper, flag, state, scalar, let and require begin a declaration"
            )
            if previous.upper() in _BEGINNINGS:
                help_ = f"write `{previous.lower()}` in small letters"
        return c.error("E0101", f"an operator is missing between `{previous}` and `{token}`", help_, together)
    return None


def _bracket(c: _Context) -> Diagnostic | None:
    token = c.token
    if token is None or token.type not in {"RPAR", "RSQB", "LSQB"}:
        return None
    if token.type == "LSQB":
        return c.error("E0101", "a list is not a value here", "a tuple of defaults is written `(a, b)`")
    opened: list[Token] = []
    for other in c.tokens[: c.index]:
        if other.type in {"LPAR", "LSQB"}:
            opened.append(other)
        elif other.type in {"RPAR", "RSQB"} and opened:
            opened.pop()
    if not opened:
        return c.error("E0103", f"this `{token}` closes nothing")
    if opened[-1] != _OPENING[str(token)] and "IN" not in {t.type for t in c.tokens[: c.index]}:
        return c.error("E0103", f"this `{token}` does not close `{opened[-1]}`")
    return None


def _no_else(c: _Context) -> Diagnostic | None:
    if "ELSE" in c.expected and c.before("IF"):
        return c.error(
            "E0101", "`a if c` needs an `else`", "write `a if c else b`, or `x = a  when c` for a choice made by flags"
        )
    return None


def _continued(c: _Context) -> Diagnostic | None:
    """A value that was broken into lines: one ends with an operator, or one begins with it."""
    if c.token is None and c.previous is not None and c.previous.type in _OPERATORS:
        return c.error("E0101", "the line ends where an expression is expected", CONTINUED)
    if c.index == 0 and c.token is not None and c.token.type in _OPERATORS:
        return c.error("E0101", f"a statement begins with `{c.token}`", CONTINUED)
    return None


def _membership(c: _Context) -> Diagnostic | None:
    if c.token is not None and c.token.type == "IN" and c.previous is not None and c.previous.type in _ENDS:
        return c.error("E0101", "`in` gives the range of a hyper or a state and nothing else", "compare: `a <= x < b`")
    return None


def _clause(c: _Context) -> Diagnostic | None:
    if c.token is not None and c.token.type == "WHEN" and "WHEN" not in c.expected:
        return c.error("E0112", "`when` stands at the end of a state's declaration or of an assignment")
    if c.token is not None and c.token.type == "ELSE":
        return c.error("E0101", "this `else` has no `if`", "write `a if c else b`")
    return None


_EXPLANATIONS: tuple[Callable[[_Context], Diagnostic | None], ...] = (
    _python_statement,
    _keyword_as_name,
    _missing_name,
    _missing_colon,
    _assignment,
    _string,
    _number,
    _missing_operator,
    _bracket,
    _no_else,
    _continued,
    _membership,
    _clause,
)


def _generic(c: _Context) -> Diagnostic:
    wanted = _wanted(c)
    if c.token is None:
        return c.error("E0101", f"the line ends where {wanted} is expected")
    return c.error("E0101", f"unexpected `{c.token}`; {wanted} is expected here")


def _wanted(c: _Context) -> str:
    if {"NAME", "NUMBER"} <= c.expected:
        return "an expression"
    if c.expected == {"NAME"}:
        return "a name"
    if "$END" in c.expected or "PLUS" in c.expected:
        return "an operator or the end of the line" if "$END" in c.expected else "an operator, `,` or `)`"
    parts = [f"`{_SPELLING.get(name, name.lower())}`" for name in sorted(c.expected)]
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
