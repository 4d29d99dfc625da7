"""Wrappers that average or shard gradients raise, before and after `fuse`, and nothing is changed."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forge_dsl
from forge_dsl.optim import AdamW


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [(DistributedDataParallel, "wrapped in DistributedDataParallel"), (sharded, "wrapped in FSDPModule")],
)
def test_a_wrapped_model_is_refused(wrap, message: str) -> None:
    wrapped = wrap(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match=message):
        forge_dsl.fuse(wrapped, AdamW)
    with pytest.raises(RuntimeError, match=f"0 is {message}"):
        forge_dsl.fuse(nn.Sequential(wrapped), AdamW)


def test_sharded_parameters_without_a_wrapper_are_refused() -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 3), init_device_mesh("cpu", (1,))))
    with pytest.raises(RuntimeError, match="weight is sharded"):
        forge_dsl.fuse(model, AdamW)


@pytest.mark.parametrize(
    ("wrap", "message"), [(DistributedDataParallel, r"0\.weight.*DistributedDataParallel"), (sharded, "as by FSDP")]
)
def test_wrapping_a_fused_model_raises_in_forward(wrap, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = forge_dsl.fuse(model, AdamW)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    wrapped = wrap(model)
    with pytest.raises(RuntimeError, match=message):
        wrapped(torch.randn(4, 3))
    assert not optimizer.state
    if wrap is DistributedDataParallel:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
