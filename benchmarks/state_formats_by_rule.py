"""Error of the weight after 1,000 steps of every rule, with its states in each format, against float64. CPU, one core.

    python benchmarks/state_formats_by_rule.py

Through the optimizers themselves, on fp32 weights of zero and the gradients "spread" of `state_formats.py`: rows whose
scales are log-uniform from 1e-8 to 1, with a log-normal spread of one e-fold within a row. The truth is the same
reference in float64, on the same fp32 gradients.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import state_formats

from forge_dsl import optim, testing

FORMATS: dict[str, Any] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "fp8": "fp8"}


@dataclass(frozen=True)
class Setting:
    """A rule with the arguments under which it is measured."""

    label: str
    name: str
    hypers: dict[str, Any]
    flags: dict[str, bool]


SETTINGS = (
    Setting("AdamW", "AdamW", {"weight_decay": 0.0}, {}),
    Setting("AdamW, amsgrad", "AdamW", {"weight_decay": 0.0}, {"amsgrad": True}),
    Setting("NAdam", "NAdam", {}, {}),
    Setting("RAdam", "RAdam", {}, {}),
    Setting("Lion", "Lion", {}, {}),
    Setting("RMSprop", "RMSprop", {}, {}),
    Setting("RMSprop, centered, momentum 0.9", "RMSprop", {"momentum": 0.9}, {"centered": True}),
    Setting("Adagrad", "Adagrad", {}, {}),
    Setting("SGDMomentum, 0.9", "SGDMomentum", {"momentum": 0.9}, {}),
)

# Which of a rule's states it is that 8 bits do not suit: place in SETTINGS, formats.
MIXED: tuple[tuple[int, dict[str, str]], ...] = (
    (0, {"exp_avg": "int8", "exp_avg_sq": "bf16"}),
    (0, {"exp_avg": "bf16", "exp_avg_sq": "int8"}),
    (1, {"exp_avg": "int8", "exp_avg_sq": "int8", "max_exp_avg_sq": "bf16"}),
    (1, {"exp_avg": "int8", "exp_avg_sq": "bf16", "max_exp_avg_sq": "bf16"}),
    (6, {"square_avg": "int8", "grad_avg": "bf16", "momentum_buffer": "bf16"}),
    (6, {"square_avg": "bf16", "grad_avg": "bf16", "momentum_buffer": "int8"}),
)


def truth(setting: Setting) -> Tensor:
    """The weight in float64."""
    rule = getattr(optim, setting.name).rule
    hypers = {h.name: setting.hypers.get(h.name, h.default) for h in rule.spec.hypers}
    flags = {f.name: setting.flags.get(f.name, f.default) for f in rule.spec.flags}
    case = testing.Case(hypers, flags, tuple(rule.switches(**hypers, **flags)))
    shape = (state_formats.ROWS, state_formats.COLUMNS)
    problem = testing.make_problem(rule, case, shape, torch.float64, torch.float64, seed=0, warm=False)
    problem.weight.zero_()
    for g in state_formats.gradients("spread"):
        table = testing.next_table(rule, case, problem, torch.float64)
        testing.reference_step(rule, case, problem, g.to(problem.weight.device, torch.float64), table)
    return problem.weight.cpu()


def trained(setting: Setting, form: Any) -> Tensor:
    """The weight with its states in a format, or in formats by name."""
    weight = torch.nn.Parameter(torch.zeros(state_formats.ROWS, state_formats.COLUMNS))
    make = getattr(optim, setting.name)
    optimizer = make([weight], **setting.hypers, **setting.flags, state_dtype=form, schedule="banded")
    for g in state_formats.gradients("spread"):
        weight.grad = g
        optimizer.step()
    return weight.detach().double()


def errors(got: Tensor, want: Tensor) -> str:
    """Error of the change over the change in the 2-norm, and of the worst coordinate over the mean change."""
    off = got - want
    return f"{(off.norm() / want.norm()).item():.2g}, {(off.abs().max() / want.abs().mean()).item():.2g}"


def main() -> None:
    torch.set_num_threads(1)
    print("| rule | " + " | ".join(f"{name}: error, worst" for name in FORMATS) + " |")
    print("|---|" + "---|" * len(FORMATS))
    for setting in SETTINGS:
        want = truth(setting)
        cells = [errors(trained(setting, form), want) for form in FORMATS.values()]
        print(f"| {setting.label} | " + " | ".join(cells) + " |", flush=True)
    print("\n| rule | states | error, worst |\n|---|---|---|")
    for index, form in MIXED:
        setting = SETTINGS[index]
        words = ", ".join(f"{name} {kind}" for name, kind in form.items())
        print(f"| {setting.label} | {words} | {errors(trained(setting, form), truth(setting))} |", flush=True)


if __name__ == "__main__":
    main()
