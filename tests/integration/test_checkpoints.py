"""Checkpoints have torch.optim's layout, so that either side loads the other's, and nothing that matters is lost."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

import forge_dsl
from forge_dsl.optim import SGD, AdamW, NAdam, RMSprop, SGDMomentum
from tests.integration.models import PAIRS, Pair, decoder, train


def file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def trained(pair: Pair, steps: int = 3, **more: Any) -> tuple[Any, Any]:
    model = decoder()
    optimizer = forge_dsl.fuse(model, pair.fused(), **{**pair.arguments, **more})
    train(model, optimizer, range(steps))
    return model, optimizer


def id_of(pair: Pair) -> str:
    return pair.ours


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.reference != "Lion"], ids=id_of)
def test_keys_shapes_and_types_are_those_of_torch(pair: Pair) -> None:
    _, optimizer = trained(pair)
    twin = decoder()
    reference = pair.make_torch(twin.parameters())
    train(twin, reference, range(3))
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert set(ours["param_groups"][0]) == set(theirs["param_groups"][0])
    for key, value in theirs["param_groups"][0].items():
        assert key == "foreach" or ours["param_groups"][0][key] == value
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entry in theirs["state"].items():
        assert {k for k, v in entry.items() if v is not None} == set(ours["state"][key])
        for name, value in entry.items():
            if value is not None:
                got = ours["state"][key][name]
                assert got.shape == value.shape and got.device == value.device
                # The recurrent scalar keeps float64, so that a resumed run has the bits of an unbroken one.
                assert got.dtype == (torch.float64 if name == "mu_product" else value.dtype)


@pytest.mark.parametrize("pair", PAIRS, ids=id_of)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_of_every_state_comes_back(pair: Pair, state_dtype: torch.dtype) -> None:
    _, optimizer = trained(pair, state_dtype=state_dtype)
    again = forge_dsl.fuse(decoder(), pair.fused(), **pair.arguments)
    again.load_state_dict(file(optimizer.state_dict()))
    want, got = optimizer.state_dict(), again.state_dict()
    assert got["param_groups"] == want["param_groups"]
    for key, entry in want["state"].items():
        for name, value in entry.items():
            assert got["state"][key][name].dtype == value.dtype and torch.equal(got["state"][key][name], value)


def test_a_count_that_fp32_cannot_hold_is_saved_whole() -> None:
    _, optimizer = trained(PAIRS[0], steps=1)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(2.0**24 + 1, dtype=torch.float64)
    optimizer.load_state_dict(saved)
    step = file(optimizer.state_dict())["state"][0]["step"]
    assert step.item() == 2**24 + 1 and step.dtype == torch.float64
    assert saved["state"][1]["step"].dtype == torch.float32


def test_export_warns_once_where_torch_would_round() -> None:
    model = decoder().bfloat16()
    optimizer = forge_dsl.fuse(model, AdamW, state_dtype=torch.float32)
    train(model, optimizer, range(1))
    with pytest.warns(UserWarning, match=r"'exp_avg' of embed\.weight \[29, 16\] in torch\.float32.*bfloat16.*round"):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
        trained(PAIRS[0])[1].state_dict()
    model = decoder().bfloat16()
    optimizer = forge_dsl.fuse(model, NAdam)
    train(model, optimizer, range(1))
    with pytest.warns(UserWarning, match="'mu_product'"):
        optimizer.state_dict()


NEUTRAL = {"foreach": None, "fused": False, "capturable": False, "differentiable": False}


def test_torchs_switches_are_accepted_at_neutral_values_and_kept_out_of_the_groups() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = AdamW([{"params": [weight], "foreach": False}], **NEUTRAL)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], **NEUTRAL})
    assert all(not NEUTRAL.keys() & group.keys() for group in optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    SGD([weight], momentum=0, dampening=0, nesterov=False)
    AdamW([weight], decoupled_weight_decay=True)
    forge_dsl.optim.Lion([weight], foreach=None)


REFUSED = [
    (AdamW, {"foreach": True}, "foreach=True is not possible with AdamW: it chooses among torch.optim's"),
    (AdamW, {"fused": True}, "fused=True is not possible.*Leave it at None"),
    (AdamW, {"capturable": True}, "capturable=True.*on the device already"),
    (AdamW, {"differentiable": True}, "differentiable=True.*no derivative"),
    (AdamW, {"decoupled_weight_decay": False}, "decoupled_weight_decay=False.*the rule AdamW has no such choice"),
    (SGD, {"momentum": 0.9}, "momentum=0.9 is not possible with SGD.*SGDMomentum has the rule with momentum"),
]


@pytest.mark.parametrize(("optimizer_class", "switch", "message"), REFUSED)
def test_other_values_are_refused_everywhere_with_the_reason(optimizer_class, switch, message) -> None:
    weight, other = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        optimizer_class([weight], **switch)
    optimizer = optimizer_class([weight])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [other], **switch})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(switch)
    with pytest.raises(ValueError, match=f"loaded state dict, parameter group 0: {message}"):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_of_another_rule_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    theirs = torch.optim.SGD([weight], momentum=0.9).state_dict()
    with pytest.raises(ValueError, match=r"group 0: momentum=0\.9 is not possible with SGD"):
        SGD([weight]).load_state_dict(theirs)
    SGDMomentum([weight]).load_state_dict(theirs)
    with pytest.raises(ValueError, match="not one of RMSprop: parameter group 0 lacks alpha"):
        RMSprop([weight]).load_state_dict(theirs)


def test_a_mismatch_names_the_parameter_of_the_model() -> None:
    model, optimizer = trained(PAIRS[0])
    saved = optimizer.state_dict()
    place = [name for name, _ in model.named_parameters()].index("blocks.1.up.weight")
    saved["state"][place] = {**saved["state"][place], "exp_avg": torch.zeros(2, 2)}
    message = r"'exp_avg' of blocks\.1\.up\.weight .* of shape \[2, 2\]; expected .* \[48, 16\]"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("pair", PAIRS, ids=id_of)
@pytest.mark.parametrize(
    "options",
    [dcp.StateDictOptions(), dcp.StateDictOptions(flatten_optimizer_state_dict=True)],
    ids=["nested", "flat"],
)
def test_distributed_checkpoints_helpers_on_one_process(pair: Pair, options: dcp.StateDictOptions) -> None:
    whole, kept = trained(pair, steps=5)
    model, optimizer = trained(pair)
    weights = dcp.get_model_state_dict(model)
    assert set(weights) == set(model.state_dict())
    saved = file([weights, dcp.get_optimizer_state_dict(model, optimizer, options=options)])
    other = decoder()
    again = forge_dsl.fuse(other, pair.fused(), **pair.arguments)
    dcp.set_model_state_dict(other, saved[0])
    dcp.set_optimizer_state_dict(other, again, saved[1], options=options)
    train(other, again, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
    del kept


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "kept", [{"extra_bits": 8}, {"extra_bits": 16}, {"state_dtype": "int8"}, {"state_dtype": "fp8"}]
)
def test_the_helpers_keep_low_precision(kept: dict[str, Any], flat: bool) -> None:
    """Flat ones leave out where the draws are, and so these draws begin anew."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = decoder().bfloat16(), decoder().bfloat16()
    optimizer, again = (forge_dsl.fuse(one, AdamW, **kept) for one in (model, other))
    train(model, optimizer, range(3))
    saved = file([dcp.get_model_state_dict(model), dcp.get_optimizer_state_dict(model, optimizer, options=options)])
    dcp.set_model_state_dict(other, saved[0])
    dcp.set_optimizer_state_dict(other, again, saved[1], options=options)
    for weight, same in zip(model.parameters(), other.parameters(), strict=True):
        states, found = optimizer.state[weight], again.state[same]
        assert all(torch.equal(torch.as_tensor(states[key]), torch.as_tensor(found[key])) for key in states)
    train(other, again, range(3, 5))
    if not flat:
        train(model, optimizer, range(3, 5))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_helpers_move_a_run_from_torch() -> None:
    twin, other = decoder(), decoder()
    reference = PAIRS[0].make_torch(twin.parameters())
    train(twin, reference, range(3))
    optimizer = forge_dsl.fuse(other, AdamW)
    other.load_state_dict(twin.state_dict())
    dcp.set_optimizer_state_dict(other, optimizer, dcp.get_optimizer_state_dict(twin, reference))
    assert optimizer.state[other.head.weight]["step"] == 3


