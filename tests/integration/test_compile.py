"""`torch.compile`: one graph, no recompilation, eager's trajectory; and what a compiled graph cannot do is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import forge_dsl
from forge_dsl.optim import AdamW, Lion, adamw_linear
from forge_dsl.runtime import compiled
from tests.integration.models import PAIRS, Pair, decoder, tokens_of, train

pytestmark = pytest.mark.skipif(not compiled.SUPPORTED, reason=f"needs torch {compiled.OLDEST}")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
STEPS = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compile_(model: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def layers(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, **options))


def fused(model: nn.Module, **options: Any) -> AdamW:
    return forge_dsl.fuse(model, AdamW, **{"lr": 1e-2, **options})


def data(step: int = 0) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def run(model: Any, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        model(data(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


class Untouched:
    """The model and the optimizer as they were, to be compared later."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.states = len(optimizer.state)

    def check(self) -> None:
        for (name, now), before in zip(self.model.named_parameters(), self.weights, strict=True):
            assert torch.equal(now, before), name
        assert len(self.optimizer.state) == self.states


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours)
def test_all_optimizers_over_a_schedule_have_the_bits_of_eager(pair: Pair) -> None:
    trained = []
    counter = CompileCounterWithBackend("aot_eager")
    for wrap in (lambda model: model, lambda model: compile_(model, counter)):
        model = decoder()
        optimizer = forge_dsl.fuse(model, pair.fused(), **pair.arguments)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        train(wrap(model), optimizer, range(STEPS), scheduler)
        trained.append((model, optimizer.state_dict()))
    assert counter.frame_count == 1
    (eager, states), (model, ours) = trained
    assert_same(model, eager)
    for index, state in states["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["state"][index][name], value), (index, name)


@needs_compiler
def test_inductor_updates_the_weight_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    deliver = compiled._deliver

    def record(binding: Any, task: int, x: Tensor, dy: Tensor, passed: Tensor) -> None:
        seen.append(passed.data_ptr() == binding.weight.data_ptr())
        deliver(binding, task, x, dy, passed)

    monkeypatch.setattr(compiled, "_deliver", record)
    eager, model = layers(), layers()
    run(eager, fused(eager))
    run(compile_(model, "inductor"), fused(model))
    assert seen == [True] * 6
    for x, y in zip(model.parameters(), eager.parameters(), strict=True):
        # Inductor's tanh is not torch's: 2 ulp of it, and Adam's first steps divide by the gradient's size.
        torch.testing.assert_close(x, y, rtol=0, atol=2e-6)


def test_nothing_but_metadata_changes_between_compiled_and_eager_steps() -> None:
    eager, model = layers(), layers()
    run(eager, fused(eager), 4)
    optimizer = fused(model)
    with_compile = compile_(model)
    for step in range(4):
        (model if step % 2 else with_compile)(data(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, eager)


def test_the_function_compiles_too() -> None:
    weights = [nn.Parameter(layers()[0].weight.detach().clone()) for _ in range(2)]
    for weight, wrap in zip(weights, (lambda f: f, compile_), strict=True):
        optimizer = AdamW([weight], lr=1e-2)
        call = wrap(lambda x, w: adamw_linear(x, w).square().sum())
        for step in range(3):
            call(data(step), weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*weights)


class Twice(nn.Module):
    """Uses a square layer twice, the second time after a break in the graph if asked."""

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.square, self.split = nn.Linear(6, 8), nn.Linear(8, 8), split

    def forward(self, x: Tensor) -> Tensor:
        x = self.square(self.first(x)).tanh()
        if self.split:
            torch._dynamo.graph_break()
        return self.square(x)


def _siamese(model: Any) -> Any:
    return lambda x: model(x) + model(x.flip(0))


@pytest.mark.parametrize(
    ("split", "wrap", "backend"),
    [
        (False, lambda model: model, "aot_eager"),
        pytest.param(True, lambda model: model, "inductor", marks=needs_compiler),
        pytest.param(False, _siamese, "inductor", marks=needs_compiler),
    ],
    ids=["in one graph", "in two graphs", "by a model that is called twice"],
)
def test_a_layer_that_is_used_twice_is_updated_once_from_the_sum(split: bool, wrap: Any, backend: str) -> None:
    eager, model = Twice(), Twice(split)
    run(wrap(eager), fused(eager))
    optimizer = fused(model)
    run(wrap(torch.compile(model, backend=backend)), optimizer)
    assert optimizer.state[model.square.weight]["step"] == 3
    for x, y in zip(model.parameters(), eager.parameters(), strict=True):
        # The uses deliver in another order, so the sum over their tokens may round differently.
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_checkpointed_segments_are_recomputed_with_the_old_weight() -> None:
    eager, model = layers(), layers()
    run(eager, fused(eager))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    run(compile_(Checkpointed()), fused(model))
    assert_same(model, eager)


class Recomputed(nn.Module):
    """Uses one pair of layers in two checkpointed segments, and one of them outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.sin(self.a(x)))) + x

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return self.a(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_layer_of_several_checkpointed_segments_waits_for_all_of_them(backend: str) -> None:
    eager, model = Recomputed(), Recomputed()
    run(eager, fused(eager))
    optimizer = fused(model)
    run(compile_(model, backend), optimizer)
    assert optimizer.state[model.a.weight]["step"] == 3
    for x, y in zip(model.parameters(), eager.parameters(), strict=True):
        # The uses deliver in another order, and Inductor's sine and tanh are not torch's.
        torch.testing.assert_close(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_hooks_that_copy_what_is_saved_lose_no_update(backend: str) -> None:
    eager, model = layers(), layers()
    run(eager, fused(eager))
    optimizer = fused(model)
    call = compile_(model, backend)
    for step in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = call(data(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for x, y in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-6)


def test_models_are_traced_beside_placeholders() -> None:
    """Another batch, an evaluation and an export come between backward and zero_grad()."""
    eager, model = layers(), layers()
    run(eager, fused(eager), 2)
    optimizer = fused(model)
    with torch._dynamo.config.patch(error_on_recompile=False):
        call = compile_(model)
        for step in range(2):
            loss = call(data(step)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                call(data(9)[:3])
            optimizer.step()
        torch.export.export(model, (data(),))
        model.share_memory()
    assert_same(model, eager)


def test_autocast_over_fp32_weights_is_eagers() -> None:
    def train_with(wrap: Any) -> nn.Module:
        model = layers()
        optimizer = fused(model)
        call = wrap(model)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = call(data(step))
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert_same(train_with(compile_), train_with(lambda model: model))


def test_a_frozen_layer_is_plain_and_a_layer_of_no_tokens_still_steps() -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    optimizer = fused(model)
    before = model[0].weight.clone()
    compile_(model, dynamic=False)(torch.zeros(0, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert optimizer.state[model[2].weight]["step"] == 1


def test_a_layer_that_is_frozen_when_backward_runs_is_left_alone() -> None:
    model = layers()
    optimizer = fused(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = data().requires_grad_()
    loss = compile_(model)(x).square().sum()
    model.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert x.grad is not None
    assert all(map(torch.equal, model.parameters(), before)) and not optimizer.state


def test_evaluation_under_no_grad_and_a_gradient_of_the_input_update_nothing() -> None:
    model = layers()
    optimizer = fused(model)
    with torch._dynamo.config.patch(error_on_recompile=False):
        call = compile_(model)
        as_it_was = Untouched(model, optimizer)
        with torch.no_grad():
            call(data())
        x = data().requires_grad_()
        (dx,) = torch.autograd.grad(call(x).square().sum(), x)
        call(x).square().sum().backward(inputs=[x])
    as_it_was.check()
    plain = layers()
    y = data().requires_grad_()
    assert torch.equal(dx, torch.autograd.grad(plain(y).square().sum(), y)[0])


def test_the_gradient_of_a_weight_cannot_be_asked_for() -> None:
    model = layers()
    optimizer = fused(model)
    as_it_was = Untouched(model, optimizer)
    with pytest.raises(RuntimeError, match=r"2\.weight \[4, 8\].*call the model that is not compiled"):
        torch.autograd.grad(compile_(model)(data()).sum(), model[2].weight)
    as_it_was.check()


def _accumulate(model: nn.Module, call: Any, optimizer: Any) -> Untouched:
    call(data()).sum().backward()
    as_it_was = Untouched(model, optimizer)
    call(data()).sum().backward()
    return as_it_was


def _forget_zero_grad(model: nn.Module, call: Any, optimizer: Any) -> None:
    call(data()).sum().backward()
    optimizer.step()
    call(data()).sum().backward()


def _modify(model: Any, call: Any, optimizer: Any) -> None:
    loss = call(data()).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    loss.backward()


def _ordinary(model: Any, call: Any, optimizer: Any) -> None:
    model[2].weight.grad = torch.ones_like(model[2].weight)
    call(data()).sum().backward()


def _mixed(model: Any, call: Any, optimizer: Any) -> None:
    (call(data()).sum() + model(data()).sum()).backward()


def _two_owners(model: Any, call: Any, optimizer: Any) -> None:
    call(data()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = call(data()).sum()
    model.newer = fused(model)
    loss.backward()


WRONG = {
    "a second backward before step": (_accumulate, "sum the losses and call backward once"),
    "no zero_grad after step": (_forget_zero_grad, r"zero_grad\(\) was not called"),
    "a weight changed between forward and backward": (_modify, "modified (in place|by an inplace)"),
    "an ordinary gradient is there already": (_ordinary, "already has an ordinary gradient"),
    "compiled and eager uses in one backward": (_mixed, "compile every use of this weight, or none"),
    "a newer optimizer took the weights": (_two_owners, "was given to a newer optimizer"),
}


@pytest.mark.parametrize(("mistake", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_right_raises(mistake: Any, message: str) -> None:
    model = layers()
    optimizer = fused(model)
    with pytest.raises(RuntimeError, match=message):
        mistake(model, compile_(model), optimizer)


class Reads(nn.Module):
    """Two layers, and between them a product with what `read` makes of the second one's weight, a constant."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) @ self.read(self.second.weight))


@pytest.mark.parametrize("read", [lambda w: w.detach(), lambda w: w.detach().t(), lambda w: w.detach()[:, :]])
def test_a_weight_that_is_read_as_a_constant_after_its_update_is_refused_while_compiling(read: Any) -> None:
    model = Reads(read)
    optimizer = fused(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(Exception, match="modified by an inplace operation"):
        compile_(model)(torch.randn(4, 8)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)) and not optimizer.state


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.detach().clone(),
        lambda w: torch.eye(8) * w.detach().norm(),
        lambda w: F.normalize(w.detach()),
        lambda w: torch.where(w.detach() > 0, 1.0, -1.0),
    ],
)
def test_a_constant_that_does_not_read_it_again_is_eagers(read: Any) -> None:
    torch.manual_seed(0)
    model, twin = Reads(read), Reads(read)
    twin.load_state_dict(model.state_dict())
    optimizer, other = fused(model), fused(twin)
    for steps, call in ((optimizer, compile_(model)), (other, twin)):
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            call(x).square().sum().backward()
            steps.step()
            steps.zero_grad()
    assert_same(model, twin)


