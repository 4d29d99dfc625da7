"""State that the frameworks keep per process is put back, so that tests do not see each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    # TrainingArguments(bf16=True) may say so in an environment variable, which the next one reads.
    with mock.patch.dict(os.environ):
        yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
