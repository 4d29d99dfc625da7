"""Laying out Python source as a formatter would: imports, signatures, calls, tuples; on one line or one item a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 120


def import_lines(module: str, names: Iterable[str]) -> list[str]:
    """`from module import a, b`, sorted; empty if there is nothing to import."""
    ordered = sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    return bracketed(f"from {module} import ", ordered, "", brackets="()", optional=True) if ordered else []


def bracketed(
    head: str, items: Sequence[str], tail: str, indent: int = 0, brackets: str = "()", optional: bool = False
) -> list[str]:
    """`head(a, b)tail`, broken to one item a line with a trailing comma where it does not fit."""
    pad = " " * indent
    left, right = brackets[0], brackets[1]
    single = ", ".join(items)
    if brackets == "()" and len(items) == 1 and head.endswith(("= ", "return ")):
        single += ","
    one_line = f"{head}{single}{tail}" if optional else f"{head}{left}{single}{right}{tail}"
    if len(pad) + len(one_line) <= WIDTH and not any("\n" in item or "#" in item for item in items):
        return [pad + one_line]
    return [f"{pad}{head}{left}", *(f"{pad}    {item}," for item in items), f"{pad}{right}{tail}"]


def block(lines: Iterable[str]) -> str:
    """Lines as one template value."""
    return "\n".join(lines)
