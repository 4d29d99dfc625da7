"""`optimizer.report()`: what is updated where, why, and what it takes."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

import forge_dsl
from forge_dsl.optim import AdamW
from tests.integration.models import Decoder, decoder, reason


def test_the_report_counts_bytes() -> None:
    model = decoder().bfloat16()
    optimizer = forge_dsl.fuse(model, AdamW, state_dtype=torch.float32)
    report = optimizer.report()
    linear = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and n[:3] not in ("emb", "pos"))
    every = sum(p.numel() for p in model.parameters())
    assert report.gradient_bytes_avoided == 2 * linear and report.gradient_bytes_left == 2 * (every - linear)
    assert report.bytes_per_parameter == pytest.approx(2 + 8 + 2 * (every - linear) / every)
    assert report.unfused_peak_bytes == every * 12
    assert report.peak_bytes == every * 10 + report.gradient_bytes_left + report.workspace
    assert {row.route for row in report.rows} == {"backward", "step"}


def test_the_report_knows_a_hook_that_came_after_fuse_and_one_that_was_there() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight.register_hook(lambda grad: grad)
    model[2].weight.register_hook(lambda grad: grad)
    model[2].weight.requires_grad_(False)
    optimizer = forge_dsl.fuse(model, AdamW)
    model[0].weight.register_hook(lambda grad: grad)
    hooked = "its weight has a hook on its gradient"
    assert reason(optimizer, "0.weight") == ("backward", f"{hooked}, and backward will raise")
    with pytest.raises(RuntimeError, match="has a hook on its gradient"):
        model(torch.ones(2, 4)).sum().backward()
    model[0].weight._backward_hooks.clear()
    # The one that was frozen was left alone too.
    model[2].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model[2].weight]})
    for place in ("1.weight", "2.weight"):
        assert reason(optimizer, place) == ("step", hooked)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_the_report_counts_the_states_of_what_was_frozen_later() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = forge_dsl.fuse(model, AdamW)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.report()
    model[0].requires_grad_(False)
    after = optimizer.report()
    assert [row.states for row in after.rows] == [row.states for row in before.rows]
    assert after.peak_bytes - after.workspace == before.peak_bytes - before.workspace - before.rows[1].gradient


def test_the_report_is_printed(capsys) -> None:
    model = Decoder(tied=True)
    optimizer = forge_dsl.fuse(model, AdamW)
    optimizer.report()
    assert "trained parameters are updated inside backward" in " ".join(capsys.readouterr().out.split())
    with (console := Console(width=200)).capture() as capture:
        optimizer.report(console, details=True)
    assert "tied: embed.weight and head.weight are one parameter" in capture.get()


def test_an_optimizer_without_fuse_reports_what_has_been_used() -> None:
    layer = forge_dsl.optim.AdamWLinear(3, 2)
    optimizer = AdamW(layer.named_parameters())
    assert reason(optimizer, "weight") == ("step", "not yet used by a fused linear function")
    layer(torch.ones(1, 3)).sum().backward()
    assert reason(optimizer, "weight") == ("backward", "by its own fused linear function")
