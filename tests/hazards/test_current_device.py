"""Hazard: Triton launches to the current device, wherever the tensors lie. With several GPUs it has to be theirs.

Every launch is noted with the device that is current then, by stand-ins for `torch.cuda` and for the kernels; tensors
say that they are on a GPU. And what a launch on a GPU asks of fp32 products and of the compiler is read off the same
way: TF32 only where torch allows it, and neither it nor a fusion of products and sums in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_dsl import optim, testing
from forge_dsl.formats.operand import Scaled
from forge_dsl.runtime import device_coded, device_operands, hopper, launch, scaled
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import plain
from forge_dsl.runtime.triton_support import AVAILABLE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Triton")

SWITCHES = testing.cases(optim.SGDMomentum.rule)[-1].switches
ROWS, COLUMNS, TOKENS = 128, 256, 32
BF16, FP32 = torch.bfloat16, torch.float32
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


class InterpretedFunction:
    """Stands for a kernel and notes each launch: the device that is current, and the keywords.

    Its name lets it pass for a kernel in the interpreter, so that nothing asks for the properties of a GPU.
    """

    def __init__(self, like: Any) -> None:
        self.arg_names = getattr(like, "arg_names", ())
        self.launches: list[tuple[int, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.launches.append((torch.cuda.current_device(), keywords))


class OnGpu(Tensor):
    """A tensor in ordinary memory that says it is on a GPU."""

    where = THERE

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


class OnTheFirst(OnGpu):
    """The same on the device that is current anyway."""

    where = HERE


@pytest.fixture(params=[OnGpu, OnTheFirst], ids=["cuda:1", "cuda:0"])
def kind(request: pytest.FixtureRequest) -> type[OnGpu]:
    """Which of the two GPUs the tensors are on."""
    found: type[OnGpu] = request.param
    return found


class Guards:
    """Stands for `torch.cuda`'s current device: the first, but within a guard."""

    def __init__(self) -> None:
        self.current, self.entered = [0], 0

    def __call__(self, device: torch.device) -> Guards:
        self.asked = device
        return self

    def __enter__(self) -> None:
        self.entered += 1
        self.current.append(self.asked.index)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    """Two GPUs of which there is none. After the test the first is current again."""
    found = Guards()
    monkeypatch.setattr(torch.cuda, "device", found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "upload", lambda numbers, dtype, device: torch.tensor(numbers, dtype=dtype))
    monkeypatch.setattr(launch, "_places", lambda sizes, device: (torch.zeros(1, 2), torch.zeros(1, 2)))
    yield found
    assert found.current == [0]


def standing_in() -> tuple[Rule, dict[str, InterpretedFunction]]:
    """A rule whose kernels note their launches, and these by name."""
    rule = optim.SGDMomentum.rule
    names = ("linear_kernel", "elementwise_kernel", "many_kernel", "scalars_kernel", "hopper_kernel")
    kernels = {name: InterpretedFunction(getattr(rule, name)) for name in names}
    return replace(rule, **kernels), kernels


