"""Hugging Face Trainer: the trajectory of torch.optim, its log, its checkpoints, and what it may not be set to."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl.integrations.transformers import adapt
from tests.frameworks.llama import llama, sequences, transformers, two_groups
from tests.integration.models import PAIRS, Pair

pytest.importorskip("accelerate", reason="needs forge-dsl[hf]")

STEPS, WARM_UP = 50, 10
# Weights that move by 0.004 (RAdam) to 0.2 in 50 steps end within this of torch's; seen: 1.2e-7.
BOUND = 2e-6
ADAMW = PAIRS[0]


def arguments(folder: Path, **options: Any) -> Any:
    usual = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0,
        "warmup_steps": WARM_UP,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**{**usual, **options})


def our_optimizer(model: nn.Module, pair: Pair = ADAMW) -> Any:
    groups = two_groups(model, pair.arguments["lr"], pair.arguments["weight_decay"])
    return forge_dsl.fuse(model, pair.fused(), params=groups, **pair.arguments)


def torch_optimizer(model: nn.Module, pair: Pair = ADAMW) -> Any:
    return pair.make_torch(two_groups(model, pair.arguments["lr"], pair.arguments["weight_decay"]))


def trainer_of(model: nn.Module, optimizer: Any, folder: Path, **options: Any) -> Any:
    return transformers.Trainer(
        model,
        arguments(folder, **options),
        train_dataset=sequences(64),
        eval_dataset=sequences(8, seed=1),
        optimizers=(optimizer, None),
    )


def train(
    folder: Path, make: Any = our_optimizer, pair: Pair = ADAMW, resume: str | None = None, **options: Any
) -> Any:
    """Train a fresh Llama; returns the trainer."""
    model = llama()
    trainer = trainer_of(model, make(model, pair), folder, **options)
    if make is our_optimizer:
        adapt(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def differences(a: nn.Module, b: nn.Module) -> torch.Tensor:
    return torch.cat([(x - y).detach().abs().flatten() for x, y in zip(a.parameters(), b.parameters(), strict=True)])


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_fifty_steps_end_where_torch_ends(pair: Pair, tmp_path: Path) -> None:
    ours = train(tmp_path, our_optimizer, pair)
    theirs = train(tmp_path, torch_optimizer, pair)
    apart = differences(ours.model, theirs.model)
    # Lion takes the sign of its moment, which rounding can turn where it is nearly 0.
    allowed = 0.01 if pair.ours == "Lion" else 0.0
    assert (apart > BOUND).float().mean() <= allowed
    assert differences(ours.model, llama()).max() > 1e-3
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), abs=1e-5)


def test_every_linear_weight_is_updated_inside_backward(tmp_path: Path) -> None:
    trainer = train(tmp_path, max_steps=1)
    routes = {row.name: row.route for row in trainer.optimizer.optimizer.report().rows}
    linear = {f"{name}.weight" for name, module in trainer.model.named_modules() if isinstance(module, nn.Linear)}
    assert len(linear) == 15
    assert {name for name, route in routes.items() if route == "backward"} == linear


def test_the_log_has_the_rate_of_each_step_and_no_norm(tmp_path: Path) -> None:
    trainer = train(tmp_path, max_steps=12)
    rates = logged(trainer, "learning_rate")
    assert len(rates) == 12
    assert rates[1] - rates[0] == pytest.approx(ADAMW.arguments["lr"] / WARM_UP)
    assert logged(trainer, "grad_norm") == []


def test_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path, max_steps=12)
    evaluated = train(tmp_path, max_steps=12, eval_strategy="steps", eval_steps=3)
    assert len(logged(evaluated, "eval_loss")) == 4
    assert same_weights(plain.model, evaluated.model)


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], PAIRS[5], PAIRS[7]], ids=lambda pair: pair.ours)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(pair: Pair, tmp_path: Path) -> None:
    # The 16 batches of an epoch end inside the run, and the checkpoint lies inside the second epoch.
    options = {"max_steps": 30, "save_strategy": "steps", "save_steps": 20}
    unbroken = train(tmp_path / "a", pair=pair, **options)
    resumed = train(tmp_path / "b", pair=pair, resume=str(tmp_path / "a" / "checkpoint-20"), **options)
    assert resumed.state.global_step == 30
    assert same_weights(resumed.model, unbroken.model)
    assert logged(resumed, "loss")[20:] == logged(unbroken, "loss")[20:]


def test_a_run_begun_with_torch_goes_on_fused_and_back(tmp_path: Path) -> None:
    options = {"max_steps": 30, "save_strategy": "steps", "save_steps": 10}
    theirs = train(tmp_path / "a", torch_optimizer, **options)
    ours = train(tmp_path / "b", our_optimizer, resume=str(tmp_path / "a" / "checkpoint-10"), **options)
    back = train(tmp_path / "c", torch_optimizer, resume=str(tmp_path / "b" / "checkpoint-20"), **options)
    assert differences(ours.model, theirs.model).max() <= BOUND
    assert differences(back.model, theirs.model).max() <= BOUND


def test_bf16_autocast_stays_near_torch(tmp_path: Path) -> None:
    ours = train(tmp_path, our_optimizer, bf16=True, max_steps=20)
    theirs = train(tmp_path, torch_optimizer, bf16=True, max_steps=20)
    assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())
    # torch rounds the gradient of each linear weight to bf16, 2^-9 of it; here it stays in fp32.
    assert differences(ours.model, theirs.model).max() < 2e-3
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), abs=2e-3)


def test_gradient_checkpointing_gives_the_same_run(tmp_path: Path) -> None:
    plain = train(tmp_path, max_steps=5)
    checkpointed = train(tmp_path, max_steps=5, gradient_checkpointing=True)
    assert same_weights(plain.model, checkpointed.model)


WRONG = {
    "clipping is the default": ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0: .*; set max_grad_norm=0"),
    "accumulation": ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps=2: .*; set it to 1"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_adapt_says_what_to_set(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match=message):
        adapt(trainer_of(model, our_optimizer(model), tmp_path, **options))


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_without_adapt_the_first_step_says_so_and_nothing_has_changed(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = llama()
    optimizer = our_optimizer(model)
    trainer = trainer_of(model, optimizer, tmp_path, **options)
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert same_weights(model, llama()) and not optimizer.state


def test_a_derived_trainer_is_checked_and_adapted_too(tmp_path: Path) -> None:
    class Derived(transformers.Trainer):
        def training_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
            return super().training_step(*inputs, **options)

    for norm in (1.0, 0):
        model = llama()
        given = arguments(tmp_path, max_grad_norm=norm, max_steps=2)
        trainer = Derived(model, given, train_dataset=sequences(64), optimizers=(our_optimizer(model), None))
        if norm:
            with pytest.raises(RuntimeError, match="set max_grad_norm=0"):
                trainer.train()
        else:
            adapt(trainer).train()
    assert same_weights(model, train(tmp_path, max_steps=2).model)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    model = llama()
    trainer = trainer_of(model, our_optimizer(model), tmp_path, max_grad_norm=0.5, gradient_accumulation_steps=4)
    with pytest.raises(ValueError) as caught:
        adapt(trainer)
    assert len(re.findall("^- ", str(caught.value), re.MULTILINE)) == 2


def test_a_trainer_that_only_logs_the_norm_asks_for_adapt(tmp_path: Path) -> None:
    if not hasattr(transformers.Trainer, "_get_grad_norm"):
        pytest.skip("this version of transformers does not log the norm without clipping")
    model = llama()
    with pytest.raises(RuntimeError, match=r"adapt\(trainer\)"):
        trainer_of(model, our_optimizer(model), tmp_path).train()
    assert same_weights(model, llama())


def test_clipping_switched_on_in_the_middle_raises_too(tmp_path: Path) -> None:
    model = llama()
    trainer = adapt(trainer_of(model, our_optimizer(model), tmp_path, max_steps=3))

    class SwitchOn(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_grad_norm = 1.0

    trainer.add_callback(SwitchOn())
    with pytest.raises(RuntimeError, match="max_grad_norm=0"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_wrong_run_leaves_the_model_ready_for_the_right_one(tmp_path: Path) -> None:
    model = llama()
    optimizer = our_optimizer(model)
    with pytest.raises(RuntimeError):
        trainer_of(model, optimizer, tmp_path, gradient_accumulation_steps=2).train()
    adapt(trainer_of(model, optimizer, tmp_path, max_steps=5)).train()
    assert same_weights(model, train(tmp_path, max_steps=5).model)


def test_adapt_wants_a_fused_optimizer(tmp_path: Path) -> None:
    model = llama()
    for optimizer in (None, torch_optimizer(model)):
        with pytest.raises(TypeError, match=r"optimizers=\(forge_dsl.fuse"):
            adapt(trainer_of(model, optimizer, tmp_path))


def test_other_trainers_are_not_touched(tmp_path: Path) -> None:
    theirs = train(tmp_path, torch_optimizer, max_steps=2, max_grad_norm=1.0)
    assert all(math.isfinite(norm) and norm > 0 for norm in logged(theirs, "grad_norm"))


def test_a_scheduler_that_moves_the_betas_too_is_followed(tmp_path: Path) -> None:
    models = []
    for make in (our_optimizer, torch_optimizer):
        model = llama()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=21)
        trainer = trainer_of(model, optimizer, tmp_path, max_steps=20)
        trainer.lr_scheduler = scheduler
        if make is our_optimizer:
            adapt(trainer)
        trainer.train()
        models.append(model)
    assert differences(*models).max() <= BOUND