@pytest.mark.parametrize("pair", PAIRS, ids=id_of)
def test_a_distributed_checkpoint_on_disk_goes_on_alike(pair: Pair, tmp_path) -> None:
    model, optimizer = trained(pair)
    weights, states = dcp.get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path, no_dist=True)
    other = decoder()
    again = forge_dsl.fuse(other, pair.fused(), **pair.arguments)
    places = dict(zip(("model", "optimizer"), dcp.get_state_dict(other, again), strict=True))
    torch.distributed.checkpoint.load(places, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_state_dict(other, again, model_state_dict=places["model"], optim_state_dict=places["optimizer"])
    train(model, optimizer, range(3, 5))
    train(other, again, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.ours != "SGD"], ids=id_of)
def test_full_state_dicts_of_the_helpers(pair: Pair) -> None:
    """Not for plain SGD: torch's helper then finds no state to learn the device from, with torch.optim.SGD too."""
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = trained(pair)
    weights, states = dcp.get_state_dict(model, optimizer, options=options)
    other = decoder()
    again = forge_dsl.fuse(other, pair.fused(), **pair.arguments)
    dcp.set_state_dict(other, again, model_state_dict=weights, optim_state_dict=states, options=options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert again.state[other.head.weight].keys() == optimizer.state[model.head.weight].keys()
