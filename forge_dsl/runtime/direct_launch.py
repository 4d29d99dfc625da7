"""Launching a compiled Triton kernel again by addresses, without what Triton's own path does on every call.

That path examines every argument, looks the kernel up, makes TMA descriptors anew and reads an address out of every
tensor, which costs more than a small kernel runs. Where types, shapes, strides and alignment are those of a launch that
Triton has made, all of it is known. What is left is the call of Triton's launcher in C, with descriptors that are kept
by address. Descriptors and sizes travel as kernel parameters by value, so a captured CUDA graph needs nothing to
outlive the call.

Triton's launcher is not a public interface. Its forms in the releases that are named here are known, and
`tests/runtime/test_direct_launch.py` compares what is passed with what Triton itself passes; any other release, and
anything unexpected in one of these, keeps Triton's own path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch

# Launches on two operands at these addresses; False, with nothing done, where Triton's own path has to.
Again: TypeAlias = Callable[[int, int], bool]
_FLAT, _PACKED = ("3.6.",), ("3.7.", "3.8.", "3.9.")
# Of one operand. Each is some 128 bytes.
_DESCRIPTORS = 4096


class Loaded(Protocol):
    """An operand that the kernel loads by TMA: its matrix, without the address."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def strides(self) -> tuple[int, int]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Direct:
    """A compiled kernel, ready to be launched on one device and grid.

    kernel    Triton's, held, for from 3.8 on it leaves the device when nobody does
    launcher  Triton's, in C: `(*grid, stream, *head, arguments)`, the arguments as one tuple where it is `packed`
    operands  the arguments of each operand, by its address
    """

    kernel: Any
    launcher: Callable[..., None]
    grid: tuple[int, int, int]
    head: tuple[Any, ...]
    packed: bool
    device: int
    operands: tuple[_Arguments, _Arguments]

    def bind(self, others: tuple[Any, ...]) -> Again:
        """The launch with these arguments after the operands: an address for a tensor, a tuple for a tuple."""
        from triton import knobs

        launcher, grid, head, device, (first, second) = self.launcher, self.grid, self.head, self.device, self.operands
        # These do not ask whether CUDA has begun.
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        packed, runtime = self.packed, knobs.runtime

        def again(at_first: int, at_second: int, _held: Any = self.kernel) -> bool:
            if device != current_device():
                return False
            # Somebody, a profiler, wants to hear of launches; also where it cannot be told.
            if getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True):
                return False
            arguments = (*first[at_first], *second[at_second], *others)
            if packed:
                launcher(*grid, current_stream(device), *head, arguments)
            else:
                launcher(*grid, current_stream(device), *head, *arguments)
            return True

        return again


def launch(
    kernel: Any,
    device: torch.device,
    grid: tuple[int],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Again | None:
    """Launch a Triton kernel by Triton's own path, the device being the current one; what launches it again, if that
    can be.

    arguments: those without `constants`, in order, two pointers first, which may be others the next time if they are
    aligned alike; everything else then stays as it is.
    """
    compiled = kernel[grid](*arguments, **constants, **options)
    found = None if compiled is None else of(compiled, device.index, (*grid, 1, 1), (None, None))
    if found is None:
        return None
    named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
    if len(named) != len(kernel.arg_names):
        return None
    return found.bind(tuple([_address(named[name]) for name in kernel.arg_names[2:]]))


def _address(argument: Any) -> Any:
    """An argument as the launcher reads it."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return tuple(map(_address, argument)) if isinstance(argument, tuple) else argument


def of(
    compiled: Any, device: int, grid: tuple[int, int, int], operands: tuple[Loaded | None, Loaded | None]
) -> Direct | None:
    """A kernel that Triton has just launched so, or None where this release's launcher, or this kernel, is not known.

    operands: the kernel's first two arguments, None where it takes a pointer.
    """
    try:
        import triton

        return _of(compiled, device, grid, operands, triton.__version__)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return None


def is_known(release: str) -> bool:
    """Whether the launcher of this release of Triton is one of those that are known here."""
    return release.startswith((*_FLAT, *_PACKED))


def _of(
    compiled: Any,
    device: int,
    grid: tuple[int, int, int],
    operands: tuple[Loaded | None, Loaded | None],
    release: str,
) -> Direct | None:
    run = compiled.run
    if not is_known(release) or type(run).__name__ != "CudaLauncher":
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    loaded = [operand for operand in operands if operand is not None]
    launcher, layouts, make = _taken_apart(run.launch) if loaded else (run.launch, (), None)
    if len(layouts) != len(loaded) or None in layouts:
        return None
    waiting = iter(layouts)
    first, second = (_Arguments(operand, next(waiting) if operand else None, make) for operand in operands)
    function, metadata = compiled.function, compiled.packed_metadata
    flags = run.launch_cooperative_grid, run.launch_pdl
    packed = not release.startswith(_FLAT)
    head: tuple[Any, ...]
    if packed:
        # Metadata, metadata for hooks, hooks before and after, scratch memory, how the arguments are to be read.
        head = (function, *flags, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
    else:
        # Scratch memory, metadata, metadata for hooks, hooks before and after.
        head = (function, *flags, None, None, metadata, None, None, None)
    return Direct(compiled, launcher, grid, head, packed, device, (first, second))


def _taken_apart(around: Any) -> tuple[Callable[..., None], Sequence[Any], Callable[..., list[Any]]]:
    """The launcher in C, layouts of the TMA operands and what makes a descriptor, from the function around them."""
    cells = (cell.cell_contents for cell in around.__closure__)
    held = dict(zip(around.__code__.co_freevars, cells, strict=True))
    make = held.get("make_tensordesc_arg")
    if make is None:  # until 3.7 a function of the module
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return held["launcher"], held["tensordesc_meta"], make_tensordesc_arg
    return held["launcher"], held["tensordesc_meta"], lambda operand, layout: make(operand, layout, None)


class _Arguments(dict[int, Sequence[Any]]):
    """What the kernel takes for one operand, by the operand's address: a TMA descriptor and sizes, or the address."""

    def __init__(self, operand: Loaded | None, layout: Any, make: Callable[..., list[Any]] | None) -> None:
        self.operand, self.layout, self.make = operand, layout, make

    def __missing__(self, address: int) -> Sequence[Any]:
        if len(self) >= _DESCRIPTORS:
            self.clear()
        if self.operand is None or self.make is None:
            found: Sequence[Any] = (address,)
        else:
            found = self.make(_At(address, self.operand), self.layout)
        self[address] = found
        return found


class _At:
    """An operand at an address, as Triton reads it to make a TMA descriptor; holds no tensor alive."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, address: int, operand: Loaded) -> None:
        self.shape, self.strides = operand.shape, operand.strides
        self.base = SimpleNamespace(data_ptr=lambda: address)
