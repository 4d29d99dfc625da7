"""The operators of compiled graphs with Triton kernels: eager's bits. Under an old release, Dynamo alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import testing
from forge_dsl.runtime import compiled
from tests.integration.models import PAIRS, Pair

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_a_compiled_model_has_the_bits_of_eager(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "inductor" if compiled.SUPPORTED else "eager"
    monkeypatch.setattr(compiled, "SUPPORTED", True)
    torch._dynamo.reset()
    models = []
    for compile_ in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False)).to(
            "cuda", torch.bfloat16
        )
        optimizer = forge_dsl.fuse(model, pair.fused(), **pair.arguments)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        call = torch.compile(model, backend=backend, fullgraph=True) if compile_ else model
        for step in range(4):
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
            with torch._dynamo.config.patch(error_on_recompile=True):
                call(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        models.append(model)
    for (name, eager), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        testing.assert_same_bits(got.detach(), eager.detach(), name)
