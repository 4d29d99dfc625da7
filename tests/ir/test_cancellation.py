"""Which states a rule subtracts from another one before it takes a root or divides."""

from __future__ import annotations

import pytest
import torch

from forge_dsl import optim
from forge_dsl.loading import load

SPEC = """
optimizer Subject
hyper lr = 1e-3 in [0, inf)
state mean
state square in [0, inf)

update:
  mean   = 0.9 * mean + 0.1 * grad
  square = 0.9 * square + 0.1 * SQUARED
  weight = weight - lr * mean / (sqrt(max(VARIANCE, 0)) + 1e-8)
"""


def precise(variance: str, squared: str = "grad * grad") -> list[str]:
    rule = load(SPEC.replace("VARIANCE", variance).replace("SQUARED", squared)).RULE
    return [state.name for state in rule.spec.states if state.precise]


@pytest.mark.parametrize("variance", ["square - mean * mean", "square + -(mean * mean)"])
def test_what_is_subtracted_from_another_state_under_a_root(variance: str) -> None:
    assert precise(variance) == ["mean"]


@pytest.mark.parametrize("variance", ["square", "square + mean * mean", "square - 0.5 * square", "square - grad"])
def test_other_differences_are_harmless(variance: str) -> None:
    assert precise(variance) == []


def test_a_difference_from_the_gradient_is_not_one_of_two_states() -> None:
    assert precise("square", "(grad - mean) * (grad - mean)") == []


def test_of_the_eight_only_centered_rmsprop_has_one() -> None:
    names = ["AdamW", "NAdam", "RAdam", "Lion", "RMSprop", "Adagrad", "SGD", "SGDMomentum"]
    found = {name: [s.name for s in getattr(optim, name).rule.spec.states if s.precise] for name in names}
    assert {name: states for name, states in found.items() if states} == {"RMSprop": ["grad_avg"]}


def test_such_a_state_keeps_its_own_type_where_the_others_are_stored_in_blocks() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = optim.RMSprop([weight], centered=True, momentum=0.5, state_dtype="int8")
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    held = {name: state.dtype for name, state in optimizer.state[weight].items() if state.shape == weight.shape}
    assert held == {"square_avg": torch.uint8, "grad_avg": torch.float32, "momentum_buffer": torch.uint8}
