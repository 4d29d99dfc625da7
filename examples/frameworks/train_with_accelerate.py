"""Accelerate: a small Llama from a config learns the bytes of this file, in bf16 autocast, and its state is saved.

pip install 'forge-dsl[hf]'
python examples/frameworks/train_with_accelerate.py --steps 100
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import forge_dsl
from forge_dsl.optim import AdamW

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    # The optimizer is built for weights where they are, so the model moves first.
    model = make_model().to(accelerator.device)
    optimizer = forge_dsl.fuse(model, AdamW, lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)
    batches = DataLoader(own_bytes(), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, batches)

    losses: list[float] = []
    while len(losses) < steps:
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
    pairs = zip(kept, model.parameters(), strict=True)
    print("the loaded state has the same bits:", all(torch.equal(a, b) for a, b in pairs))


def make_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))


def own_bytes() -> torch.Tensor:
    return torch.tensor(list(Path(__file__).read_bytes())).unfold(0, CONTEXT, 7)


if __name__ == "__main__":
    main()
