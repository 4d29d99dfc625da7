"""Weights kept in 8 bits: float8 e4m3 codes, and a power of two for every 64 columns of a row.

The parameter itself has dtype `torch.float8_e4m3fn`; its scales, `float8_e8m0fnu` [ceil(in / 64), out], lie beside it
and are found by it here. Layers decode the weight where they need it, once in forward and again in backward, into a
tensor that nothing keeps; the fused update reads and writes codes and scales (`formats.block_wise.SignedFloat`).

Decoding is exact in fp32 and bf16: a number of four bits times a power of two, from 2^-128 on. A block's largest number
may have been rounded up to 2^128, which is infinite there, as where an fp32 number is rounded to bf16. In fp16 it is
rounded as any fp32 number would be: infinite from 65520 on, and below 2^-14 to a multiple of 2^-24. A block that was
given something that is not finite reads as NaN throughout. The code of NaN (127) is never written.

A write in place by anything else (`weight.copy_`, `nn.init.ones_`) puts numbers where codes belong. It raises the
version that torch counts for each tensor, so it is noticed wherever codes are to be read as numbers: `check_written`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from forge_dsl.formats import registry, scale
from forge_dsl.formats.block_wise import SignedFloat
from forge_dsl.runtime.binding import lookup

CODES, SCALES = torch.float8_e4m3fn, torch.float8_e8m0fnu
CODEC = SignedFloat(flush=False)
NO_BITS_BESIDE = "bits beside a weight belong to bf16, and not to a weight in fp8: leave the option out"
# Elements that are encoded at a time, for the codec's temporaries take many times as much.
_BAND = 1 << 22


@dataclass(eq=False, slots=True)
class Coded:
    """What belongs to a weight in codes.

    scales    float8_e8m0fnu [ceil(in / 64), out]
    dtype     what layers compute in
    versions  of the weight and of its scales when codes were last written as codes; None after any other write
    """

    scales: Tensor
    dtype: torch.dtype
    versions: tuple[int, int] | None


_known: Any = WeakIdKeyDictionary()
# Weak references to the weights that scales belong to.
_owners: Any = WeakIdKeyDictionary()


def register(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Remember, as long as the weight lives, its scales and the type that its layers compute in.

    What is known of writes stays where the scales are the same tensor as before.
    """
    shape = registry.scale_shape(weight.shape)
    if weight.dtype != CODES or weight.dim() != 2 or not weight.is_contiguous():
        raise TypeError(
            f"weight of shape {list(weight.shape)}, {weight.dtype}, strides {list(weight.stride())}: expected {CODES}, "
            "contiguous, [out, in]"
        )
    if scales.dtype != SCALES or tuple(scales.shape) != shape or not scales.is_contiguous():
        raise TypeError(f"scales of shape {list(scales.shape)}, {scales.dtype}: expected {list(shape)}, {SCALES}")
    if scales.device != weight.device:
        raise ValueError(f"scales on {scales.device}, their weight on {weight.device}: expected one device")
    before = find(weight)
    same = before is not None and before.scales is scales
    _known[weight] = Coded(scales, dtype, before.versions if before is not None and same else _versions(weight, scales))
    if owner(scales) is None:
        _owners[scales] = WeakIdRef(weight)


def _versions(weight: Tensor, scales: Tensor) -> tuple[int, int]:
    """torch's counts of writes in place; it keeps none of tensors that were made in inference mode."""
    first, second = (-1 if tensor.is_inference() else tensor._version for tensor in (weight, scales))
    return first, second


def owner(scales: Tensor) -> Tensor | None:
    """The first weight that these scales were said to belong to, if it is alive."""
    reference = _owners.get(scales)
    found: Tensor | None = None if reference is None else reference()
    return found


def note_written(weight: Tensor) -> None:
    """Codes and scales have been written, and as such: what is in them now is right."""
    kept = _known.get(weight)
    if kept is not None:
        kept.versions = _versions(weight, kept.scales)


def is_intact(weight: Tensor) -> bool:
    """Whether nothing else has written the codes, or scales, of a weight whose scales are known."""
    kept = known(weight)
    return kept.versions == _versions(weight, kept.scales)


def check_written(weight: Tensor) -> None:
    """RuntimeError where something else has written a weight in codes; any other weight passes."""
    if weight.dtype == CODES and not is_intact(weight):
        binding = lookup(weight)
        name = f"the weight of shape {list(weight.shape)}" if binding is None else binding.describe()
        raise RuntimeError(
            f"{name} is kept in fp8 codes, and it or its scales were written in place, by copy_, fill_ or a function "
            "of torch.nn.init for example, which put numbers where codes belong: what they were is lost. Write it "
            "again by forge_dsl.fp8.assign(weight, numbers), or load a state dict; that is how to set such a weight"
        )


