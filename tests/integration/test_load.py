"""What `forge_dsl.load` makes: warnings of the compiler are passed on, and every name works like any other."""

from __future__ import annotations

import warnings

import pytest
import torch

import forge_dsl

LEAVES_ITS_DOMAIN = """
optimizer Leaves

hyper lr = 0.1 in [0, inf)

state total in [0, inf)

update:
  total  = 0.5 * total + grad
  weight = weight - lr * total
"""


def test_a_state_that_may_leave_its_domain_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"W0804(.|\n)*total  = 0.5"):
        forge_dsl.load(LEAVES_ITS_DOMAIN)


def test_a_rule_without_faults_is_loaded_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forge_dsl.load(LEAVES_ITS_DOMAIN.replace("+ grad", "+ grad * grad"))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_may_be_named_as_torch_names_it(name: str) -> None:
    from forge_dsl.runtime.storage import format_name

    assert format_name(name) == {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[name]


def test_a_format_that_does_not_exist_is_told_with_its_state() -> None:
    from forge_dsl.optim import AdamW

    with pytest.raises(ValueError, match=r"Invalid state_dtype\['exp_avg'\]: 'int9'"):
        AdamW([torch.nn.Parameter(torch.zeros(2, 2))], state_dtype={"exp_avg": "int9"})


COUNTING = """
optimizer Counting
hyper lr = 1 in [0, inf)
state a
scalar NAME = 1
NAME = NAME * 0.5
update:
  a = 0.5 * a + grad
  weight = weight - lr * a * NAME * RATE
"""


@pytest.mark.parametrize("rate", ["1", "step"])
@pytest.mark.parametrize("name", ["decay", "updates", "written_total", "written_x", "first_time", "count"])
def test_a_scalar_by_any_name_goes_on_from_a_checkpoint(name: str, rate: str) -> None:
    made = forge_dsl.load(COUNTING.replace("NAME", name).replace("RATE", rate))

    def steps(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            weight.grad = torch.ones(2)
            optimizer.step()

    unbroken = torch.nn.Parameter(torch.ones(2))
    optimizer = made.Counting([unbroken])
    steps(unbroken, optimizer, 3)
    resumed = torch.nn.Parameter(unbroken.detach().clone())
    again = made.Counting([resumed])
    again.load_state_dict(optimizer.state_dict())
    steps(unbroken, optimizer, 2)
    steps(resumed, again, 2)
    assert again.state_dict()["state"][0][name] == 2.0**-5
    assert torch.equal(resumed, unbroken)


def test_a_group_called_like_a_hyper_is_no_slip() -> None:
    made = forge_dsl.load(LEAVES_ITS_DOMAIN.replace("lr", "param").replace("+ grad", "+ grad * grad"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.Leaves([torch.nn.Parameter(torch.ones(2))])