def on_gpu(kind: type[OnGpu], *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(kind)


def linear(kind: type[OnGpu], rule: Rule, exact: bool = False, x: torch.dtype = BF16, dy: torch.dtype = BF16) -> None:
    """One fused step by the portable kernel."""
    weight, state = (on_gpu(kind, ROWS, COLUMNS, dtype=FP32) for _ in range(2))
    operands = on_gpu(kind, TOKENS, COLUMNS, dtype=x), on_gpu(kind, TOKENS, ROWS, dtype=dy)
    launch.linear_step_portable(rule, *operands, weight, [state], on_gpu(kind, 16), SWITCHES, exact)


def elementwise(kind: type[OnGpu], rule: Rule, exact: bool = False) -> None:
    weight, grad, state = (on_gpu(kind, ROWS, COLUMNS) for _ in range(3))
    launch.elementwise_step(rule, weight, grad, [state], on_gpu(kind, 16), SWITCHES, exact)


def many(kind: type[OnGpu], rule: Rule, exact: bool = False) -> None:
    weight, grad, state = (on_gpu(kind, ROWS, COLUMNS) for _ in range(3))
    launch.many_step(rule, [launch.Item(weight, grad, [state], on_gpu(kind, 16))], SWITCHES, exact)


def tables(kind: type[OnGpu], rule: Rule) -> None:
    hypers, counters = (on_gpu(kind, 1, 4, dtype=torch.float64) for _ in range(2))
    table, bases = on_gpu(kind, 1, 16, dtype=FP32), on_gpu(kind, 1, dtype=torch.int32)
    launch.fill_tables(rule, hypers, counters, table, counters, bases, dict.fromkeys(rule.spec.flag_names, False))


def on_hopper(kind: type[OnGpu], rule: Rule, exact: bool = False) -> None:
    """The launch that Triton makes, and not the direct one, which `test_direct_launch.py` has."""
    weight, state = (on_gpu(kind, ROWS, COLUMNS) for _ in range(2))
    x, dy, kept = on_gpu(kind, TOKENS, COLUMNS), on_gpu(kind, TOKENS, ROWS), plain(1)
    found = hopper.Launch(rule, x, dy, weight, [state], SWITCHES, exact, 24, kept)
    found(x, dy, weight, [state], on_gpu(kind, 16), kept)


@pytest.fixture
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper.Operand, "descriptor", lambda self, tensor: None)


LAUNCHES = {
    "linear_kernel": linear,
    "elementwise_kernel": elementwise,
    "many_kernel": many,
    "scalars_kernel": tables,
    "hopper_kernel": on_hopper,
}
every_launch = pytest.mark.parametrize("name", LAUNCHES)


@every_launch
def test_a_launch_is_made_with_the_tensors_device_current(
    name: str, kind: type[OnGpu], guards: Guards, a_hopper: None
) -> None:
    rule, kernels = standing_in()
    LAUNCHES[name](kind, rule)
    assert [device for device, _ in kernels[name].launches] == [kind.where.index]
    assert guards.entered == (1 if kind is OnGpu else 0), "entering a device that is current already takes time"


@pytest.mark.parametrize("what", ["operands", "a weight"])
def test_8_bit_codes_are_decoded_with_their_device_current(
    what: str, kind: type[OnGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, empty = InterpretedFunction(None), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: empty(*shape, **more))
    codes = on_gpu(kind, 64, 128, dtype=torch.float8_e4m3fn)
    if what == "operands":
        monkeypatch.setattr(device_operands, "decode_kernel", kernel)
        scaled.decoded(Scaled(codes, on_gpu(kind, 64, 1, dtype=FP32)), BF16)
    else:
        monkeypatch.setattr(device_coded, "decode_matrix", kernel)
        device_coded.decode(codes.view(torch.uint8), on_gpu(kind, 2, 64, dtype=torch.uint8), BF16)
    assert [device for device, _ in kernel.launches] == [kind.where.index]


@pytest.fixture(params=[False, True], ids=["tf32 off", "tf32 on"])
def allowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch allows TF32 in matrix products."""
    matmul = SimpleNamespace(allow_tf32=request.param)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    return bool(request.param)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(("x", "dy"), [(FP32, FP32), (FP32, BF16), (BF16, FP32), (BF16, BF16)], ids=str)
def test_tf32_is_for_fp32_where_torch_allows_it_and_never_exact(
    x: torch.dtype, dy: torch.dtype, exact: bool, allowed: bool
) -> None:
    rule, kernels = standing_in()
    linear(OnTheFirst, rule, exact, x, dy)
    ((_, keywords),) = kernels["linear_kernel"].launches
    in_fp32 = FP32 in (x, dy)
    assert keywords["precision"] == ("tf32" if in_fp32 and allowed and not exact else "ieee")


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "scalars_kernel"])
def test_products_and_sums_are_fused_in_fast_arithmetic_only(name: str, exact: bool, a_hopper: None) -> None:
    rule, kernels = standing_in()
    LAUNCHES[name](OnTheFirst, rule, exact)  # type: ignore[operator]
    ((_, keywords),) = kernels[name].launches
    assert keywords["exact"] is exact and keywords["enable_fp_fusion"] is not exact
