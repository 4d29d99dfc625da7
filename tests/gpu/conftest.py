"""What tests of kernels share."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_test_hangs() -> Iterator[None]:
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
