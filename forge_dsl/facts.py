"""`Spec`, the facts of a compiled optimizer, from its checked tree."""

from __future__ import annotations

import re

from forge_dsl.analysis.checked import Checked
from forge_dsl.ir.program import Slot
from forge_dsl.ir.table import Layout
from forge_dsl.language import syntax
from forge_dsl.language.format import format_expr
from forge_dsl.spec import FlagSpec, HyperSpec, ScalarSpec, Spec, StateSpec, SwitchSpec


def facts(
    checked: Checked, layout: Layout, table: tuple[Slot, ...], stem: str, digest: str, precise: frozenset[str]
) -> Spec:
    """Names in the source's order throughout. stem: what the module is called; digest: what it was made from.

    precise: states that must be kept precisely (`ir.cancellation`).
    """
    hypers = {hyper.name for hyper in checked.hypers}
    return Spec(
        name=checked.tree.name,
        stem=stem,
        title=title(checked),
        source=source_name(checked),
        sha256=digest,
        hypers=tuple(HyperSpec(name=h.name, default=h.default, ranges=h.ranges) for h in checked.hypers),
        flags=tuple(FlagSpec(name=name, default=default) for name, default in checked.flags),
        states=tuple(
            StateSpec(
                name=state.name,
                begins="construction" if _begins_at_construction(state.initial, hypers) else "update",
                zero=state.initial is None or state.initial == syntax.Number(0.0),
                domain=state.domain,
                when=None if state.when is None else format_expr(state.when),
                precise=state.name in precise,
            )
            for state in checked.states
        ),
        scalars=tuple(ScalarSpec(name=name, initial=initial) for name, initial in checked.scalars),
        switches=tuple(
            SwitchSpec(name=name, text=format_expr(atom), is_flag=isinstance(atom, syntax.Name))
            for atom, name in layout.switches.items()
        ),
        first=checked.first,
        uses_step=keeps_step(checked),
        reads_step=checked.uses_step,
        table=tuple(slot.name for slot in table),
    )


def keeps_step(checked: Checked) -> bool:
    """A weight's updates are counted if the rule reads `step` or has a state in every variant.

    The second is torch's convention: its optimizers keep `step` beside their moments. Only SGD, whose buffer exists for
    some arguments only, does not.
    """
    return checked.uses_step or any(state.when is None for state in checked.states)


def title(checked: Checked) -> str:
    """The first comment of the spec, made harmless for a docstring; the optimizer's name if there is none."""
    for line in checked.tree.leading:
        if line and line.strip():
            return harmless(line.strip())
    return checked.tree.name


def source_name(checked: Checked) -> str:
    """The file's name, without its folder."""
    return harmless(re.split(r"[/\\]", checked.filename)[-1])


def harmless(text: str) -> str:
    """Text of a spec for a comment or docstring: printable characters only, no backslash, no triple quote."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown.replace("\\", "/").replace('"""', "'''").replace('""', "''")


def _begins_at_construction(initial: syntax.Expr | None, hypers: set[str]) -> bool:
    if initial is None:
        return False
    names = {node.id for node in syntax.walk(initial) if isinstance(node, syntax.Name)}
    return bool(names & hypers) and "weight" not in names
