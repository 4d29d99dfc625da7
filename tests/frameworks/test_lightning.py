"""Lightning: its closure, its checkpoints, manual optimization, and what its Trainer may not be set to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge_dsl
from tests.integration.models import PAIRS, Pair, decoder, loss_of

lightning = pytest.importorskip("lightning", reason="needs forge-dsl[lightning]")

BOUND = 2e-6
STEPS = 24


class Module(lightning.LightningModule):
    """The decoder, on batches that depend on the step alone."""

    def __init__(self, fused: bool = True, pair: Pair = PAIRS[0], manual: bool = False) -> None:
        super().__init__()
        self.model = decoder()
        self.fused, self.pair = fused, pair
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = loss_of(self.model, self.global_step)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", loss_of(self.model, 10_000))

    def configure_optimizers(self) -> dict[str, Any]:
        if self.fused:
            optimizer = forge_dsl.fuse(self, self.pair.fused(), **self.pair.arguments)
        else:
            optimizer = self.pair.make_torch(self.parameters())
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def fit(module: Module, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    """Eight steps an epoch, with validation after each; returns the trainer."""
    usual = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    trainer = lightning.Trainer(**{**usual, **options})
    batches = torch.utils.data.DataLoader(range(8))
    trainer.fit(module, batches, torch.utils.data.DataLoader(range(1)), ckpt_path=resume)
    return trainer


def apart(a: nn.Module, b: nn.Module) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_closure_runs_forward_and_backward_inside_step(tmp_path: Path) -> None:
    ours, theirs = Module(), Module(fused=False)
    trainer = fit(ours, tmp_path)
    assert trainer.global_step == STEPS and "val_loss" in trainer.callback_metrics
    fit(theirs, tmp_path)
    assert apart(ours, theirs) <= BOUND < apart(ours, Module())
    assert {int(entry["step"]) for entry in ours.optimizers().optimizer.state_dict()["state"].values()} == {STEPS}


def test_manual_optimization_gives_the_same_bits(tmp_path: Path) -> None:
    automatic, manual = Module(), Module(manual=True)
    fit(automatic, tmp_path)
    fit(manual, tmp_path)
    assert apart(automatic, manual) == 0


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(pair: Pair, tmp_path: Path) -> None:
    unbroken, first, second = (Module(pair=pair) for _ in range(3))
    fit(unbroken, tmp_path)
    # Inside the second epoch.
    fit(first, tmp_path, max_steps=13).save_checkpoint(tmp_path / "middle.ckpt")
    fit(second, tmp_path, resume=tmp_path / "middle.ckpt")
    assert second.global_step == STEPS
    assert apart(second, unbroken) == 0


def test_bf16_autocast_stays_near_torch(tmp_path: Path) -> None:
    ours, theirs = Module(), Module(fused=False)
    for module in (ours, theirs):
        fit(module, tmp_path, precision="bf16-mixed")
    assert apart(ours, theirs) < 2e-3


def test_a_step_that_training_step_skips_changes_nothing(tmp_path: Path) -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return None if index % 2 else loss

    module = Skipping()
    fit(module, tmp_path, max_steps=4)
    assert {int(entry["step"]) for entry in module.optimizers().optimizer.state_dict()["state"].values()} == {2}


WRONG = {
    "norm": ({"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0: .*; set gradient_clip_val=None"),
    "value": (
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        r"gradient_clip_val=0\.5: .*; set gradient_clip_val=None",
    ),
    "accumulation": ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2: .*; set it to 1"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_first_step_says_what_to_set_and_nothing_has_changed(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = Module()
    with pytest.raises(RuntimeError, match=message):
        fit(module, tmp_path, **options)
    assert apart(module, Module()) == 0


def test_clipping_in_a_hook_raises_in_the_first_step(tmp_path: Path) -> None:
    class Clipping(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 1.0, "norm")

    with pytest.raises(RuntimeError, match=r"gradient_clip_val=None.*clamp"):
        fit(Clipping(), tmp_path)
