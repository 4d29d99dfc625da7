"""States of any domain, and values without a coordinate, in every format: codes follow the domain's sign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_dsl
from forge_dsl import testing
from forge_dsl.optim import AdamW
from forge_dsl.spec import Range, StateSpec

launched = pytest.mark.skipif(not testing.can_launch(AdamW.rule), reason="needs a GPU, or Triton's interpreter")
DOMAINS = ["in [-1, 1]", "in [-1, inf)", "in (-inf, inf)", "in (-inf, 1]", ""]
FORMS = ["bf16", "int8", "fp8"]


def bounded(folder: Path, domain: str) -> Any:
    """A momentum that is clamped, with a declared domain."""
    source = f"""optimizer Pm
hyper lr = 1e-2 in [0, inf)
state m {domain}
update:
  m = clamp(0.9 * m + grad, -1, 1)
  weight = weight - lr * m
"""
    path = folder / "pm.opt"
    path.write_text(source)
    return forge_dsl.load(path).Pm


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()


def losses(rule: Any, steps: int = 12, **options: Any) -> list[float]:
    net = model()
    optimizer = forge_dsl.fuse(net, rule, **options)
    found = []
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (net(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("form", FORMS[1:])
def test_a_state_that_may_be_negative_has_a_sign_in_every_format(domain: str, form: str, tmp_path: Path) -> None:
    rule = bounded(tmp_path, domain)
    assert not rule.rule.spec.states[0].nonnegative
    near = losses(rule, state_dtype="fp32")
    # Losses near 1, of which 8-bit codes of a momentum move the third digit.
    assert losses(rule, state_dtype=form) == pytest.approx(near, abs=5e-3)


@launched
@pytest.mark.parametrize("form", FORMS[1:])
def test_the_kernels_have_the_same_code(form: str, tmp_path: Path) -> None:
    rule = bounded(tmp_path, "in [-1, 1]")
    assert losses(rule, 2, state_dtype=form, schedule="fused") == losses(rule, 2, state_dtype=form, schedule="banded")


@pytest.mark.parametrize(
    ("domain", "sign"),
    [
        (Range(low=0.0), True),
        (Range(low=0.0, high=1.0), True),
        (Range(low=0.5, low_open=True), True),
        (Range(low=-1.0, high=1.0), False),
        (Range(), False),
        (Range(high=0.0), False),
        (None, False),
    ],
    ids=str,
)
def test_typical_numbers_are_of_the_domain(domain: Range | None, sign: bool) -> None:
    state = StateSpec(name="s", domain=domain)
    assert state.nonnegative == sign
    for noise in (0.01, 0.5, 0.99):
        assert domain is None or state.typical(noise) in domain
    assert torch.equal(state.typical(torch.tensor([0.5])), torch.tensor([float(state.typical(0.5))]))


def constant(folder: Path, body: str) -> Any:
    """A rule that gives all coordinates one number, in one variant at least."""
    path = folder / "cst.opt"
    flag = "flag f = false\n" if " f " in body else ""
    path.write_text(f"optimizer Cst\nhyper lr = 1e-2 in [0, inf)\n{flag}state aux\nupdate:\n{body}")
    return forge_dsl.load(path).Cst


CONSTANT = {
    "a state": "  aux = lr\n  weight = weight - (lr * grad + 0 * aux)\n",
    "the weight": "  aux = 0.5 * aux + grad\n  weight = lr\n",
    "in a variant": "  aux = lr if f else aux + grad\n  weight = weight - lr * aux\n",
}


@pytest.mark.parametrize("schedule", ["banded", pytest.param("fused", marks=launched)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", CONSTANT)
def test_a_value_without_a_coordinate_is_stored_everywhere(
    which: str, form: str, schedule: str, tmp_path: Path
) -> None:
    rule = constant(tmp_path, CONSTANT[which])
    net = model()
    flags = {"f": True} if which == "in a variant" else {}
    optimizer = forge_dsl.fuse(net, rule, state_dtype=form, schedule=schedule, stochastic_rounding=False, **flags)
    net(torch.ones(4, 64).bfloat16()).float().mean().backward()
    optimizer.step()
    decoded = optimizer.decoded_state_dict()["state"]
    for index, parameter in enumerate(net.parameters()):
        held = parameter if which == "the weight" else decoded[index]["aux"]
        # To nearest: fp8 is within 1/16.
        torch.testing.assert_close(held.detach().float(), torch.full(parameter.shape, 0.01), rtol=2**-4, atol=0.0)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1e-3, 1e-40])
def test_a_write_through_data_moves_a_weight_by_less_than_half_a_unit(bits: int, value: float) -> None:
    net = model()
    optimizer = forge_dsl.fuse(net, AdamW, lr=1e-5, extra_bits=bits, weight_decay=0.0)
    for _ in range(2):
        net(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = net[0].weight
    weight.data.fill_(value)
    written = weight.detach().clone()
    net(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert weight.isfinite().all()
    unit = 2.0**-7 * written.float().abs() + 1e-38
    assert ((weight.float() - written.float()).abs() <= 2e-5 + unit).all()


@pytest.mark.parametrize("option", ["state_dtype", "extra_bits", "weight_dtype", "gradient_bits", "schedule"])
def test_options_of_the_whole_optimizer_are_refused_in_a_param_group(option: str) -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=f"{option} of a param group: it is an option of the whole optimizer"):
        AdamW([{"params": [weight], option: "int8"}])
