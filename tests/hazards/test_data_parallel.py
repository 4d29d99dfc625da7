"""Hazard: DDP averages a gradient that does not exist; a sharded parameter is never in the graph. Both raise."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

import forge_dsl
from forge_dsl import optim
from tests.runtime.handwritten import AdamW, Linear, snapshot, unchanged


@pytest.fixture(scope="module")
def group():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_raises_in_forward(group) -> None:
    model = torch.nn.Sequential(Linear(3, 2))
    optimizer = AdamW(model.named_parameters())
    before = snapshot(optimizer)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"0\.weight \[2, 3\]: DistributedDataParallel"):
        wrapped(torch.randn(4, 3))
    assert unchanged(optimizer, before)
    model(torch.randn(4, 3))


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "DataParallel", "FSDPModule"])
@pytest.mark.parametrize("outermost", [True, False])
def test_fuse_refuses_a_wrapped_model_before_anything_changes(group, wrapper: str, outermost: bool) -> None:
    """At once, and not when the wrapper's first forward comes to a fused layer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    wrap = {
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "DataParallel": torch.nn.DataParallel,
        "FSDPModule": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    }[wrapper]
    wrapped = wrap(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    model = wrapped if outermost else torch.nn.Sequential(wrapped)
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    before = layer.__dict__.copy()
    with pytest.raises(RuntimeError, match=f"is wrapped in {wrapper}, which averages or shards gradients"):
        forge_dsl.fuse(model, optim.AdamW)
    assert layer.__dict__ == before and "forward" not in layer.__dict__, "the layer is as it was"


def test_fuse_refuses_parameters_that_are_sharded_without_a_wrapper(group) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh))
    with pytest.raises(RuntimeError, match=r"0\.weight is sharded \(a DTensor\)"):
        forge_dsl.fuse(model, optim.AdamW)


def test_sharded_parameters_are_refused(group) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 3), init_device_mesh("cpu", (1,))))
    with pytest.raises(TypeError, match=r"parameter w of shape \[2, 3\].*DTensor"):
        AdamW([("w", sharded)])


def test_fully_sharded_modules_raise_whenever_the_optimizer_is_built(group) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = torch.nn.Sequential(Linear(3, 2))
    early = AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="DTensor"):
        AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"no optimizer has the weight of shape \[2, 3\].*sharded"):
        model(torch.randn(4, 3))
    del early
