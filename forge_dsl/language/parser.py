"""`.opt` text to a syntax tree.

The text is cut into logical lines (layout.py); each is lexed and parsed by itself with Lark's LALR parser
(grammar.lark) and becomes a node (builder.py); this module puts the nodes into their places. So one bad line costs
one message, and the lines after it are still read.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from itertools import islice

from lark import Lark, TextSlice, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.language import layout, syntax, syntax_errors
from forge_dsl.language.assemble import ParsedLine, assemble
from forge_dsl.language.builder import Builder, Refused
from forge_dsl.language.source import (
    MAX_ERRORS,
    MAX_LITERAL,
    MAX_MESSAGE,
    MAX_NAME,
    MAX_NODES,
    MAX_STATEMENTS,
    MAX_TOKENS,
    SourceText,
    check_text,
    normalise,
)

_LIMITS = {"NAME": MAX_NAME, "NUMBER": MAX_LITERAL, "STRING": MAX_MESSAGE}


def parse(text: str, filename: str = "<string>") -> syntax.Spec:
    """The syntax tree of a spec. Raises DiagnosticError with everything that is wrong with its form.

    Bounded: the text in bytes, statements, nodes and depth (see source.py), so that nothing written in a file can
    exhaust the stack or the time of a later stage.
    """
    source = SourceText(normalise(text), filename)
    check_text(source)
    cut = layout.split(source)
    problems = list(cut.problems)
    if len(cut.lines) > MAX_STATEMENTS:
        line = cut.lines[MAX_STATEMENTS]
        message = f"this spec has {len(cut.lines)} statements; at most {MAX_STATEMENTS} are read"
        problems.append(Diagnostic("E0003", "error", message, source.span(line.start, line.end)))
        raise DiagnosticError(problems, source.text, filename)
    builder = Builder(source)
    parsed = []
    room = MAX_TOKENS
    for line in cut.lines:
        node, count = _parse_line(source, builder, line, room, problems)
        parsed.append(ParsedLine(line, node))
        room -= count
        if room <= 0:
            raise DiagnosticError([*problems, _too_many_tokens(source, line)][:MAX_ERRORS], source.text, filename)
    tree, misplaced = assemble(source, parsed, cut)
    problems += misplaced
    if not problems:
        problems += _too_many_nodes(tree)
    if problems:
        raise DiagnosticError(problems[:MAX_ERRORS], source.text, filename)
    return tree


def _parse_line(
    source: SourceText, builder: Builder, line: layout.LogicalLine, room: int, problems: list[Diagnostic]
) -> tuple[syntax.Node | None, int]:
    """The node of one logical line, or None with a diagnostic added, and how many of the `room` tokens left it took."""
    if not line.complete:
        return None, 0
    state = _parser().parse_interactive(TextSlice(source.text, line.start, line.end), start="line")
    tokens: list[Token] = []
    unexpected = None
    try:
        try:
            for token in state.iter_parse():
                tokens.append(token)
                if len(tokens) > room:
                    return None, len(tokens)
        except UnexpectedToken as error:
            unexpected = error
            tokens.extend(islice(state.lexer_thread.lex(state.parser_state), room))  # type: ignore[no-untyped-call]
    except UnexpectedCharacters as error:
        position = error.pos_in_stream or 0
        # A digit of another script is the reason why `1e-` before it did not fit.
        if unexpected is None or source.text[position].isdecimal():
            problems.append(syntax_errors.unknown_character(source, position, line.end))
            return None, len(tokens)
    unfit = _unfit_tokens(source, tokens)
    if unfit:
        problems.extend(unfit)
        return None, len(tokens)
    try:
        if unexpected is not None:
            raise unexpected
        return builder.build(state.feed_eof(tokens[-1])), len(tokens)  # type: ignore[no-untyped-call]
    except UnexpectedToken as error:
        problems.append(syntax_errors.unexpected_token(source, line, tokens, error))
    except Refused as refused:
        problems.append(refused.diagnostic)
    return None, len(tokens)


def _unfit_tokens(source: SourceText, tokens: list[Token]) -> list[Diagnostic]:
    """Tokens that are too long, and names and numbers outside ASCII."""
    problems = []
    for previous, token in zip([None, *tokens], tokens, strict=False):
        span = source.span(token.start_pos or 0, token.end_pos or 0)
        limit = _LIMITS.get(token.type)
        if limit is not None and len(token) > limit:
            what = {"NAME": "name", "STRING": "message"}.get(token.type, "number")
            message = f"this {what} has {len(token)} characters; at most {limit} are read"
            problems.append(Diagnostic("E0006", "error", message, span, help="shorten it"))
        elif token.type == "NAME" and not token.isascii():
            problems.append(syntax_errors.foreign_name(source, token, previous))
    return problems


def _too_many_tokens(source: SourceText, line: layout.LogicalLine) -> Diagnostic:
    message = f"this spec has more than {MAX_TOKENS:,} words and signs"
    return Diagnostic("E0003", "error", message, source.span(line.start, line.end))


def _too_many_nodes(tree: syntax.Spec) -> list[Diagnostic]:
    for count, node in enumerate(syntax.walk(tree)):
        if count > MAX_NODES:
            message = f"this spec has more than {MAX_NODES:,} numbers, names and operations"
            return [Diagnostic("E0003", "error", message, node.span)]
    return []


@cache
def _parser() -> Lark:
    grammar = resources.files("forge_dsl.language").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, start="line", parser="lalr", lexer="basic")
