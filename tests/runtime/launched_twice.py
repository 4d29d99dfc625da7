"""What Triton passes to its launcher in C, and whether `direct_launch` passes the same for the same call.

Run by `test_direct_launch.py` under a release of Triton, without a GPU: the driver is replaced by one that names an
H200, and the launcher in C by one that notes its arguments. All between them, the kernel's compilation included, is
Triton's own.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.runtime import driver

from forge_dsl import optim
from forge_dsl.runtime import hopper, launch
from forge_dsl.runtime.storage import plain

RULE = optim.AdamW.rule
SWITCHES = (False, False)
calls: list[tuple[Any, ...]] = []


def note(*arguments: Any) -> None:
    """Stands for the launcher in C."""
    calls.append(arguments)


def fill_descriptor(*arguments: Any) -> Any:
    """Stands for the function in C that makes a TMA descriptor: two of the same arguments are equal."""
    return ("descriptor", *[tuple(a) if isinstance(a, list | tuple) else a for a in arguments])


class Driver:
    """Stands for Triton's driver, on a machine with one H200."""

    launcher_cls = nvidia.CudaLauncher
    utils = SimpleNamespace(
        launch=note,
        fill_tma_descriptor=fill_descriptor,
        fill_tma_descriptor_tiled=fill_descriptor,
        build_signature_metadata=lambda signature: ("signature", *signature),
        load_binary=lambda *_: (1, 4711, 168, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 23


def stand_in() -> None:
    """Put the stand-ins where Triton, torch and this project ask for a GPU."""
    driver.set_active(Driver())
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=note)
    nvidia.PyKernelArg = lambda nested_tuple, type: (type, tuple(nested_tuple or ()))
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = "constexpr", "kernel", "tuple"
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch._C._cuda_getDevice = lambda: None  # type: ignore[assignment]
    torch._C._cuda_getCurrentRawStream = lambda _: 23  # type: ignore[assignment]
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, name="NVIDIA H200"
    )
    torch.cuda.get_device_properties = lambda _: properties  # type: ignore[assignment,return-value]


def plainly(argument: Any) -> Any:
    """An argument as the launcher reads it: the address of a tensor; nothing for hooks and what only they read."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, LazyDict) or (isinstance(argument, knobs.HookChain) and not argument.calls):
        return None
    return tuple(map(plainly, argument)) if isinstance(argument, list | tuple) else argument


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor]:
    """x, dy, weight, states and table of one update of AdamW."""
    x, dy, weight = torch.zeros(64, 512, dtype=dtype), torch.zeros(64, 256, dtype=dtype), torch.zeros(256, 512)
    states: list[Tensor | None] = [torch.zeros_like(weight, dtype=dtype), torch.zeros_like(weight, dtype=dtype), None]
    return x, dy, weight.to(dtype), states, torch.zeros(16)


def compare(name: str) -> None:
    """Print how the last two calls differ, of which Triton made the first."""
    one, two = map(plainly, calls[-2:])
    assert len(one) > 10
    if one == two and [*map(type, one)] == [*map(type, two)]:
        print(f"same: {name}")
    else:
        print(f"different: {name}: Triton passes {one}, direct_launch {two}")


def of_hopper(dtype: torch.dtype) -> None:
    """The kernel for Hopper, on the operands of its first launch and on others."""
    x, dy, weight, states, table = problem(dtype)
    kept = plain(3)
    found = hopper.Launch(RULE, x, dy, weight, states, SWITCHES, False, 24, kept)
    found(x, dy, weight, states, table, kept)
    again = found.again(weight, states, table, kept)
    assert again is not None, "the launcher was not recognised"
    assert again(dy.data_ptr(), x.data_ptr())
    compare(f"hopper, {dtype}")
    other_x, other_dy = x.clone(), dy.clone()
    found.direct = None
    found(other_x, other_dy, weight, states, table, kept)
    assert again(other_dy.data_ptr(), other_x.data_ptr())
    compare(f"hopper, {dtype}, other operands")
    heard = lambda *_: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(heard)
    assert not again(dy.data_ptr(), x.data_ptr()), "a profiler that wants to hear of launches heard of none"
    knobs.runtime.launch_enter_hook.remove(heard)


def of_portable() -> None:
    """The portable kernel: no descriptors; arguments that are None, and a number of tokens that Triton makes one."""
    x, dy, weight, states, table = problem(torch.bfloat16)
    for tokens in (64, 1):
        rows = x[:tokens], dy[:tokens]
        again = launch.linear_step_portable(RULE, *rows, weight, states, table, SWITCHES, False)
        assert again is not None and again(dy.data_ptr(), x.data_ptr())
        compare(f"portable, {tokens} tokens")
    assert launch.linear_step_portable(RULE, x, dy.float(), weight, states, table, SWITCHES, False) is None
    assert launch.linear_step_portable(RULE, x.float(), dy.float(), weight, states, table, SWITCHES, False) is None


def of_scalars() -> None:
    """The prologue of a step."""
    optimizer = optim.AdamW([torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)])
    table = next(optimizer.bindings()).table
    table.fills_all = True
    for _ in range(2):
        table.begin(optimizer.state)
        table.end_step()
    compare("scalars")
    assert len({str(call[:3]) for call in calls[-2:]}) == 1
    before = table._fill_again
    optimizer.param_groups[0]["amsgrad"] = True
    table.begin(optimizer.state)
    assert table._fill_again is not before, "another flag has another kernel"


if __name__ == "__main__":
    stand_in()
    print(triton.__version__)
    for dtype in (torch.bfloat16, torch.float16):
        of_hopper(dtype)
    of_portable()
    of_scalars()
