"""`step()` goes past torch's wrapper where nobody would notice, and through it where a hook or a profiler would."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forge_dsl.optim import SGD, AdamW
from forge_dsl.runtime import step_hooks


def make(optimizer_class: type = AdamW) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.ones(3))
    return weight, optimizer_class([weight], lr=0.5)


def one_step(weight: torch.nn.Parameter, optimizer: Any) -> None:
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()


def test_hooks_of_one_optimizer_run_around_every_step() -> None:
    weight, optimizer = make()
    one_step(weight, optimizer)
    heard: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda *_: heard.append(("before", weight[0].item())))
    after = optimizer.register_step_post_hook(lambda *_: heard.append(("after", weight[0].item())))
    first = weight[0].item()
    one_step(weight, optimizer)
    assert heard == [("before", first), ("after", weight[0].item())]
    before.remove()
    after.remove()
    one_step(weight, optimizer)
    assert len(heard) == 2


@pytest.fixture
def heard_of_all() -> Iterator[list[Any]]:
    heard: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: heard.append("before")),
        register_optimizer_step_post_hook(lambda *_: heard.append("after")),
    ]
    yield heard
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("optimizer_class", [AdamW, SGD])
def test_hooks_of_all_optimizers_run(heard_of_all: list[Any], optimizer_class: type) -> None:
    one_step(*make(optimizer_class))
    assert heard_of_all == ["before", "after"]


def test_a_pre_hook_may_replace_the_arguments() -> None:
    weight, optimizer = make()
    optimizer.register_step_pre_hook(lambda _optimizer, _args, _kwargs: ((_optimizer, lambda: 7), {}))
    weight.sum().backward()
    assert optimizer.step() == 7


def test_a_profiler_sees_step_and_zero_grad() -> None:
    weight, optimizer = make()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(weight, optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names


def test_a_profiler_of_another_thread_is_noticed() -> None:
    assert not step_hooks.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), ThreadPoolExecutor(1) as pool:
        assert pool.submit(step_hooks.is_profiled).result()
    assert not step_hooks.is_profiled()


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = make()

    def refuse(*_: Any) -> None:
        raise AssertionError("torch's wrapper was called")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    one_step(weight, optimizer)
    assert not weight.eq(1).any()


def test_a_class_that_overrides_step_has_its_hooks_as_in_torch() -> None:
    class Counting(AdamW):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    heard: list[str] = []
    weight, optimizer = make(Counting)
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    one_step(weight, optimizer)
    expected = 1 + bool(getattr(AdamW.step, "hooked", False))  # as torch does, once for each class in use
    assert optimizer.steps == 1 and len(heard) == expected


def test_without_torchs_wrapper_nothing_is_left_out() -> None:
    def step() -> None:
        """As torch would leave it if it did not wrap."""

    assert step_hooks.only_where_heard(step) is step


def test_a_scheduler_counts_the_steps() -> None:
    weight, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=10)
    one_step(weight, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
