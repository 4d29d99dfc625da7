"""Settings of training frameworks that an update inside backward cannot honour, found before anything changes.

A framework clips, scales or accumulates gradients around a step. The runtime asks here when it can still raise with
nothing changed: in the first forward for the settings of a running loop, in each backward for accumulation.
No framework is imported: one that runs is already among `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

CLIP = "gradients are clipped after backward, which has used them by then"
ACCUMULATE = "gradients are used inside backward and cannot be accumulated"
SCALE = "a gradient scaler would have to unscale gradients after backward"


def trainer_problems(trainer: Any) -> list[str]:
    """What is wrong in the arguments of a Hugging Face Trainer, each with the way out."""
    arguments = trainer.args
    problems = []
    clip, steps = arguments.max_grad_norm, arguments.gradient_accumulation_steps
    if clip is not None and clip > 0:
        problems.append(f"max_grad_norm={clip}: {CLIP}; set max_grad_norm=0")
    if steps > 1:
        problems.append(
            f"gradient_accumulation_steps={steps}: {ACCUMULATE}; set it to 1 and use a larger "
            "per_device_train_batch_size (with gradient_checkpointing=True where memory is short)"
        )
    if arguments.fp16:
        problems.append(f"fp16=True: {SCALE}; set bf16=True")
    if arguments.n_gpu > 1:
        problems.append(
            f"n_gpu={arguments.n_gpu}: the Trainer wraps the model in DataParallel; show it one GPU "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    return problems


def lightning_problems(trainer: Any) -> list[str]:
    """What is wrong in the arguments of a Lightning Trainer, each with the way out."""
    problems = []
    clip, steps = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    if clip is not None and clip > 0:
        problems.append(f"gradient_clip_val={clip}: {CLIP}; set gradient_clip_val=None")
    if steps > 1:
        problems.append(f"accumulate_grad_batches={steps}: {ACCUMULATE}; set it to 1 and use larger batches")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        problems.append(f'precision={trainer.precision!r}: {SCALE}; set precision="bf16-mixed" or "bf16-true"')
    return problems


def norm_is_logged(trainer: Any) -> bool:
    """Whether this Trainer asks for the norm of the gradients even where it does not clip, as transformers 5 does."""
    return hasattr(trainer, "_get_grad_norm") and not isinstance(
        trainer.accelerator.__dict__.get("clip_grad_norm_"), UnaskedNorm
    )


class UnaskedNorm:
    """Stands for `Accelerator.clip_grad_norm_`: no norm where it is only for the log, and the original to clip."""

    def __init__(self, clip: Callable[..., Any]) -> None:
        self._clip = clip

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """None for an infinite `max_norm`, which clips nothing: the Trainer then logs none."""
        return None if max_norm == float("inf") else self._clip(parameters, max_norm, norm_type)


def describe(loop: str, problems: list[str]) -> str:
    """One message for all that is wrong."""
    listed = "".join(f"\n- {problem}" for problem in problems)
    return (
        f"{loop} is set to do what is not possible when weights are updated inside backward (nothing has been changed)."
        f"{listed}\nTo keep a setting, train with torch.optim."
    )


def check_running_loop() -> None:
    """Raise RuntimeError if the Python stack holds a framework's loop that is set to do what cannot be right.

    Called in a forward, which a loop runs in its own thread; a backward may run in another.
    """
    if not _LOOPS.keys() & sys.modules.keys():
        return
    frame = sys._getframe(1)
    while frame is not None:
        check = _LOOPS.get(frame.f_globals.get("__name__", ""))
        if check is not None and frame.f_code.co_varnames[:1] == ("self",):
            check(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]


def _check_trainer(trainer: Any) -> None:
    if not hasattr(trainer, "accelerator"):
        return
    problems = trainer_problems(trainer)
    if norm_is_logged(trainer):
        problems.append(
            "this version logs the norm of gradients that are not stored; use trainer = "
            "forge_dsl.integrations.transformers.adapt(trainer), and it logs none"
        )
    if problems:
        raise RuntimeError(describe("the Trainer", problems))


def _check_lightning(trainer: Any) -> None:
    if not hasattr(trainer, "accumulate_grad_batches"):
        return
    problems = lightning_problems(trainer)
    if problems:
        raise RuntimeError(describe("the Lightning Trainer", problems))


_LOOPS: dict[str, Callable[[Any], None]] = {
    "transformers.trainer": _check_trainer,
    "lightning.pytorch.trainer.trainer": _check_lightning,
    "pytorch_lightning.trainer.trainer": _check_lightning,
}


def check_accumulation(subject: str) -> None:
    """Raise RuntimeError in a backward after which Accelerate would skip `optimizer.step()`.

    subject: the weight that would be updated, for the message. Trainer keeps this flag too.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.GradientState._shared_state.get("sync_gradients") is False:
        raise RuntimeError(
            f"{subject}: Accelerate is accumulating gradients (sync_gradients is False) and will skip the step after "
            f"this backward, but {ACCUMULATE}; nothing has been changed. Set gradient_accumulation_steps=1 and use a "
            "larger batch, or sum the losses and call backward once. Where an earlier loop was left in the middle of "
            "an accumulation: accelerate.state.GradientState().sync_gradients = True"
        )
