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

    def __init__(self, name: str, tensor_lr: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(96, 96, generator=generator) / 10 for _ in range(2)]
        self.weights = [torch.nn.Parameter(w.to("cuda", torch.bfloat16)) for w in weights]
        self.norm = torch.nn.Parameter(torch.ones(96, device="cuda", dtype=torch.bfloat16))
        self.cls = getattr(optim, name)
        lr = torch.tensor(0.0, device="cuda", dtype=torch.float64) if tensor_lr else 0.0
        self.optimizer = self.cls([*self.weights, self.norm], lr=lr, **MORE.get(name, {}))
        self.x = torch.zeros(64, 96, device="cuda", dtype=torch.bfloat16)

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        self.x.copy_(torch.randn(64, 96, generator=generator))
        lr = self.optimizer.param_groups[0]["lr"]
        if isinstance(lr, torch.Tensor):
            lr.fill_(0.01 / (step + 1))
        else:
            self.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            self.optimizer.prepare_replay()

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


def capture(captured: Training, warm: int) -> torch.cuda.CUDAGraph:
    """The step after `warm` ones, recorded."""
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
    return graph


@pytest.mark.parametrize("tensor_lr", [True, False], ids=["tensor", "number"])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"])
def test_a_captured_step_follows_the_learning_rate_and_equals_eager(name: str, tensor_lr: bool) -> None:
    eager, captured = Training(name, tensor_lr), Training(name, tensor_lr)
    warm = 2
    graph = capture(captured, warm)
    for step in range(warm, STEPS):
        captured.load(step)
        graph.replay()
    for step in range(STEPS):
        eager.load(step)
        eager.step()
    for (what, got), want in zip(captured.tensors().items(), eager.tensors().values(), strict=True):
        testing.assert_same_bits(got, want, f"{name}: {what}")


def test_a_number_that_changed_before_the_capture_is_refused() -> None:
    captured = Training("AdamW", tensor_lr=False)
    captured.load(0)
    captured.step()
    captured.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"prepare_replay\(\)"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured.step()


def test_a_change_that_needs_another_kernel_is_refused_before_a_replay() -> None:
    captured = Training("SGDMomentum", tensor_lr=False)
    capture(captured, 2)
    captured.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(RuntimeError, match="capture the step again"):
        captured.optimizer.prepare_replay()
