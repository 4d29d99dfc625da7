"""`Spec`, the facts of a compiled optimizer, from its checked tree."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.spec import FlagSpec, HyperSpec, ScalarSpec, Spec, StateSpec, SwitchSpec

if TYPE_CHECKING:
    from forge_dsl.compile import Compiled


def facts(compiled: Compiled) -> Spec:
    """Names in the source's order throughout."""
    checked = compiled.checked
    hypers = {hyper.name for hyper in checked.hypers}
    return Spec(
        name=checked.tree.name,
        stem=compiled.stem,
        title=title(compiled),
        source=source_name(compiled),
        sha256=compiled.digest,
        hypers=tuple(HyperSpec(name=h.name, default=h.default, ranges=h.ranges) for h in checked.hypers),
        flags=tuple(FlagSpec(name=name, default=default) for name, default in checked.flags),
        states=tuple(
            StateSpec(
                name=state.name,
                begins="construction" if _begins_at_construction(state.initial, hypers) else "update",
                zero=state.initial is None or state.initial == syntax.Number(0.0),
                domain=state.domain,
                when=None if state.when is None else format_expr(state.when),
            )
            for state in checked.states
        ),
        scalars=tuple(ScalarSpec(name=name, initial=initial) for name, initial in checked.scalars),
        switches=tuple(
            SwitchSpec(name=name, text=format_expr(atom), is_flag=isinstance(atom, syntax.Name))
            for atom, name in compiled.layout.switches.items()
        ),
        first=checked.first,
        uses_step=keeps_step(compiled),
        table=tuple(slot.name for slot in compiled.table),
    )


def keeps_step(compiled: Compiled) -> bool:
    """A weight's updates are counted if the rule reads `step` or has a state in every variant.

    The second is torch's convention: its optimizers keep `step` beside their moments. Only SGD, whose buffer exists for
    some arguments only, does not.
    """
    return compiled.checked.uses_step or any(state.when is None for state in compiled.checked.states)


def title(compiled: Compiled) -> str:
    """The first comment of the spec, made harmless for a docstring; the optimizer's name if there is none."""
    for line in compiled.checked.tree.leading:
        if line and line.strip():
            return harmless(line.strip())
    return compiled.checked.tree.name


def source_name(compiled: Compiled) -> str:
    """The file's name, without its folder."""
    return harmless(re.split(r"[/\\]", compiled.checked.filename)[-1])


def harmless(text: str) -> str:
    """Text of a spec for a comment or docstring: printable characters only, no backslash, no triple quote."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown.replace("\\", "/").replace('"""', "'''").replace('""', "''")


def _begins_at_construction(initial: syntax.Expr | None, hypers: set[str]) -> bool:
    if initial is None:
        return False
    names = {node.id for node in syntax.walk(initial) if isinstance(node, syntax.Name)}
    return bool(names & hypers) and "weight" not in names
