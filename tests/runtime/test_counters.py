"""Counts and tables: row by row as on a CPU, and all rows in one launch as on a GPU (here the launch is Python)."""

from __future__ import annotations

import pytest
import torch

from forge_dsl.runtime import launch
from forge_dsl.runtime.counters import StepTable
from tests.runtime.handwritten import SGD, AdamW, NAdam, linear, same_bits, snapshot


def fill_tables(rule, hypers, counters, tables, pending, bases, flags) -> None:
    """What the device prologue does, row by row in Python."""
    spec = rule.spec
    values, numbers = {}, iter(hypers.tolist())
    for hyper in spec.hypers:
        values[hyper.name] = tuple(next(numbers) for _ in hyper.ranges) if len(hyper.ranges) > 1 else next(numbers)
    for row in range(len(counters)):
        before = dict(zip(rule.counter_names, counters[row].tolist(), strict=True))
        arguments = {scalar.name: before[scalar.name] for scalar in spec.scalars}
        arguments |= {f"first_{name}": before[f"written_{name}"] == 0 for name in spec.first}
        if spec.uses_step:
            arguments["step"] = before["step"] + 1
        table, scalars = rule.step_scalars(**arguments, **values, **flags)
        tables[row, : len(table)] = torch.tensor([float(v) for v in table])
        after = ([before["step"] + 1] if spec.uses_step else []) + list(scalars) + [1.0] * len(spec.first)
        after += [] if spec.uses_step else [before["_updates"] + 1]
        pending[row] = torch.tensor(after, dtype=torch.float64)


class Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args) -> None:
        self.calls += 1
        fill_tables(*args)


@pytest.fixture
def launches(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(launch, "fill_tables", recorder)
    return recorder


def at_once(optimizer):
    for binding in optimizer.bindings():
        binding.table.fills_all = True
    return optimizer


def run(optimizer_class, wrap, arguments, steps: int = 6):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(3)] + [torch.nn.Parameter(torch.randn(3))]
    optimizer = wrap(optimizer_class(weights, lr=0.05, **arguments))
    for step in range(steps):
        x = torch.randn(4, 3)
        used = weights[: 1 + step % 3] if step else weights[:1]
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.1
        if step == 4 and "momentum" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["momentum"] = 0.9
        sum(linear(x, w, weights[3] if step % 2 else None, optimizer_class).sum() for w in used).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.state_dict()
    return snapshot(optimizer)


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"),
    [(AdamW, {}), (NAdam, {}), (SGD, {"momentum": 0.0, "dampening": 0.5}), (SGD, {"momentum": 0.9, "dampening": 0.5})],
)
def test_all_rows_at_once_are_the_rows_one_by_one(launches, optimizer_class, arguments) -> None:
    one_by_one, all_rows = run(optimizer_class, lambda o: o, arguments), run(optimizer_class, at_once, arguments)
    assert all(same_bits(a, b) for a, b in zip(one_by_one, all_rows, strict=True))
    assert launches.calls == 6, "one launch a step"


def test_hypers_are_uploaded_only_when_they_change(launches, monkeypatch) -> None:
    uploads = []
    monkeypatch.setattr(
        "forge_dsl.runtime.group_arguments.upload", lambda *a: uploads.append(a[0]) or torch.tensor(a[0], dtype=a[1])
    )
    weight = torch.nn.Parameter(torch.randn(3, 3))
    optimizer = at_once(AdamW([weight], lr=0.5))
    for lr in (0.5, 0.5, 0.25, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        linear(torch.ones(1, 3), weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [numbers[0] for numbers in uploads] == [0.5, 0.25]


def test_rows_are_padded_to_sixteen_bytes() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    optimizer = AdamW([weight])
    (table,) = {binding.table for binding in optimizer.bindings()}
    # Nine scalars, and a word for the rounding of the weight and of each of three states.
    assert isinstance(table, StepTable) and table.width == 9 and table.tables.shape == (1, 16)
    table.begin(optimizer.state)
    assert table.row(0).dtype == torch.float32 and table.row(0).shape == (16,)


def test_equal_counts_are_computed_once(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(StepTable, "_compute", lambda *a, f=StepTable._compute: calls.append(a[1]) or f(*a))
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(5)]
    optimizer = AdamW(weights)
    for _ in range(2):
        sum(linear(torch.ones(1, 3), w).sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == [(0.0,), (1.0,)]
