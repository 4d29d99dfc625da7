"""What the tests of low precision share: formats, optimizers by name, runs on integer data, and comparison by bits."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import forge_dsl
from forge_dsl import optim, testing
from forge_dsl.runtime.linear import fused_linear
from forge_dsl.runtime.optimizer import FusedOptimizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "specs"
# Hypers at which every term of a rule matters.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "NAdam": {"weight_decay": 0.01},
    "RAdam": {"weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"weight_decay": 0.01},
    "SGD": {"lr": 1e-3, "weight_decay": 0.01},
    "SGDMomentum": {"lr": 1e-3, "momentum": 0.9, "nesterov": True},
}
SPECS = ("Adadelta", "Adan", "Rprop", "ScheduleFreeAdamW")
_STEMS = {"ScheduleFreeAdamW": "schedule_free_adamw"}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"state_dtype": "int8"},
    "fp8": {"state_dtype": "fp8"},
    "extra 8": {"extra_bits": 8},
    "extra 16": {"extra_bits": 16},
}


def device_of(schedule: str) -> torch.device:
    """Kernels run on the GPU if there is one; what they are compared with is the PyTorch reference, on the CPU."""
    return torch.device("cpu") if schedule == "banded" else testing.device()


@cache
def optimizer_class(name: str) -> type[FusedOptimizer]:
    """One of the package's, or that of an example spec that the package knows nothing of."""
    if name in ARGUMENTS:
        return getattr(optim, name)
    return getattr(forge_dsl.load(EXAMPLES / f"{_STEMS.get(name, name.lower())}.opt"), name)


def make(name: str, params: Iterable[Any], **options: Any) -> FusedOptimizer:
    return optimizer_class(name)(params, **{**ARGUMENTS.get(name, {}), "arithmetic": "exact", **options})


def mixed(name: str) -> dict[str, Any]:
    """A different format for each state, the first one in 8 bits, and 8 bits beside the weight."""
    states = optimizer_class(name).rule.spec.state_names
    return {"state_dtype": dict(zip(states, ("int8", "fp32", "fp8", "bf16"), strict=False)), "extra_bits": 8}


def parameter(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: torch.device | None = None
) -> nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values.to(device or testing.device(), dtype))


def linear_steps(optimizer: FusedOptimizer, weight: Tensor, steps: range, tokens: int = 9) -> None:
    """Steps of one linear weight on whole numbers, whose products are summed exactly in any order."""
    for step in steps:
        x = testing.integers((tokens, weight.shape[1]), 2 * step + 1, weight.dtype).to(weight.device)
        y = fused_linear(x, weight, None, type(optimizer))
        y.backward(testing.integers(tuple(y.shape), 2 * step + 2, weight.dtype).to(weight.device))
        optimizer.step()
        optimizer.zero_grad()


def elementwise_steps(optimizer: FusedOptimizer, parameters: list[nn.Parameter], steps: range) -> None:
    """Steps on ordinary gradients of any parameters."""
    for step in steps:
        for number, p in enumerate(parameters):
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))
            p.grad = torch.empty_like(p).copy_(values)
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor: Tensor) -> Tensor:
    """A tensor as bytes, in the order of its indices."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensors_of(optimizer: FusedOptimizer, p: Tensor) -> dict[str, Tensor]:
    """The parameter and everything kept for it."""
    held = {name: torch.as_tensor(value) for name, value in optimizer.state.get(p, {}).items()}
    return {"weight": p.detach(), **held}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        different = int((bits(got[name]) != bits(value)).sum())
        assert different == 0, f"{what}: {different} bytes of {name} differ"


def snapshot(optimizer: FusedOptimizer) -> list[dict[str, Tensor]]:
    return [
        {name: value.clone() for name, value in tensors_of(optimizer, binding.weight).items()}
        for binding in optimizer.bindings()
    ]


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
