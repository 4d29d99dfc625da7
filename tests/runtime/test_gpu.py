"""On a GPU: tables filled on the device, nothing waits for it, every route steps the same bits, no gradient exists."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim
from forge_dsl.runtime.linear import fused_linear
from tests.runtime.handwritten import integers, same_bits, snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAMES = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]
MORE = {"SGDMomentum": {"momentum": 0.5, "dampening": 0.5}}


def run(name: str, device: str, schedule: str, dtype: torch.dtype, shape: tuple[int, int, int], lr=0.25):
    cls = getattr(optim, name)
    tokens, inputs, outputs = shape
    weight, bias = (torch.nn.Parameter(integers(*s, dtype=dtype).to(device)) for s in ((outputs, inputs), (outputs,)))
    optimizer = cls([weight, bias], lr=lr, arithmetic="exact", schedule=schedule, **MORE.get(name, {}))
    for step in range(3):
        x, dy = integers(tokens, inputs, seed=step, dtype=dtype), integers(tokens, outputs, seed=10 + step, dtype=dtype)
        fused_linear(x.to(device), weight, bias, cls).backward(dy.to(device))
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in snapshot(optimizer)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 127, 65), (257, 300, 520)])
def test_every_route_steps_the_bits_of_the_reference(name: str, dtype: torch.dtype, shape) -> None:
    expected = run(name, "cpu", "banded", dtype, shape)
    for schedule in ("fused", "banded"):
        found = run(name, "cuda", schedule, dtype, shape)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), schedule


def test_a_learning_rate_on_the_device_is_the_same_number() -> None:
    a = run("AdamW", "cuda", "fused", torch.float32, (33, 65, 17), lr=torch.tensor(0.25, device="cuda"))
    b = run("AdamW", "cuda", "fused", torch.float32, (33, 65, 17))
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name: str) -> None:
    cls = getattr(optim, name)
    layers = [torch.nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(3)]
    norm = torch.nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = cls([*layers, norm], lr=torch.tensor(0.1, device="cuda"), **MORE.get(name, {}))
    x = torch.randn(32, 64, device="cuda")

    def step(used: int) -> None:
        y = x * norm
        for weight in layers[:used]:
            y = fused_linear(y, weight, None, cls)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for used in (3, 2):  # compile first: loading a kernel may wait
        step(used)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for used in (3, 2, 1, 3):
            optimizer.param_groups[0]["weight_decay"] = 0.01 * used
            step(used)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if "step" in optimizer.state[layers[0]]:
        assert [optimizer.state[w]["step"].item() for w in layers] == [6, 5, 3]


def test_backward_allocates_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16))
    optimizer = optim.AdamW([weight])
    x = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        loss = fused_linear(x, weight, None, optim.AdamW).float().sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - before
    # dy and its fp32 original are 24 MiB; the gradient would be 128 MiB in bf16.
    assert peak < 64 << 20
