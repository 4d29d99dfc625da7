"""`forge_dsl.load` passes on what the compiler warns of: nobody sees it otherwise."""

from __future__ import annotations

import warnings

import pytest

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
    import torch

    from forge_dsl.optim import AdamW

    with pytest.raises(ValueError, match=r"Invalid state_dtype\['exp_avg'\]: 'int9'"):
        AdamW([torch.nn.Parameter(torch.zeros(2, 2))], state_dtype={"exp_avg": "int9"})
