"""The option `gradient_bits`: every optimizer has it, keeps it, and hands it on to whoever decides."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import fuse, optim, testing
from forge_dsl.runtime import gradient_bits, hopper, launch
from tests.dispatch import linear_step

NAMES = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_has_it_as_a_keyword_beside_its_groups(name: str) -> None:
    kind = getattr(optim, name)
    parameter = inspect.signature(kind.__init__).parameters["gradient_bits"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default == gradient_bits.DEFAULT == 24
    assert "gradient_bits: " in str(kind.__doc__)
    for bits in gradient_bits.CHOICES:
        optimizer = kind([torch.nn.Parameter(torch.zeros(2, 3))], gradient_bits=bits)
        assert optimizer.gradient_bits == bits
        assert "gradient_bits" not in optimizer.param_groups[0] and "gradient_bits" not in optimizer.defaults
    with pytest.raises(ValueError, match=r"Invalid gradient_bits: 12 \(expected 16, 20, 24 or 32\)"):
        kind([torch.nn.Parameter(torch.zeros(2, 3))], gradient_bits=12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_keep_it(copied: Any) -> None:
    optimizer = optim.AdamW([torch.nn.Parameter(torch.zeros(2, 3))], gradient_bits=32)
    assert copied(optimizer).gradient_bits == 32


def test_fuse_passes_it_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert fuse(model, optim.AdamW, lr=1e-3, gradient_bits=20).gradient_bits == 20


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bits", gradient_bits.CHOICES)
def test_the_launcher_asks_with_it_and_the_portable_kernel_has_all_bits(
    exact: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "find", lambda *arguments: asked.append(arguments[-2:]))
    rule = optim.SGD.rule
    case = testing.cases(rule)[0]
    problem = testing.make_problem(rule, case, (16, 24), torch.float32, torch.float32, 0)
    truth = problem.clone()
    # Sums that need more than 16 significant bits.
    x, dy = (testing.integers((8, side), side, torch.float32) * 511 for side in (24, 16))
    table = testing.next_table(rule, case, problem)
    linear_step(rule, x, dy, problem.weight, [], table, case.switches, exact, gradient_bits=bits)
    launch.linear_step_portable(rule, x, dy, truth.weight, [], table, case.switches, exact)
    testing.assert_same_bits(problem.weight, truth.weight, "weight")
    assert asked == [(exact, bits)]


def test_numbers_of_the_reference_in_words() -> None:
    """The first number above a power of two that no longer passes, at each choice; all bits of one that does."""

    def bits_of(x: Tensor, bits: int) -> list[str]:
        return [f"{word & 0xFFFFFFFF:08x}" for word in gradient_bits.handed_over(x, bits).view(torch.int32).tolist()]

    x = torch.tensor([1 + 2.0**-7, 1 + 2.0**-11, 1 + 2.0**-15, 1 + 2.0**-23])
    assert bits_of(x, 32) == ["3f810000", "3f801000", "3f800100", "3f800001"]
    assert bits_of(x, 24) == ["3f810000", "3f801000", "3f800100", "3f800000"]
    assert bits_of(x, 20) == ["3f810000", "3f801000", "3f800000", "3f800000"]
    assert bits_of(x, 16) == ["3f810000", "3f800000", "3f800000", "3f800000"]
