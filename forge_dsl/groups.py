"""Param groups as they are usually made: weight decay for matrices, none for biases, norms and what else is named."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(
    model: nn.Module, weight_decay: float, *, exclude: Iterable[str | type[nn.Module]] = ()
) -> list[dict[str, Any]]:
    """Two param groups over the model's trainable parameters: with `weight_decay`, and with 0.

    Parameters of fewer than two dimensions (biases, norms) do not decay. `exclude` adds to them: patterns of parameter
    names (`"*.embed.*"`) and classes of modules (`torch.nn.Embedding`). A parameter that two modules share is taken
    once, and does not decay if either of its uses is excluded. An empty group is left out.

    Raises ValueError for a pattern that fits no parameter: a misspelt one would let it decay; TypeError for arguments
    of other types.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not hasattr(weight_decay, "__float__"):
        raise TypeError(f"Invalid weight_decay value: {weight_decay!r} (expected a number)")
    excluded = [exclude] if isinstance(exclude, str | type) else list(exclude)
    for item in excluded:
        if not isinstance(item, str | type):
            raise TypeError(f"exclude: {item!r} is neither a pattern of names nor a class of modules")
    patterns = [item for item in excluded if isinstance(item, str)]
    classes = tuple(item for item in excluded if not isinstance(item, str))
    trainable = {p: True for p in model.parameters() if p.requires_grad}
    unused = set(patterns)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False, remove_duplicate=False):
            fitting = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
            unused.difference_update(fitting)
            if parameter in trainable and (fitting or isinstance(module, classes) or parameter.dim() < 2):
                trainable[parameter] = False
    if unused:
        raise ValueError(f"exclude: no parameter of the model fits {', '.join(map(repr, sorted(unused)))}")
    groups = [
        {"params": [p for p, decays in trainable.items() if decays], "weight_decay": weight_decay},
        {"params": [p for p, decays in trainable.items() if not decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
