"""Whether an optimizer's `param_groups` are those whose hyper-parameters its weights read.

A weight reads them from the group that it was added with. A group in another's place, or a parameter in another group,
would be ignored while `state_dict` shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any, TypeAlias

from torch import Tensor

# A group and the parameters that it was added with.
Added: TypeAlias = tuple[dict[str, Any], list[Tensor]]


def check(groups: Sequence[dict[str, Any]], added: Sequence[Added], known: Collection[int]) -> None:
    """Raise RuntimeError unless `groups` are those that were `added`, with the same parameters in each.

    known: ids of all parameters that the optimizer has.
    """
    if len(groups) == len(added) and all(map(_is_as_added, groups, added)):
        return
    for index, group in enumerate(groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise RuntimeError(
                    f"parameter {name(group, index, number)} was put into param_groups by hand: use add_param_group"
                )
    raise RuntimeError(
        "param_groups were replaced, or parameters moved between or taken out of them, by hand: set values inside the "
        "groups that are there (group['lr'] = 0.1), add groups with add_param_group, and make a new optimizer for "
        "another division"
    )


def _is_as_added(group: dict[str, Any], added: Added) -> bool:
    first, parameters = added
    now = group["params"]
    return group is first and len(now) == len(parameters) and all(map(is_, now, parameters))


def name(group: dict[str, Any], index: int, number: int) -> str:
    """The name that torch keeps for named parameters, else the place in `param_groups`."""
    names = group.get("param_names")
    return str(names[number]) if names else f'param_groups[{index}]["params"][{number}]'
