"""What an update keeps for the next one of its weight is used only while it is true: every change shows at once.

Two copies of one training run: the first keeps, the second forgets before each backward. They have to agree to the bit,
whatever happens between two steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import fp8, optim
from forge_dsl.formats import registry
from forge_dsl.runtime import coded, hopper, launch, trust, update
from forge_dsl.selection import choose
from tests.runtime.handwritten import AdamW, linear

Change = Callable[[torch.nn.Parameter, AdamW], AdamW | None]


def replace_data(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    weight.data = weight.data * 2


def transpose_data(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    weight.data = weight.data.t()


def replace_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"] * 3


def replace_data_of_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg"].data = optimizer.state[weight]["exp_avg"] * 3


def transpose_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].t()


def cast_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg_sq"] = optimizer.state[weight]["exp_avg_sq"].bfloat16()


def cast_data_of_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg_sq"].data = optimizer.state[weight]["exp_avg_sq"].bfloat16()


def delete_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    del optimizer.state[weight]["exp_avg"]


def clear_states(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state.clear()


def set_state(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    moment = optimizer.state[weight]["exp_avg"]
    moment.set_((moment * 3).untyped_storage(), 0, moment.shape, moment.stride())


def transpose_state_in_place(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg"].t_()


def swap_states(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    state = optimizer.state[weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def empty_entry(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight]["exp_avg"] = None


def replace_entries(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.state[weight] = {name: tensor.clone() for name, tensor in optimizer.state[weight].items()}


def move_data(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    # Not at a multiple of 16 bytes any more.
    weight.data = torch.cat([torch.zeros(1), weight.detach().flatten()])[1:].view(weight.shape)


def reload(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1
    optimizer.load_state_dict(saved)


def switch_variant(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def change_rate(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0)


def change_rates_in_place(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    optimizer.param_groups[0]["betas"] = [0.5, 0.9]
    optimizer.prepare_replay()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["betas"][0] = 0.75


def change_schedule(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.schedule, optimizer.arithmetic = "banded", "exact"


def change_bits(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.gradient_bits = 16


def save_activations(weight: torch.nn.Parameter, optimizer: AdamW) -> None:
    optimizer.saved_activations = "fp8"


def replace_optimizer(weight: torch.nn.Parameter, optimizer: AdamW) -> AdamW:
    return AdamW([weight], lr=0.3)


CHANGES: list[Change] = [
    replace_data,
    transpose_data,
    replace_state,
    replace_data_of_state,
    transpose_state,
    cast_state,
    cast_data_of_state,
    delete_state,
    clear_states,
    set_state,
    transpose_state_in_place,
    swap_states,
    empty_entry,
    replace_entries,
    move_data,
    reload,
    switch_variant,
    change_rate,
    change_rates_in_place,
    change_schedule,
    change_bits,
    save_activations,
    replace_optimizer,
]


def operands(step: int) -> tuple[Tensor, Tensor]:
    """Other numbers in each step, and in some of them another number of tokens or other strides."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3 + step % 2, 6, generator=generator)
    dy = torch.randn(1, 6, generator=generator).expand(len(x), 6)
    return (x.t().contiguous().t() if step == 3 else x), dy


def train(change: Change, forgets: bool) -> list[Tensor]:
    weight = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(7)))
    optimizer = AdamW([weight], lr=1e-2)
    for step in range(6):
        if step == 3:
            optimizer = change(weight, optimizer) or optimizer
            gc.collect()
        if forgets:
            for binding in optimizer.bindings():
                binding.kept = binding.route = None
        x, dy = operands(step)
        linear(x, weight).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
    held = optimizer.state[weight]
    return [weight.detach(), *[held[name] for name in sorted(held)]]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps_shows_at_once(change: Change) -> None:
    kept, forgotten = train(change, forgets=False), train(change, forgets=True)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
        for a, b in zip(kept, forgotten, strict=True)
    )


