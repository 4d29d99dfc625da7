"""`fuse` swaps what is an `nn.Linear`, says what it leaves and why, and leaves no trace that a model would show."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import forge_dsl
from forge_dsl.fusion import FusedForward
from forge_dsl.optim import SGD, AdamW, AdamWLinear, adamw_linear
from tests.integration.models import decoder, loss_of, reason, train


def fused_layers(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), FusedForward)]


def test_names_types_and_repr_stay_and_linear_weights_have_no_gradient() -> None:
    model = decoder()
    before = repr(model), list(model.state_dict()), [type(m) for m in model.modules()]
    optimizer = forge_dsl.fuse(model, AdamW, lr=3e-4, weight_decay=0.1)
    assert isinstance(optimizer, AdamW) and isinstance(optimizer, torch.optim.Optimizer)
    assert (repr(model), list(model.state_dict()), [type(m) for m in model.modules()]) == before
    loss_of(model, 0).backward()
    kinds = {name: type(p.grad).__name__ for name, p in model.named_parameters()}
    placeholders = {name for name, kind in kinds.items() if kind == "GradientPlaceholder"}
    assert placeholders == {
        n for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "pos" not in n
    }
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())


def test_generated_classes_come_from_anywhere() -> None:
    generated = pytest.importorskip("generated")
    spec = "optimizer Half\nhyper lr = 0.5 in [0, inf)\nupdate:\n  weight = weight - lr * grad\n"
    for optimizer_class in (generated.AdamW, forge_dsl.optim.AdamW, forge_dsl.load(spec).Half):
        model = decoder()
        optimizer = forge_dsl.fuse(model, optimizer_class, lr=1e-3)
        train(model, optimizer, range(2))
        assert optimizer.report().gradient_bytes_avoided > 0


def test_unfuse_gives_plain_layers_that_the_optimizer_still_trains() -> None:
    model, twin = decoder(), decoder()
    optimizer, other = forge_dsl.fuse(model, AdamW), forge_dsl.fuse(twin, AdamW)
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    assert forge_dsl.unfuse(model) is model and fused_layers(model) == []
    assert all("forward" not in m.__dict__ for m in model.modules())
    loss_of(model, 2).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    optimizer.step()
    train(twin, other, range(2, 3))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the order of one sum, carried by a step of 1e-3
    assert forge_dsl.unfuse(model) is model


def test_fusing_twice_changes_the_optimizer_and_nothing_else() -> None:
    model = decoder()
    first = forge_dsl.fuse(model, SGD, lr=0.1)
    layers = fused_layers(model)
    second = forge_dsl.fuse(model, AdamW)
    assert fused_layers(model) == layers
    train(model, second, range(2))
    assert not first.state and len(second.state) == len(list(model.parameters()))


def test_subclasses_with_the_same_forward_are_fused_and_others_are_left_with_the_reason() -> None:
    class Same(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(Same(3, 3), Doubled(3, 3), nn.Linear(3, 2))
    optimizer = forge_dsl.fuse(model, AdamW)
    assert fused_layers(model) == ["0", "2"]
    assert reason(optimizer, "1.weight") == ("step", "Doubled has a forward of its own")
    train(model, optimizer, range(2), loss=lambda m, s: m(torch.ones(2, 3)).square().sum())
    assert optimizer.state[model[1].weight]["step"] == optimizer.state[model[0].weight]["step"] == 2


def weight_normed(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


def replaced(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)
    return layer


def hooked(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda g: g)
    return layer


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (weight_normed, "computed in each forward"),
        (pruned, "computed in each forward"),
        (replaced, "replaced on the instance"),
        (hooked, "hook on its gradient"),
    ],
)
def test_layers_that_are_not_what_they_seem_are_left_alone_and_train(change, why: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), change(nn.Linear(3, 2)))
    optimizer = forge_dsl.fuse(model, AdamW)
    from forge_dsl.fusion import examine

    assert fused_layers(model) == ["0"] and why in examine(model, optimizer)[1].obstacle
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(1), loss=lambda m, s: m(torch.ones(2, 3)).square().sum())
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_quantised_and_attention_weights_are_left_alone() -> None:
    frozen = nn.Linear(3, 3)
    frozen.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    model = nn.ModuleDict({"q": frozen, "a": nn.MultiheadAttention(4, 2), "l": nn.Linear(3, 3)})
    optimizer = forge_dsl.fuse(model, AdamW)
    assert fused_layers(model) == ["l"]
    assert reason(optimizer, "a.out_proj.weight") == (
        "step",
        "torch.nn.MultiheadAttention computes with its weight itself",
    )


def test_a_head_tied_to_its_embedding_is_left_to_step_and_follows_torch() -> None:
    model, twin = decoder(tied=True), decoder(tied=True)
    optimizer = forge_dsl.fuse(model, AdamW, eps=1e-3)
    assert "head" not in fused_layers(model)
    assert reason(optimizer, "embed.weight") == ("step", "tied: embed.weight and head.weight are one parameter")
    train(model, optimizer, range(5))
    train(twin, torch.optim.AdamW(twin.parameters(), eps=1e-3, foreach=False), range(5))
    torch.testing.assert_close(model.embed.weight, twin.embed.weight, rtol=0, atol=1e-6)


def test_a_weight_of_two_linear_layers_and_a_layer_used_twice_are_fused_and_follow_torch() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        b.weight = a.weight
        return nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), a)

    model, twin = build(), build()
    optimizer = forge_dsl.fuse(model, AdamW, eps=1e-3)
    assert fused_layers(model) == ["0", "2"]
    loss = lambda m, s: m(torch.ones(2, 4)).square().sum()  # noqa: E731
    train(model, optimizer, range(5), loss=loss)
    train(twin, torch.optim.AdamW(twin.parameters(), eps=1e-3, foreach=False), range(5), loss=loss)
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=0, atol=1e-6)
    assert optimizer.state[model[0].weight]["step"] == 5


def test_parameters_that_share_memory_are_left_to_step() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "free": nn.Linear(3, 3)})
    model["head"].weight.data = model["embed"].weight.data
    optimizer = forge_dsl.fuse(model, AdamW)
    assert fused_layers(model) == ["free"]
    assert reason(optimizer, "head.weight") == ("step", "its memory is also embed.weight's")


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_is_plain_and_independent(copier) -> None:
    model = decoder()
    optimizer = forge_dsl.fuse(model, AdamW)
    train(model, optimizer, range(1))
    other = copier(model)
    before = other.head.weight.detach().clone()
    loss_of(other, 1).backward()
    assert type(other.head.weight.grad) is torch.Tensor and torch.equal(other.head.weight, before)
    train(model, optimizer, range(1, 2))
    assert torch.equal(other.head.weight, before) and not torch.equal(model.head.weight, before)
    again = forge_dsl.fuse(other, AdamW)
    other.zero_grad()
    train(other, again, range(1))
    assert again.state[other.head.weight]["step"] == 1


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_pair_of_model_and_optimizer_is_fused_and_goes_on_alike(copier) -> None:
    model = decoder()
    optimizer = forge_dsl.fuse(model, AdamW)
    train(model, optimizer, range(2))
    other, copied = copier((model, optimizer))
    train(model, optimizer, range(2, 4))
    loss_of(other, 2).backward()
    assert type(other.head.weight.grad).__name__ == "GradientPlaceholder"
    copied.step()
    copied.zero_grad()
    train(other, copied, range(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_nothing_keeps_the_model_alive_and_a_model_without_its_optimizer_is_plain() -> None:
    model = decoder()
    optimizer = forge_dsl.fuse(model, AdamW)
    del optimizer
    gc.collect()
    loss_of(model, 0).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    keeper, watch = forge_dsl.fuse(model, AdamW), weakref.ref(model.blocks[0].up)
    gc.disable()
    try:
        del model
        assert keeper.param_groups
        assert watch() is None, "no cycle holds the layer"
    finally:
        gc.enable()


def test_params_as_torch_takes_them_and_names_in_messages() -> None:
    model = decoder()
    named = forge_dsl.fuse(model, AdamW, params=model.named_parameters())
    assert named.param_groups[0]["param_names"][0] == "embed.weight"
    groups = [
        {"params": model.blocks.parameters(), "lr": 0.1},
        {"params": [model.head.weight], "weight_decay": 0.0, "amsgrad": True},
    ]
    optimizer = forge_dsl.fuse(model, AdamW, params=groups, lr=0.2)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
    assert reason(optimizer, "embed.weight") == ("untrained", "in no param group")
    assert optimizer.describe(model.head.weight).startswith("head.weight")
    train(model, optimizer, range(2))
    assert "max_exp_avg_sq" in optimizer.state[model.head.weight]
    assert "max_exp_avg_sq" not in optimizer.state[model.blocks[0].up.weight]
    model.embed.weight.grad = None
    optimizer.add_param_group({"params": [model.embed.weight], "lr": 0.3})
    assert optimizer.describe(model.embed.weight).startswith("embed.weight")


BAD = [
    (lambda: forge_dsl.fuse(decoder(), torch.optim.AdamW), TypeError, "AdamW is not a generated optimizer class"),
    (
        lambda: forge_dsl.fuse(decoder(), AdamW([nn.Parameter(torch.ones(2))])),
        TypeError,
        r"fuse\(model, AdamW, lr=1e-3",
    ),
    (lambda: forge_dsl.fuse(decoder(), AdamW, params=[]), ValueError, "params is empty"),
    (lambda: forge_dsl.fuse([decoder()], AdamW), TypeError, "expected a torch.nn.Module, got list"),
    (lambda: forge_dsl.fuse(decoder().requires_grad_(False), AdamW), ValueError, "nothing to train"),
    (lambda: forge_dsl.fuse(decoder().double(), AdamW), TypeError, "parameter embed.weight of shape .*float64"),
    (lambda: forge_dsl.fuse(nn.LazyLinear(3), AdamW), ValueError, "weight has no shape yet"),
    (lambda: forge_dsl.fuse(decoder(), AdamW, lr=-1), ValueError, "Invalid learning rate: -1"),
    (lambda: forge_dsl.fuse(decoder(), AdamW, foreach=True), ValueError, "foreach=True is not possible with AdamW"),
    (lambda: forge_dsl.fuse(decoder(), AdamW, momentum=1), TypeError, "momentum"),
    (lambda: forge_dsl.fuse(nn.DataParallel(nn.Linear(2, 2)), AdamW), RuntimeError, "wrapped in DataParallel"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_what_cannot_be_fused_is_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Conv1d(3, 4, 1),
        lambda: nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8)),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_a_model_of_which_nothing_is_fused_is_warned_about(model) -> None:
    with pytest.warns(UserWarning, match=r"found no linear layer of .*report\(\) says why"):
        forge_dsl.fuse(model(), AdamW)


@pytest.mark.parametrize(
    "model", [lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.Linear(4, 4)), lambda: AdamWLinear(4, 4)]
)
def test_a_model_of_which_something_is_or_may_be_fused_is_not(model, recwarn) -> None:
    forge_dsl.fuse(model(), AdamW)
    assert not recwarn.list


def slices(*parameters: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(part) for whole in parameters for part in whole.chunk(3)]


def test_weights_that_are_slices_of_one_tensor_are_left_to_step() -> None:
    """Torch counts their changes together: an update inside backward would make it refuse the graph of the others."""
    model, plain = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))) for _ in range(2))
    start = torch.randn(12, 4)
    for layer, same, weight in zip(model, plain, slices(start), strict=False):
        layer.weight, same.weight = weight, nn.Parameter(weight.detach().clone())
    plain[3].load_state_dict(model[3].state_dict())
    optimizer, other = forge_dsl.fuse(model, AdamW), torch.optim.AdamW(plain.parameters())
    for index in range(3):
        assert reason(optimizer, f"{index}.weight") == (
            "step",
            "its weight and other parameters are slices of one tensor",
        )
    assert reason(optimizer, "3.weight")[0] == "backward"
    x = torch.randn(5, 4)
    for steps, network in ((optimizer, model), (other, plain)):
        network(x).square().sum().backward()
        steps.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_slice_in_its_own_fused_function_is_refused_before_anything_changes() -> None:
    weights = slices(torch.randn(12, 4))
    optimizer = AdamW(weights)
    with pytest.raises(RuntimeError, match=r"\[4, 4\] and .* are slices of one tensor"):
        adamw_linear(torch.randn(2, 4), weights[0])
    apart = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = AdamW(apart)
    adamw_linear(adamw_linear(torch.randn(2, 4), apart[0]), apart[1]).sum().backward()
    optimizer.step()


def test_parts_of_one_storage_with_counts_of_their_own_are_fused() -> None:
    """As flattened parameters are that were set by way of `.data`."""
    flat = torch.randn(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, flat.view(2, 4, 4), strict=True):
        layer.weight.data = part
    optimizer = forge_dsl.fuse(model, AdamW)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert [reason(optimizer, f"{i}.weight")[0] for i in range(2)] == ["backward", "backward"]


@pytest.mark.parametrize("made", [Tensor.to_sparse_csr, Tensor.to_sparse])
def test_a_sparse_input_is_refused_in_forward(made) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = forge_dsl.fuse(model, AdamW)
    with pytest.raises(TypeError, match=r"x is torch.sparse_\w+: a fused layer takes dense tensors"):
        model(made(torch.randn(3, 4).relu()))
    with torch.no_grad():
        model(made(torch.randn(3, 4).relu()))
    assert not optimizer.state


def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    model = decoder()
    with pytest.raises(ValueError):
        forge_dsl.fuse(model, AdamW, lr=-1)
    assert fused_layers(model) == []


def test_a_refused_call_does_not_take_the_weights_from_their_optimizer() -> None:
    model = decoder()
    optimizer = forge_dsl.fuse(model, AdamW)
    groups = [{"params": [model.head.weight]}, {"params": [model.norm.weight], "lr": -1}]
    with pytest.raises(ValueError):
        forge_dsl.fuse(model, SGD, params=groups)
    train(model, optimizer, range(2))
    assert optimizer.state[model.head.weight]["step"] == 2


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_refused_before_anything_is_trained(kind: type[torch.nn.Module]) -> None:
    model = torch.nn.Sequential(kind(5, 6, sparse=True), torch.nn.Linear(6, 4))
    with pytest.raises(ValueError, match=r"0 has sparse=True.*sparse=False, or leave its weight out of params"):
        forge_dsl.fuse(model, SGD)
    forge_dsl.fuse(model, SGD, params=model[1].parameters())
    model[0].requires_grad_(False)
    forge_dsl.fuse(model, SGD)


def test_a_shallow_copy_shares_the_states_and_leaves_the_weights_where_they_are() -> None:
    model = decoder()
    optimizer = forge_dsl.fuse(model, AdamW)
    train(model, optimizer, range(1))
    same = copy.copy(optimizer)
    assert same.state is optimizer.state and same.param_groups is optimizer.param_groups
    train(model, optimizer, range(1))
    del same
    train(model, optimizer, range(1))
    assert optimizer.state[model.head.weight]["step"] == 3


def test_an_input_that_does_not_fit_names_the_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 4))
    optimizer = forge_dsl.fuse(model, AdamW)
    with pytest.raises(RuntimeError, match=r"weight of shape \[4, 3\] \(1\.weight\): expected \[\.\.\., 3\]"):
        model(torch.ones(2, 4))
    assert not optimizer.state
