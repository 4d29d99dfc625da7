"""The documentation page of one optimizer: its mathematics, arguments, states, per-step scalars and source."""

from __future__ import annotations

import re

from forge_dsl.compile import Compiled
from forge_dsl.emit.host import default_text
from forge_dsl.emit.latex import equation, latex, symbol
from forge_dsl.emit.module import environment, heading
from forge_dsl.facts import harmless, title
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr


def render_page(compiled: Compiled, package: str = "generated") -> str:
    """Markdown with LaTeX between `$$`. package: what the modules are in, empty if in none."""
    spec, checked = compiled.spec, compiled.checked
    scalars = []
    for statement in checked.scalar_program:
        names = statement.names if isinstance(statement, syntax.Let) else (statement.name,)
        scalars.append((", ".join(map(symbol, names)), latex(statement.value).text))
    states = []
    for state, facts in zip(checked.states, spec.states, strict=True):
        initial = "0" if state.initial is None else format_expr(state.initial)
        states.append((state.name, initial, str(state.domain or "any"), facts.when or "always"))
    source = checked.source.strip("\n")
    head = heading(compiled)
    context = head | {
        "module": package or compiled.spec.stem,
        "title": prose(title(compiled.checked)),
        # Two hyphens would end the comment that names the file.
        "source_name": re.sub("-{2,}", "-", head["source_name"]),
        "equations": [equation(assign.name, assign.value, assign.when) for assign in checked.update],
        "scalars": scalars,
        "hypers": [
            (h.name, default_text(h.default), " and ".join(sorted({str(r) for r in h.ranges if r})) or "any")
            for h in spec.hypers
        ],
        "flags": [(flag.name, str(flag.default)) for flag in spec.flags],
        "states": states,
        "recurrent": [(scalar.name, f"{scalar.initial:g}") for scalar in spec.scalars],
        "table": [(slot.name, format_expr(slot.expr)) for slot in compiled.table],
        "spec_text": source,
        "fence": "`" * max(3, 1 + max((len(run) for run in re.findall("`+", source)), default=0)),
        "requires": [(format_expr(r.condition), prose(r.message)) for r in checked.requires],
    }
    return environment().get_template("page.md.j2").render(context)


def prose(text: str) -> str:
    """Text of a spec inside a sentence: nothing in it is markup, HTML or a formula."""
    return re.sub(r"[<`\[{$|]|&(?=[#\w])", lambda found: f"&#{ord(found[0])};", harmless(text))
