"""Lightning: a small network learns the bytes of this file, is saved by the Trainer, and resumes.

    pip install 'forge-dsl[lightning]'
    python examples/frameworks/train_with_lightning.py --epochs 4

Lightning hands `optimizer.step` a closure that runs forward and backward. The run is saved at the end of each epoch; a
second one goes on from the middle and must end with the same bits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import forge_dsl
from forge_dsl.optim import AdamW

CONTEXT = 16


class NextByte(lightning.LightningModule):
    """Predicts a byte from the 16 before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width // 4)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(CONTEXT * width // 4, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 256)
        )
        self.losses: list[float] = []

    def training_step(self, window: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.layers(self.embed(window[:, :-1])), window[:, -1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        # Called when the model is on its device.
        optimizer = forge_dsl.fuse(self, AdamW, lr=3e-3, weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(folder, epochs)
        resumed = fit(folder, epochs, resume=f"{folder}/epoch={epochs // 2 - 1}.ckpt")
    print(f"loss {whole.losses[0]:.3f} -> {whole.losses[-1]:.3f}")
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    print("the resumed run has the same bits:", all(torch.equal(a, b) for a, b in pairs))


def fit(folder: str, epochs: int, resume: str | None = None) -> NextByte:
    torch.manual_seed(0)
    module = NextByte()
    every_epoch = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        devices=1,
        callbacks=[every_epoch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    windows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, CONTEXT + 1, 3)
    trainer.fit(module, DataLoader(windows, batch_size=32), ckpt_path=resume)
    return module


if __name__ == "__main__":
    main()
