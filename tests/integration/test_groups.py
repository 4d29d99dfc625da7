"""Param groups: the usual split, arguments of their own, and ranges that are checked wherever they come in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import optim
from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.optim import AdamW
from forge_dsl.spec import HyperSpec, Range
from tests.integration.models import PAIRS, Pair, decoder, train


def names(model: nn.Module, group: dict) -> set[str]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in group["params"]}


def test_the_usual_split() -> None:
    model = decoder()
    decaying, rest = forge_dsl.decay_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    assert names(model, decaying) == {name for name, p in model.named_parameters() if p.dim() == 2}
    assert names(model, rest) == {name for name, p in model.named_parameters() if p.dim() == 1}


def test_what_is_excluded_by_class_or_name_and_what_is_frozen() -> None:
    model = decoder(tied=True)
    model.position.requires_grad_(False)
    decaying, rest = forge_dsl.decay_groups(model, 0.1, exclude=[nn.Embedding, "blocks.0.*"])
    assert "embed.weight" in names(model, rest), "tied to the head, and an embedding"
    assert names(model, decaying) == {f"blocks.1.{part}.weight" for part in ("qkv", "out", "up", "down")}
    assert not {"position.weight"} & (names(model, decaying) | names(model, rest))
    assert len(forge_dsl.decay_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    with pytest.raises(ValueError, match=r"no parameter of the model fits 'blokcs\.\*'"):
        forge_dsl.decay_groups(model, 0.1, exclude=["blokcs.*"])


def test_groups_with_rates_betas_decay_and_flags_of_their_own_follow_torch() -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [
            {"params": list(model.blocks[0].parameters()), "lr": 1e-2, "betas": (0.5, 0.9)},
            {"params": list(model.blocks[1].parameters()), "amsgrad": True, "weight_decay": 0.5},
            {"params": [model.head.weight], "maximize": True, "lr": torch.tensor(1e-3), "eps": 1e-2},
        ]

    ours, theirs = decoder(), decoder()
    optimizer = forge_dsl.fuse(ours, AdamW, params=groups(ours), lr=2e-3, eps=1e-3)
    reference = torch.optim.AdamW(groups(theirs), lr=2e-3, eps=1e-3, foreach=False)
    for step in range(8):
        if step == 4:
            optimizer.add_param_group({"params": [ours.embed.weight], "lr": 0.1})
            reference.add_param_group({"params": [theirs.embed.weight], "lr": 0.1})
        for model in (ours, theirs):
            model.zero_grad()
        train(ours, optimizer, range(step, step + 1))
        train(theirs, reference, range(step, step + 1))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    counts = [int(optimizer.state[p]["step"]) for p in (ours.embed.weight, ours.head.weight)]
    assert counts == [4, 8]


def outside(hyper: HyperSpec, index: int) -> list[float]:
    """Numbers just beyond the range's ends, and what is in no range."""
    limits = hyper.ranges[index] or Range()
    beyond = [float("nan")]
    if limits.low > -float("inf"):
        beyond.append(limits.low if limits.low_open else limits.low - 1e-3)
    if limits.high < float("inf") or limits.high_open:
        beyond.append(limits.high if limits.high_open else limits.high + 1e-3)
    return beyond


def bad_arguments(optimizer_class: type) -> list[dict]:
    found = []
    for hyper in optimizer_class.rule.spec.hypers:
        for index in range(len(hyper.ranges)):
            for value in outside(hyper, index):
                whole = list(hyper.default) if isinstance(hyper.default, tuple) else [hyper.default]
                whole[index] = value
                found.append({hyper.name: tuple(whole) if isinstance(hyper.default, tuple) else value})
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.ours)
def test_every_hyper_is_checked_at_construction_in_groups_and_on_loading(pair: Pair) -> None:
    optimizer_class = getattr(optim, pair.ours)
    weight, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([weight])
    before = copy.deepcopy(optimizer.state_dict())
    for bad in bad_arguments(optimizer_class):
        with pytest.raises(ValueError, match="Invalid"):
            optimizer_class([weight], **bad)
        with pytest.raises(ValueError, match="Invalid"):
            optimizer.add_param_group({"params": [other], **bad})
        saved = copy.deepcopy(before)
        saved["param_groups"][0].update(bad)
        with pytest.raises(ValueError, match="Invalid"):
            optimizer.load_state_dict(saved)
        assert len(optimizer.param_groups) == 1
        assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_what_hypers_require_of_each_other_is_checked_everywhere() -> None:
    weight, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    optimizer = optim.SGDMomentum([weight], momentum=0.9)
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGDMomentum([weight], nesterov=True)
    with pytest.raises(ValueError, match="Nesterov"):
        optimizer.add_param_group({"params": [other], "nesterov": True, "dampening": 0.5})
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(nesterov=True, momentum=0)
    with pytest.raises(ValueError, match="Nesterov"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([nn.Parameter(torch.ones(2))], 0.1), {}, "expected a torch.nn.Module, got list"),
        ((nn.Linear(2, 2), "0.1"), {}, "Invalid weight_decay value: '0.1'"),
        ((nn.Linear(2, 2), None), {}, "Invalid weight_decay value: None"),
        ((nn.Linear(2, 2), 0.1), {"exclude": [nn.Linear(2, 2)]}, "neither a pattern of names nor a class of modules"),
    ],
)
def test_arguments_of_decay_groups_of_other_types_are_named(arguments, options, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        forge_dsl.decay_groups(*arguments, **options)


def test_one_exclusion_needs_no_list() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for exclude in ("0.*", nn.Linear):
        one, listed = (forge_dsl.decay_groups(model, 0.1, exclude=given) for given in (exclude, [exclude]))
        assert [len(group["params"]) for group in one] == [len(group["params"]) for group in listed]


def test_unfuse_wants_a_model() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got list"):
        forge_dsl.unfuse([nn.Linear(2, 2)])


@pytest.mark.parametrize("spec", ["", "optimizer A", "no_such_file"])
def test_load_says_what_it_takes(spec: str) -> None:
    with pytest.raises(DiagnosticError, match=rf"cannot read `{spec}`.*\n(.|\n)*path of a .opt file, or the text"):
        forge_dsl.load(spec)
