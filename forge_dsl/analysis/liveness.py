"""Liveness: warnings about states that the weight is computed without, in this step and in every later one, about those
whose value never lasts until the next step, and where the weight is computed without the gradient.

The body is followed backwards, in all variants at once (see switches.py). What the last value of the weight reads is
needed, through locals and the conditions of choices; so is what the stored values of needed states read; and so on
until nothing is added. Between two steps a group may cross a switch, so a state that one variant needs is needed
after a step of any variant. What is still wanted above the first statement comes from the step before. A state that
starts from the weight is an average or a copy of it: it is kept for those who read it from outside, and counts as
needed.
"""

from __future__ import annotations

from forge_dsl.analysis.checked import Checked, CheckedState
from forge_dsl.analysis.definedness import reads
from forge_dsl.analysis.report import Report
from forge_dsl.analysis.switches import Switches
from forge_dsl.language import syntax


def check(checked: Checked, switches: Switches, report: Report) -> None:
    """Warns about states of a spec without errors that never reach the weight, or only in the step that sets them."""
    copies = {state.name for state in checked.states if _copies_weight(state)}
    needed = {"weight", *copies}
    states = {state.name for state in checked.states}
    while not (found := _read_for(needed, checked, switches)[0] & states) <= needed:
        needed |= found
    used, carried = _read_for(needed, checked, switches)
    lasting = copies | carried | set(checked.first)
    if "grad" not in used:
        note = "whatever the loss is, each step does the same"
        help_ = "read `grad` on the way to `weight`"
        report.warning("W0708", "the weight is computed without `grad`", checked.tree.name_span, note, help=help_)
    for node in checked.tree.declarations:
        if isinstance(node, syntax.State) and node.name not in needed:
            message = f"the state `{node.name}` never reaches the weight"
            note = "each step reads and writes its buffer, and the weight is computed without it"
            help_ = "read it where `weight` is assigned, or remove it; an average of the weight starts from `weight`"
            report.warning("W0706", message, node.name_span, note, help=help_)
        elif isinstance(node, syntax.State) and node.name not in lasting:
            message = f"the state `{node.name}` is assigned before it is read, in every step"
            note = "what is stored in its buffer is never used again"
            help_ = f"without `state {node.name}` the name is a local; or read the step before's value first"
            report.warning("W0707", message, node.name_span, note, help=help_)


def _copies_weight(state: CheckedState) -> bool:
    """Whether the weight is what the state starts from."""
    return state.initial is not None and any(
        isinstance(node, syntax.Name) and node.id == "weight" for node in syntax.walk(state.initial)
    )


def _read_for(stored: set[str], checked: Checked, switches: Switches) -> tuple[set[str], set[str]]:
    """Every name that is read on the way to the last values of `stored`, and those whose value from before is."""
    wanted = dict.fromkeys(stored, switches.everywhere)
    for state in checked.states:
        where = switches.where(state.when)
        if where is not None and state.name in stored:
            wanted[state.name] = where
    found: set[str] = set()
    for node in reversed(checked.update):
        where = switches.where(node.when)
        variants = switches.everywhere if where is None else where
        here = wanted.get(node.name, 0) & variants
        wanted[node.name] = wanted.get(node.name, 0) & ~variants
        if here:
            for name, read_in in reads(node.value, here, switches):
                found.add(name.id)
                wanted[name.id] = wanted.get(name.id, 0) | read_in
    return found, {name for name, variants in wanted.items() if variants}
