"""Reentrant activation checkpoints: forwards that run without grad now and again, with grad, inside backward.

Such a segment records no node that could be counted, so it is found on the Python stack: an `autograd.Function` whose
`forward` is running holds the context that becomes the graph's node. That covers `torch.utils.checkpoint` and the
look-alikes in other frameworks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import FunctionCtx


def _contexts(function: str) -> Iterator[Any]:
    """Contexts of the autograd functions whose `forward` or `backward` is on the stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and code.co_varnames[:1] not in ((), ("self",)):
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                yield context
        frame = frame.f_back  # type: ignore[assignment]


def is_released(node: Any) -> bool:
    """Whether backward has run through this node and freed its buffers, so that it can never run again."""
    try:
        node._raw_saved_tensors  # noqa: B018 - raises once the buffers are freed, and unpacks nothing
    except RuntimeError:
        return True
    return False


class Segments:
    """The segments that used one weight and wait for their backward, each mapped to the outermost that contains it."""

    def __init__(self) -> None:
        self._roots: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def add_running_forward(self) -> None:
        """Record every segment whose forward is on the stack."""
        root = self.root_of_running_backward()
        for context in _contexts("forward"):
            if context not in self._roots:
                self._roots[context] = weakref.ref(context if root is None else root)

    def root_of_running_backward(self) -> Any | None:
        """The outermost recorded segment whose backward is on the stack, or None."""
        for context in _contexts("backward"):
            root = self._roots.get(context)
            if root is not None:
                return root()
        return None

    def outstanding(self) -> set[int]:
        """Identities of the outermost segments that may still run backward."""
        alive = ((node, root()) for node, root in self._roots.items())
        return {id(root) for node, root in alive if root is not None and not is_released(node)}

    def clear(self) -> None:
        """Forget all: the weight has been updated from them."""
        self._roots.clear()


def inside_function_forward() -> bool:
    """Whether an autograd function's `forward` is on the stack while grad is off."""
    return not torch.is_grad_enabled() and next(_contexts("forward"), None) is not None
