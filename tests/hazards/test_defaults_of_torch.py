"""Hazard: `torch.set_default_device("cuda")` or another default type made tensors where nobody expected them.

Tensors that the library makes say where they are. The default device is `meta` here, whose tensors have no data: any
that is made without saying so shows.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge_dsl
from forge_dsl import optim

FOLDER = Path(forge_dsl.__file__).parent
FACTORIES = {"tensor", "zeros", "empty", "full", "ones", "rand", "randn", "randint", "arange", "linspace", "eye"}
NAMES = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"state_dtype": "int8"},
    {"state_dtype": "fp8", "extra_bits": 8},
    {"weight_dtype": "fp8"},
    {"saved_activations": "fp8"},
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(name: str, options: dict[str, Any], within: Any) -> list[Tensor]:
    """Two steps, a checkpoint and a copy, with bf16 weights; everything that is stored then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).to(torch.bfloat16)
    x = torch.randn(4, 64).to(torch.bfloat16)
    with within:
        optimizer = forge_dsl.fuse(model, getattr(optim, name), **options)
        for _ in range(2):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.load_state_dict(optimizer.state_dict())
        copy.deepcopy(optimizer)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*model.state_dict().values(), *states]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_default_changes_a_bit(name: str, options: dict[str, Any]) -> None:
    plain = train(name, options, torch.device("cpu"))
    for within in (torch.device("meta"), default_dtype(torch.bfloat16), default_dtype(torch.float64)):
        for got, want in zip(train(name, options, within), plain, strict=True):
            assert got.device == want.device and got.dtype == want.dtype
            assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("folder", ["runtime", "formats", "integrations"])
def test_every_tensor_that_is_made_says_where(folder: str) -> None:
    found = []
    for path in sorted((FOLDER / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made)) if made in FACTORIES:
                    if "device" not in {keyword.arg for keyword in node.keywords}:
                        found.append(f"{path.name}:{node.lineno}")
    # The first-use check makes all of its tensors within `torch.device("cpu")`.
    assert {place.split(":")[0] for place in found} <= {"trust.py"}, found