def test_a_refused_backward_changes_nothing() -> None:
    model = layers()
    optimizer = fused(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # the layer that backward reaches last
    as_it_was = Untouched(model, optimizer)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        compile_(model)(data()).sum().backward()
    as_it_was.check()


def test_another_graph_that_is_still_alive_is_in_the_way() -> None:
    model = layers()
    optimizer = fused(model)
    call = compile_(model)
    kept = call(data())
    as_it_was = Untouched(model, optimizer)
    with pytest.raises(RuntimeError, match=r"is still alive .* was not part of this backward"):
        call(data()).sum().backward()
    as_it_was.check()
    optimizer.step()
    optimizer.zero_grad()
    del kept
    call(data()).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_discarded_forwards_leave_nothing_behind() -> None:
    from forge_dsl.runtime import tickets

    model = layers()
    optimizer = fused(model)
    call = compile_(model)
    for _ in range(600):
        call(data())
    assert not any(use.binding().optimizer is optimizer for use in tickets.waiting_uses())
    assert sum(len(binding.uses) for binding in optimizer.bindings()) < 200
    run(call, optimizer, 2)
    assert optimizer.state[model[0].weight]["step"] == 2


def test_weights_that_share_memory_are_not_told_apart() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    alias = nn.Parameter(weight.data)
    optimizer = AdamW([weight, alias])
    with pytest.raises(RuntimeError, match="share their memory"):
        compile_(lambda x: adamw_linear(x, weight))(data())
    assert not optimizer.state


def test_a_model_that_is_plain_compiles_plainly() -> None:
    model = layers()
    optimizer = fused(model)
    forge_dsl.unfuse(model)
    compile_(model)(data()).sum().backward()
    assert model[0].weight.grad is not None
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_the_function_of_another_optimizer_is_refused() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = Lion([weight])
    with pytest.raises(TypeError, match="belongs to Lion, not to AdamW"):
        compile_(lambda x: adamw_linear(x, weight))(data())
    del optimizer


def test_a_release_that_cannot_compile_says_so_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SUPPORTED", False)
    eager, model = layers(), layers()
    run(eager, fused(eager))
    with (
        torch._dynamo.config.patch(error_on_recompile=False),
        pytest.warns(UserWarning, match="cannot compile layers that are updated inside backward"),
    ):
        run(torch.compile(model, backend="aot_eager"), fused(model))
    assert_same(model, eager)


def test_the_operators_keep_the_compilers_contracts() -> None:
    model = layers()
    optimizer = fused(model)
    arguments = (data().requires_grad_(), model[0].weight, None, "AdamW")
    torch.library.opcheck(torch.ops.forge_dsl.linear.default, arguments, test_utils="test_autograd_registration")
    schema = torch.ops.forge_dsl.linear_backward.default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["weight"]
    del optimizer


def test_a_loss_function_around_the_model_compiles_in_one_graph() -> None:
    eager, model = decoder(), decoder()
    train(eager, fused(eager), range(3))
    call = compile_(lambda tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))

    def loss(_: nn.Module, step: int) -> Tensor:
        tokens = tokens_of(step)
        return call(tokens[:, :-1], tokens[:, 1:])

    train(model, fused(model), range(3), loss=loss)
    assert_same(model, eager)


def test_inductor_is_imported_by_nobody_else() -> None:
    code = "import sys, forge_dsl.optim; sys.exit(any(m.startswith('torch._inductor') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
