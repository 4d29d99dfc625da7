"""What torch.optim's constructors take, ours take: for type checkers as torch says, at run time or with a reason."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import forge_dsl
from forge_dsl.compile import compile_source
from forge_dsl.emit.host import _OF_MOMENTUM, _SWITCHES
from forge_dsl.loading import module_of
from forge_dsl.runtime.torch_layout import SGDSwitches, Switches, counterpart
from generated import SGD, AdamW, Lion, NAdam, RAdam, RMSprop, SGDMomentum
from generated.adagrad import Adagrad

ROOT = Path(forge_dsl.__file__).parent.parent
OURS = [AdamW, NAdam, RAdam, RMSprop, Adagrad, SGD, SGDMomentum]
ours = pytest.mark.parametrize("optimizer", OURS, ids=lambda cls: cls.__name__)


def torchs(optimizer: type) -> type[torch.optim.Optimizer]:
    found = counterpart(optimizer.rule.spec)
    assert found is not None
    return getattr(torch.optim, found.name)


def accepted(optimizer: type) -> dict[str, object]:
    """Every keyword of a constructor with its type, those of its `**switches` among them."""
    hints = dict(typing.get_type_hints(optimizer.__init__))
    (switches,) = typing.get_args(hints.pop("switches"))
    return {**hints, **typing.get_type_hints(switches)}


def members(hint: object) -> set[object]:
    """The types of a union, tuples by their elements; a number may be whole."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*map(members, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return {(place, member) for place, item in enumerate(typing.get_args(hint)) for member in members(item)}
    return {hint}


@ours
def test_type_checkers_accept_every_keyword_of_torch(optimizer: type) -> None:
    wanted, got = typing.get_type_hints(torchs(optimizer).__init__), accepted(optimizer)
    parameters = inspect.signature(torchs(optimizer).__init__).parameters
    for name in parameters.keys() - {"self", "params"}:
        lacking = members(wanted[name]) - members(got[name])
        if name in optimizer.rule.spec.switching_hypers:
            lacking -= {Tensor}
        assert not lacking, f"{name}: {wanted[name]} in torch, {got[name]} here"


@ours
def test_every_keyword_of_torch_at_its_default_is_honoured(optimizer: type) -> None:
    parameters = inspect.signature(torchs(optimizer).__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if name not in ("self", "params")}
    made = optimizer([nn.Parameter(torch.ones(2))], **defaults)
    kept = {name: value for name, value in defaults.items() if name in made.param_groups[0]}
    assert kept and all(made.param_groups[0][name] == value for name, value in kept.items())


@pytest.mark.parametrize("optimizer", [*OURS, Lion], ids=lambda cls: cls.__name__)
def test_a_switch_is_neutral_or_refused_with_the_reason(optimizer: type) -> None:
    weight = [nn.Parameter(torch.ones(2))]
    for name, neutral in {"foreach": [None, False], "fused": [None, False], "capturable": [False]}.items():
        for value in neutral:
            assert name not in optimizer(weight, **{name: value}).param_groups[0]
    for name in ("foreach", "fused", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=rf"{name}=True is not possible with {optimizer.__name__}: .*Leave it at"):
            optimizer(weight, **{name: True})


def test_what_only_another_rule_of_torch_reads_is_neutral_or_refused() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    SGD(weight, momentum=0.0, dampening=0.0, nesterov=False)
    with pytest.raises(ValueError, match=r"momentum=0.9 is not possible with SGD.*SGDMomentum has the rule"):
        SGD(weight, momentum=0.9)


@ours
def test_an_unknown_keyword_is_refused_as_python_does(optimizer: type) -> None:
    with pytest.raises(TypeError, match=rf"{optimizer.__name__}.*unexpected keyword argument 'learning_rate'"):
        optimizer([nn.Parameter(torch.ones(2))], learning_rate=1e-3)


@ours
def test_an_argument_by_position_means_what_it_means_in_torch_or_is_refused(optimizer: type) -> None:
    positions = list(inspect.signature(torchs(optimizer)).parameters)[1:]
    mine = list(inspect.signature(optimizer).parameters)[1:]
    values: list[object] = []
    for name, here in zip(positions, mine, strict=False):
        if here not in optimizer.rule.spec.hyper_names:
            break
        values.append(next(h.default for h in optimizer.rule.spec.hypers if h.name == here))
        if name == here:
            made = optimizer([nn.Parameter(torch.ones(2))], *values)
            assert made.param_groups[0][name] == values[-1]
        else:
            with pytest.raises(TypeError, match=f"is {name}, and here it is {here}: give it by keyword"):
                optimizer([nn.Parameter(torch.ones(2))], *values)
            break


def test_a_momentum_by_position_does_not_become_weight_decay() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match=r"argument 3 of torch.optim.SGD is momentum, and here it is weight_decay"):
        SGD(weight, 0.1, 0.9)
    assert SGDMomentum(weight, 0.1, 0.9).param_groups[0]["momentum"] == 0.9
    assert SGD(weight, 0.1, weight_decay=0.9).param_groups[0]["weight_decay"] == 0.9


def test_the_compiler_knows_the_switches_without_importing_torch() -> None:
    assert set(Switches.__annotations__) == _SWITCHES
    assert set(SGDSwitches.__annotations__) - set(Switches.__annotations__) == _OF_MOMENTUM


@pytest.mark.parametrize("name", [*sorted(_SWITCHES), "switches"])
def test_a_spec_may_have_a_hyper_called_like_a_switch(name: str) -> None:
    text = f"optimizer A\nhyper lr = 1\nhyper {name} = 1\nupdate:\n  weight = weight - lr * {name} * grad\n"
    optimizer = module_of(compile_source(text, "a.opt")).A
    assert optimizer([nn.Parameter(torch.ones(2))], **{name: 3.0}).param_groups[0][name] == 3.0
    with pytest.raises(TypeError, match="unexpected keyword"):
        optimizer([nn.Parameter(torch.ones(2))], unknown=1)


CALLS = """
import torch
from generated import SGD, AdamW, RMSprop
weights = [torch.nn.Parameter(torch.ones(2))]
AdamW(weights, lr=torch.tensor(1e-3), betas=(0.9, torch.tensor(0.99)), foreach=False, fused=None, capturable=False)
AdamW(weights, 1e-3, differentiable=False, maximize=True)
SGD(weights, momentum=0.0, nesterov=False, foreach=None)
"""
WRONG = """
AdamW(weights, foreach="no")
AdamW(weights, learning_rate=1e-3)
RMSprop(weights, momentum=torch.tensor(0.9))
"""


@pytest.mark.slow
def test_mypy_agrees(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS + WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--cache-dir", tmp_path / "c"]
    done = subprocess.run(
        [*command, tmp_path / "calls.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    first = len(CALLS.split("\n"))
    found = [line.split(":")[1] for line in done.split("\n") if ": error:" in line]
    assert sorted(set(map(int, found))) == [first + 1, first + 2, first + 3], done
