"""Hugging Face Trainer: a small Llama from a config learns the bytes of this file, stops, and resumes.

    pip install 'forge-dsl[hf]'
    python examples/frameworks/train_with_trainer.py --steps 100

The weights of its linear layers are updated inside backward. The run is saved half way; a second Trainer goes on from
the checkpoint and must end with the same bits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import forge_dsl
from forge_dsl.integrations.transformers import adapt
from forge_dsl.optim import AdamW

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(folder, steps)
        whole.optimizer.report()
        whole.train()
        resumed = make_trainer(folder, steps)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    print("the resumed run has the same bits:", all(torch.equal(a, b) for a, b in pairs))


def make_trainer(folder: str, steps: int) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_grad_norm=0,  # no clipping after backward: the weights have been updated by then
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        save_steps=max(steps // 2, 1),
        logging_steps=max(steps // 10, 1),
        report_to=[],
    )
    # The optimizer is built for weights where they are, so the model moves first.
    model = make_model().to(args.device)
    groups = forge_dsl.decay_groups(model, weight_decay=0.1)
    optimizer = forge_dsl.fuse(model, AdamW, params=groups, lr=3e-3)
    return adapt(Trainer(model, args, train_dataset=own_bytes(), optimizers=(optimizer, None)))


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))


def own_bytes() -> list[dict[str, torch.Tensor]]:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": row, "labels": row} for row in text.unfold(0, CONTEXT, 7)]


if __name__ == "__main__":
    main()
