"""Hazard: partial sums added with atomics differ from run to run (onnxruntime#32318). Here a tile sums all tokens."""

from __future__ import annotations

import inspect

import pytest
import torch

from forge_dsl import optim
from forge_dsl.runtime import device_operands, device_tiles
from tests.hazards.kernels import ADAMW, Step, assert_same, case_of, every_kernel, launched, make

CASE = case_of(ADAMW, amsgrad=True)


def random_step(shape: tuple[int, int, int], seed: int = 0) -> Step:
    """Operands whose sums are rounded, so that another order of adding would show."""
    step = make(ADAMW, CASE, shape)
    generator = torch.Generator().manual_seed(seed)
    step.x = torch.randn(step.x.shape, generator=generator).to(step.x.device)
    step.dy = torch.randn(step.dy.shape, generator=generator).to(step.x.device)
    return step


@every_kernel
@pytest.mark.parametrize("shape", [(129, 33, 65), (1000, 17, 31), (31, 129, 127)], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_two_runs_are_equal_in_every_bit(shape: tuple[int, int, int], exact: bool, how: str) -> None:
    first, second = (random_step(shape).run(how, exact) for _ in range(2))
    assert_same(first, second)


@launched
def test_the_order_of_tokens_would_show() -> None:
    """The check above can fail: summed from the last token to the first, some element differs."""
    forward, backward = random_step((129, 33, 65)), random_step((129, 33, 65))
    backward.x, backward.dy = backward.x.flip(0), backward.dy.flip(0)
    weights = [step.run("fused")[0] for step in (forward, backward)]
    assert not torch.equal(*weights)
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"])
def test_no_kernel_has_an_atomic(name: str) -> None:
    rule = getattr(optim, name).rule
    module = inspect.getmodule(rule.reference)
    assert module is not None
    for source in map(inspect.getsource, (module, device_operands, device_tiles)):
        assert "atomic" not in source