def packed(weight: Tensor) -> tuple[Tensor, torch.dtype, bool] | None:
    """What a copy of a weight must be told: scales, type, and whether they are intact; None for any other weight."""
    kept = find(weight)
    return None if kept is None else (kept.scales, kept.dtype, is_intact(weight))


def unpack(weight: Tensor, kept: tuple[Tensor, torch.dtype, bool] | None) -> None:
    """Tell a copy of a weight, with the copy of what `packed` said."""
    if kept is None or weight.dtype != CODES:
        return
    scales, dtype, intact = kept
    register(weight, scales, dtype)
    if not intact:
        _known[weight].versions = None


def find(weight: Tensor) -> Coded | None:
    """The scales of a weight in codes, or None where nobody has said which they are."""
    found: Coded | None = _known.get(weight)
    return found


def of(weight: Tensor) -> Coded:
    """What belongs to a weight in codes that are to be read as numbers; raises as `known` and `check_written` do."""
    found = known(weight)
    if found.versions != _versions(weight, found.scales):
        check_written(weight)
    return found


def known(weight: Tensor) -> Coded:
    """The scales of a weight in codes; RuntimeError where they are not known, TypeError for any other weight."""
    found = find(weight)
    if found is None:
        if weight.dtype != CODES:
            raise TypeError(
                f"a tensor of shape {list(weight.shape)}, {weight.dtype}, is not kept in fp8 codes: it holds numbers "
                "and has no scales"
            )
        raise RuntimeError(
            f"a weight of shape {list(weight.shape)} is {CODES}, and its scales are not known, so its codes are no "
            'numbers. Such weights come from forge_dsl.fuse(model, ..., weight_dtype="fp8") or fp8.parameter; '
            "give one that was copied or loaded its scales with forge_dsl.fp8.attach"
        )
    return found


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The type of the numbers that a layer computes with where autocast does not say another one."""
    return known(weight).dtype if weight.dtype == CODES else weight.dtype


def stored(weight: Tensor) -> Tensor:
    """The weight as kernels and codecs read and write it, an alias: codes as uint8, any other weight as it is."""
    alias = weight.detach()
    return alias.view(torch.uint8) if weight.dtype == CODES else alias


@torch.no_grad()
def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [out, in] as codes, float8_e4m3fn, and scales, float8_e8m0fnu, each rounded once to nearest."""
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=values.device)
    scales = torch.empty(scale.count(columns), rows, dtype=torch.uint8, device=values.device)
    step = max(1, _BAND // max(1, columns))
    for part in (slice(start, start + step) for start in range(0, rows, step)):
        found = CODEC.encode(values[part].float())
        assert found.scales is not None
        codes[part].copy_(found.codes)
        scales[:, part].copy_(found.scales)
    return codes.view(CODES), scales.view(SCALES)


@torch.no_grad()
def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] of codes and scales in fp32, bf16 or fp16; on a GPU by one kernel, with the same bits."""
    codes, scales = codes.detach(), scales.detach()
    if codes.device.type == "cuda":
        from forge_dsl.runtime import device_coded

        return device_coded.decode(codes.view(torch.uint8), scales.view(torch.uint8), dtype)
    if dtype == torch.float16:
        return decode(codes, scales, torch.float32).to(dtype)
    rows, columns = codes.shape
    numbers = codes.to(dtype)
    factors = (scales.view(torch.uint8).to(torch.int32) << 23).view(torch.float32).to(dtype).t()
    whole = columns // scale.BLOCK
    numbers[:, : whole * scale.BLOCK].view(rows, whole, scale.BLOCK).mul_(factors[:, :whole, None])
    if columns % scale.BLOCK:
        numbers[:, whole * scale.BLOCK :].mul_(factors[:, whole:])
    return numbers


@torch.no_grad()
def assign(weight: Tensor, values: Tensor) -> None:
    """Write numbers [out, in] into a weight in codes whose scales are known, in place."""
    codes, scales = encode(values.detach().to(weight.device))
    stored(weight).copy_(codes.view(torch.uint8))
    known(weight).scales.view(torch.uint8).copy_(scales.view(torch.uint8))
    note_written(weight)


def widened(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight in the type that a product takes: a plain one (`scales` None) cast, one in codes decoded."""
    return weight.to(dtype) if scales is None else decode(weight, scales, dtype)


def forget(weight: Tensor) -> None:
    """The weight is numbers again."""
    _known.pop(weight, None)
