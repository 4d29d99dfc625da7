"""A whole step, forward to optimizer, captured once and replayed, equals the eager steps bit for bit."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim, testing
from forge_dsl.runtime.linear import fused_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MORE = {"SGDMomentum": {"momentum": 0.5, "dampening": 0.25}, "RMSprop": {"momentum": 0.5}}
STEPS = 6


class Training:
    """Two linear layers and a norm, trained on data that is written into `x` before each step."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(96, 96, generator=generator) / 10 for _ in range(2)]
        self.weights = [torch.nn.Parameter(w.to("cuda", torch.bfloat16)) for w in weights]
        self.norm = torch.nn.Parameter(torch.ones(96, device="cuda", dtype=torch.bfloat16))
        self.lr = torch.tensor(0.0, device="cuda", dtype=torch.float64)
        self.cls = getattr(optim, name)
        self.optimizer = self.cls([*self.weights, self.norm], lr=self.lr, **MORE.get(name, {}))
        self.x = torch.zeros(64, 96, device="cuda", dtype=torch.bfloat16)

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        self.x.copy_(torch.randn(64, 96, generator=generator))
        self.lr.fill_(0.01 / (step + 1))

    def step(self) -> None:
        y = self.x * self.norm
        for weight in self.weights:
            y = fused_linear(y, weight, None, self.cls)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"parameter {i}": p.detach() for i, p in enumerate([*self.weights, self.norm])}
        for i, parameter in enumerate([*self.weights, self.norm]):
            found |= {f"{key} {i}": value for key, value in self.optimizer.state[parameter].items()}
        return found


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"])
def test_a_captured_step_follows_the_learning_rate_and_equals_eager(name: str) -> None:
    eager, captured = Training(name), Training(name)
    warm = 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(warm):
            captured.load(step)
            captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(warm, STEPS):
        captured.load(step)
        graph.replay()
    for step in range(STEPS):
        eager.load(step)
        eager.step()
    for (what, got), want in zip(captured.tensors().items(), eager.tensors().values(), strict=True):
        testing.assert_same_bits(got, want, f"{name}: {what}")
