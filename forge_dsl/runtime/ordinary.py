"""The gradients that `step()` applies: those that autograd has stored, of parameters that backward has not updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forge_dsl.runtime.binding import Binding
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.placeholder import GradientPlaceholder


def gradients(bindings: Iterable[Binding]) -> tuple[list[tuple[Binding, Tensor]], list[Binding]]:
    """Each parameter that `step` must update, with its gradient, and those whose update's mark somebody has cleared.

    Raises RuntimeError, before anything changes, for a gradient that cannot be applied.
    """
    found, cleared = [], []
    for binding in bindings:
        grad, updated = binding.held.grad, binding.updated
        if not binding.owns and (updated or grad is not None) and len(binding.shape) == 2:
            binding.check_owner()
        if updated and type(grad) is GradientPlaceholder:
            continue  # updated inside backward
        if updated and grad is None:
            cleared.append(binding)
        if grad is not None and _applies(binding, grad):
            found.append((binding, grad.detach().resolve_neg()))
    return found, cleared


def were_cleared(cleared: Sequence[Binding]) -> RuntimeError:
    """What to raise where gradients were cleared before `step()`."""
    return RuntimeError(
        "the gradients were cleared between backward and step() (by model.zero_grad()?), and backward had "
        f"already updated {cleared[0].describe()}{' and others' if cleared[1:] else ''}; other parameters have "
        "lost their gradients. Clear them after step(). To go on all the same, call step() again: it counts "
        "the updates that were made"
    )


def _applies(binding: Binding, grad: Tensor) -> bool:
    """Whether `step` must apply this gradient; raises if nothing can be right."""
    if isinstance(grad, GradientPlaceholder):
        if not binding.updated:
            if (optimizer := binding.optimizer) is not None and optimizer.loaded_amid_step:
                raise RuntimeError(
                    f"load_state_dict() came between backward and step(): backward had already updated "
                    f"{binding.describe()}, its gradient is gone, and the checkpoint has replaced the states and "
                    "counts of that update, so step() has nothing to count. Call optimizer.zero_grad(), load the "
                    "model's checkpoint too if that update is not wanted in the weights, and go on with the next "
                    "forward; or load before backward, or after step()"
                )
            raise RuntimeError(
                f"step() was called again without a new backward for {binding.describe()}, whose gradient was applied "
                "by an earlier one and not stored: call zero_grad() after each step()"
            )
        return False
    if binding.updated:
        raise RuntimeError(
            f"{binding.describe()} was updated inside backward and also has an ordinary gradient: use the fused linear "
            "function for every use of it in a step, or for none"
        )
    if grad.layout != torch.strided:
        raise RuntimeError(f"{binding.describe()}: sparse gradients are not supported (layout {grad.layout})")
    if not grad.is_floating_point() or grad.shape != binding.shape or grad.device != binding.device:
        raise RuntimeError(
            f"{binding.describe()}: its gradient has shape {list(grad.shape)}, {grad.dtype} on {grad.device}; expected "
            f"shape {list(binding.shape)}, floating point on {binding.device}. If the parameter was resized or moved, "
            "build its optimizer again"
        )
    if binding.dtype == CODES and bool(grad.float().any()):
        # Zeros are zeros under any scales: what torch.distributed.checkpoint's helpers make states from.
        raise RuntimeError(
            f"{binding.describe()} is kept in codes and has an ordinary gradient, in codes without scales: only the "
            "fused linear function can update it. Clear the gradient with optimizer.zero_grad(), and use the layer "
            "itself, or optimizer.update_linear"
        )
    binding.check_unmoved(binding.weight)
    return True
