"""Puts the parsed lines of a file into a `Spec`: what may stand where, and how the body is indented."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forge_dsl.diagnostics import Diagnostic
from forge_dsl.language import syntax
from forge_dsl.language.builder import OptimizerLine, UpdateLine
from forge_dsl.language.layout import Layout, LogicalLine
from forge_dsl.language.source import MAX_DEPTH, SourceText
from forge_dsl.language.syntax import NOWHERE, Span
from forge_dsl.language.syntax_errors import CONTINUED

DECLARATIONS = (syntax.Hyper, syntax.Flag, syntax.State, syntax.Scalar, syntax.Let, syntax.Require)
# The first word of a line, unless it is being assigned.
_WORD = re.compile(r"(\w+)\b(?![ \t]*=)")
EXAMPLE = "update:\n  weight = weight - lr * grad"


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A logical line and its node; None where the line is reported already."""

    line: LogicalLine
    node: syntax.Node | None


@dataclass(slots=True)
class _Frame:
    """An indented body under construction. `indent` is unknown until its first line."""

    indent: int | None
    items: list[syntax.Statement] = field(default_factory=list)
    header: syntax.Block | None = None


class _Assembler:
    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.problems: list[Diagnostic] = []
        self.header: tuple[ParsedLine, OptimizerLine | None] | None = None
        self.update: ParsedLine | None = None
        self.declarations: list[syntax.Statement] = []
        self.frames = [_Frame(0)]
        self.body_lines = 0
        self.misindented = False

    def report(self, code: str, message: str, span: Span, help_: str | None = None) -> None:
        self.problems.append(Diagnostic(code, "error", message, span, (), help_))

    def word(self, parsed: ParsedLine) -> str:
        match = _WORD.match(self.source.text, parsed.line.start)
        return match.group(1) if match else ""

    def add(self, parsed: ParsedLine) -> None:
        word = self.word(parsed)
        if isinstance(parsed.node, OptimizerLine) or (parsed.node is None and word == "optimizer"):
            self.add_optimizer(parsed)
        elif isinstance(parsed.node, UpdateLine) or (parsed.node is None and word == "update"):
            self.add_update(parsed)
        else:
            self.add_statement(parsed)

    def add_optimizer(self, parsed: ParsedLine) -> None:
        span = self.span(parsed)
        if self.header is not None:
            self.report("E0110", "a spec has one `optimizer` line", span, "write each optimizer in a file of its own")
            return
        if self.frames[0].items or self.update is not None:
            self.report("E0110", "`optimizer` comes first", span)
        node = parsed.node if isinstance(parsed.node, OptimizerLine) else None
        self.check_top(parsed)
        self.header = (parsed, node)

    def add_update(self, parsed: ParsedLine) -> None:
        if self.update is not None:
            self.report(
                "E0110", "a spec has one `update:`", self.span(parsed), "put all statements under the first one"
            )
            return
        self.check_top(parsed)
        self.close_frames(-1)
        self.declarations = self.frames[0].items
        self.frames = [_Frame(None)]
        self.misindented = False
        self.update = parsed
        # What stands on the same line is reported already.
        self.body_lines = int(parsed.node is None)

    def check_top(self, parsed: ParsedLine) -> None:
        # A tab is reported already.
        if (
            parsed.line.indent
            and "\t" not in self.source.text[parsed.line.start - parsed.line.indent : parsed.line.start]
        ):
            self.report("E0105", "this line must not be indented", self.indentation(parsed))

    def add_statement(self, parsed: ParsedLine) -> None:
        node = parsed.node
        if self.update is not None:
            self.body_lines += 1
            if isinstance(node, DECLARATIONS):
                what = type(node).__name__.lower()
                help_ = "inside `update:` a local needs no declaration: write `x = ...`" if what == "let" else None
                self.report("E0110", f"`{what}` comes before `update:`", self.span(parsed), help_)
                return
        frame = self.frame_for(parsed)
        if node is None or frame is None:
            return
        assert isinstance(node, syntax.Statement)
        node = replace(node, leading=parsed.line.leading, trailing=parsed.line.trailing)
        if isinstance(node, syntax.Block):
            if len(self.frames) >= MAX_DEPTH:
                self.report("E0004", f"blocks are nested more than {MAX_DEPTH} deep", node.span)
                return
            self.frames.append(_Frame(None, header=node))
        else:
            frame.items.append(node)

    def frame_for(self, parsed: ParsedLine) -> _Frame | None:
        """The body that this line belongs to, by its indentation; reports one that fits no body."""
        indent = parsed.line.indent
        if len(self.frames) == 1 and self.update is not None and indent == 0:
            if not self.misindented and not self.frames[0].items:
                self.report(
                    "E0105", "the body of `update:` is indented", self.indentation(parsed), "indent it by two spaces"
                )
            elif not self.misindented:
                self.report(
                    "E0110",
                    "nothing may follow the body of `update:`",
                    self.span(parsed),
                    "indent this line like the body",
                )
            self.misindented = True
            return self.frames[0]
        while True:
            frame = self.frames[-1]
            outer = self.frames[-2].indent or 0 if len(self.frames) > 1 else -1
            if frame.indent is None and indent > max(outer, 0):
                frame.indent = indent
            if frame.indent is not None and indent >= frame.indent:
                break
            if len(self.frames) == 1:
                break
            self.close_last()
        if indent != frame.indent and not self.misindented:
            known = "no indentation" if not frame.indent else f"{frame.indent} blanks"
            message = f"this line is indented by {indent}, the lines it belongs to by {known}"
            help_ = CONTINUED if self.source.text[parsed.line.start] in "+-*/%<>=" else None
            self.report(
                "E0105", message if frame.indent else "this line must not be indented", self.indentation(parsed), help_
            )
            self.misindented = self.update is not None
        return frame

    def close_last(self) -> None:
        frame = self.frames.pop()
        assert frame.header is not None
        self.frames[-1].items.append(replace(frame.header, body=tuple(frame.items)))

    def close_frames(self, indent: int) -> None:
        while len(self.frames) > 1 and indent < 0:
            self.close_last()

    def span(self, parsed: ParsedLine) -> Span:
        return self.source.span(parsed.line.start, parsed.line.end)

    def indentation(self, parsed: ParsedLine) -> Span:
        span = self.span(parsed)
        return self.source.span(span.start - span.column + 1, max(span.start, span.start - span.column + 2))

    def finish(self, cut: Layout) -> syntax.Spec:
        end = self.source.span(len(self.source.text), len(self.source.text))
        self.close_frames(-1)
        if self.header is None:
            span = self.first_line()
            message = "this file is empty" if span is NOWHERE else "a spec begins with `optimizer` and a name"
            self.report("E0107", message, span, "write, for instance, `optimizer MyRule`")
        if self.update is None:
            self.declarations = self.frames[0].items
            if self.header is not None:
                self.report("E0108", "there is no `update:`", end, f"end the spec with the rule itself:\n{EXAMPLE}")
        elif not self.body_lines:
            self.report(
                "E0109", "`update:` is empty", self.span(self.update), f"say how the weight changes:\n{EXAMPLE}"
            )
        body = self.frames[0].items if self.update is not None else []
        header, node = self.header or (None, None)
        return syntax.Spec(
            node.name if node else "",
            tuple(self.declarations),
            tuple(body),
            node.name_span if node else NOWHERE,
            header.line.leading if header else (),
            header.line.trailing if header else None,
            self.update.line.leading if self.update else (),
            self.update.line.trailing if self.update else None,
            cut.closing,
            cut.footer,
            span=self.source.span(0, len(self.source.text)),
        )

    def first_line(self) -> Span:
        stripped = self.source.text.lstrip()
        if not stripped:
            return NOWHERE
        start = len(self.source.text) - len(stripped)
        newline = self.source.text.find("\n", start)
        return self.source.span(start, len(self.source.text) if newline < 0 else newline)


def assemble(source: SourceText, lines: Sequence[ParsedLine], cut: Layout) -> tuple[syntax.Spec, list[Diagnostic]]:
    """The spec that the lines make up, and what is wrong with their order and indentation."""
    assembler = _Assembler(source)
    for parsed in lines:
        assembler.add(parsed)
    return assembler.finish(cut), assembler.problems