class Recorder:
    """Stands for a launch on Hopper: notes the addresses that each update would go to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.anew = 0

    def __call__(self, x: Any, dy: Any, weight: Any, states: Any, table: Any, kept: Any) -> None:
        self.calls.append(hopper.addresses_of(weight, states, table, kept))
        self.anew += 1

    def again(self, weight: Any, states: Any, table: Any, kept: Any) -> Callable[[int, int], bool]:
        addresses = hopper.addresses_of(weight, states, table, kept)
        return lambda _dy, _x: self.calls.append(addresses) or True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(update, "_find_route", lambda *_: ("hopper", recorder))
    monkeypatch.setattr(launch, "fill_tables", lambda *_: None)
    trust._HELD.add(recorder)
    return recorder


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_launch_gets_the_addresses_where_everything_lies_now(change: Change, recorder: Recorder) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = AdamW([weight])
    for step in range(6):
        if step == 3:
            optimizer = change(weight, optimizer) or optimizer
        for binding in optimizer.bindings():
            binding.table.fills_all = True  # one row for all steps, as on a GPU
        linear(torch.ones(2, 6), weight).sum().backward()
        binding = optimizer.binding_of(weight)
        kept = binding.kept
        assert kept is not None
        held = kept.in_order(optimizer.state[weight])
        now = hopper.addresses_of(weight, held, binding.table.row(binding.row), kept.storage)
        assert len(recorder.calls) == step + 1 and recorder.calls[-1] == now
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.anew < 6, "nothing was kept"


def test_numbers_of_another_type_in_the_same_memory_are_noticed(recorder: Recorder) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6).bfloat16())
    optimizer = AdamW([weight])
    for step in range(4):
        if step == 2:
            moment = optimizer.state[weight]["exp_avg"]
            moment.data = moment.detach().view(torch.float16)
        before = recorder.anew
        linear(torch.ones(2, 6).bfloat16(), weight).sum().backward()
        assert recorder.anew - before == (step in (0, 2))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("before", [{}, {registry.LOW_KEY: None}], ids=["absent", "None"])
def test_bits_that_come_later_are_noticed(before: dict[str, None], recorder: Recorder) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6).bfloat16())
    optimizer = AdamW([weight])
    for step in range(4):
        if step == 1:
            optimizer.state[weight].update(before)
        if step == 3:
            optimizer.state[weight][registry.LOW_KEY] = torch.zeros(6, 6, dtype=torch.int8)
        linear(torch.ones(2, 6).bfloat16(), weight).sum().backward()
        kept = optimizer.binding_of(weight).kept
        assert kept is not None and kept.storage.formats[0] == ("plain" if step < 3 else "bf16+8")
        optimizer.step()
        optimizer.zero_grad()


def routes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every time that a route is worked out from now on."""
    found: list[Any] = []
    original = update._find_route
    monkeypatch.setattr(update, "_find_route", lambda *a: found.append(a) or original(*a))
    return found


def test_a_route_is_worked_out_once_and_again_when_operands_settings_or_tables_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = routes(monkeypatch)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = AdamW([weight])

    def count(x: Tensor, dy: Tensor | None = None) -> int:
        before = len(found)
        linear(x, weight).backward(torch.ones(len(x), 8) if dy is None else dy)
        optimizer.step()
        optimizer.zero_grad()
        return len(found) - before

    x = torch.ones(4, 8)
    assert [count(x), count(x), count(x.clone())] == [1, 0, 0]
    assert [count(torch.ones(5, 8)), count(torch.ones(5, 8))] == [1, 0]
    assert count(torch.ones(8, 5).t()) == 1
    assert count(torch.ones(41)[1:].view(5, 8)) == 1  # not at a multiple of 16 bytes
    uneven = torch.ones(33)[1:].view(4, 8)
    assert [count(uneven), count(x, uneven), count(x, uneven), count(x)] == [1, 1, 0, 1]
    for name, value in (("schedule", "banded"), ("arithmetic", "exact"), ("gradient_bits", 32)):
        setattr(optimizer, name, value)
        assert [count(x), count(x)] == [1, 0], name
    choose.forget()
    assert [count(x), count(x)] == [1, 0]


def test_a_kernel_that_could_not_be_checked_is_asked_about_again(recorder: Recorder, monkeypatch: Any) -> None:
    trust._HELD.discard(recorder)
    found = routes(monkeypatch)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = AdamW([weight])
    for step in range(4):
        if step == 2:
            trust._HELD.add(recorder)
        linear(torch.ones(2, 4), weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) == 3


def test_states_that_were_replaced_are_not_kept_alive() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = AdamW([weight])
    linear(torch.ones(2, 6), weight).sum().backward()
    optimizer.step()
    address = torch.multiprocessing.reductions.StorageWeakRef(optimizer.state[weight]["exp_avg"].untyped_storage())
    optimizer.state.clear()
    assert address.expired()


def test_scales_of_a_weight_in_codes_are_those_that_it_has_now() -> None:
    weight = fp8.parameter(torch.randn(8, 64))
    optimizer = optim.AdamW([weight])
    for renewed in (False, True):
        if renewed:
            coded.register(weight, coded.of(weight).scales.clone(), torch.float32)
        optim.adamw_linear(torch.ones(2, 64), weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = optimizer.binding_of(weight).kept
        assert kept is not None and kept.storage.extras[0] is not None
        assert kept.storage.extras[0].data_ptr() == coded.of(weight).scales.data_ptr()
