"""Hugging Face Trainer, and classes derived from it."""

from __future__ import annotations

from typing import Any, TypeVar

from forge_dsl.integrations.loops import UnaskedNorm, describe, norm_is_logged, trainer_problems
from forge_dsl.runtime.optimizer import FusedOptimizer

TrainerT = TypeVar("TrainerT")


def adapt(trainer: TrainerT) -> TrainerT:
    """Let a Trainer train with the fused optimizer that it was given; returns the trainer.

        trainer = adapt(Trainer(model, args, train_dataset=data, optimizers=(forge_dsl.fuse(model, AdamW), None)))

    Trainers of transformers 5 compute the norm of all gradients in each step, for the log, even where they do not clip.
    No gradient is stored, so this trainer's log has no `grad_norm`; nothing else is changed.

    Raises TypeError if it has no fused optimizer, and ValueError for arguments that cannot work with one:
    `max_grad_norm` other than 0 (its default is 1), `gradient_accumulation_steps` other than 1, `fp16`, DataParallel.
    """
    given: Any = trainer
    optimizer = getattr(given, "optimizer", None)
    if not isinstance(getattr(optimizer, "optimizer", optimizer), FusedOptimizer):
        raise TypeError(
            f"the optimizer of this {type(trainer).__name__} is {type(optimizer).__name__}, not a fused one: build it "
            "with optimizers=(forge_dsl.fuse(model, AdamW, lr=...), None), where None takes the scheduler from its "
            "arguments"
        )
    problems = trainer_problems(given)
    if problems:
        raise ValueError(describe(type(trainer).__name__, problems))
    if norm_is_logged(given):
        given.accelerator.clip_grad_norm_ = UnaskedNorm(given.accelerator.clip_grad_norm_)
    return trainer
