"""Settings that need a GPU to be real are refused as well, and frameworks that are not there cost nothing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from forge_dsl.integrations.loops import lightning_problems, trainer_problems

GOOD = {"max_grad_norm": 0, "gradient_accumulation_steps": 1, "fp16": False, "n_gpu": 1}


def test_good_arguments_have_no_problem() -> None:
    for norm in (0, 0.0, None):
        assert trainer_problems(SimpleNamespace(args=SimpleNamespace(**{**GOOD, "max_grad_norm": norm}))) == []


def test_loss_scaling_and_several_gpus_are_refused_with_the_way_out() -> None:
    for wrong, way_out in (({"fp16": True}, "set bf16=True"), ({"n_gpu": 2}, "CUDA_VISIBLE_DEVICES=0")):
        (problem,) = trainer_problems(SimpleNamespace(args=SimpleNamespace(**{**GOOD, **wrong})))
        assert way_out in problem


def test_lightning_with_a_scaler_is_refused_with_the_way_out() -> None:
    plugin = SimpleNamespace(scaler=object())
    (problem,) = lightning_problems(
        SimpleNamespace(
            gradient_clip_val=None, accumulate_grad_batches=1, precision_plugin=plugin, precision="16-mixed"
        )
    )
    assert 'set precision="bf16-mixed"' in problem


def test_no_framework_is_imported() -> None:
    code = """
import sys, torch, forge_dsl, forge_dsl.integrations.transformers
from forge_dsl.optim import AdamW
layer = torch.nn.Linear(2, 2)
optimizer = forge_dsl.fuse(layer, AdamW)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
print([name for name in ("transformers", "accelerate", "lightning", "peft") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
