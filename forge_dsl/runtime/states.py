"""Optimizer state tensors: how they come to be, and where they lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_dsl.formats import registry
from forge_dsl.runtime import coded, storage
from forge_dsl.runtime.banded import bands, row_bands
from forge_dsl.runtime.group_arguments import Variant
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import Choice
from forge_dsl.spec import StateSpec


@torch.no_grad()
def create(rule: Rule, spec: StateSpec, weight: Tensor, hypers: dict[str, Any], form: str) -> dict[str, Tensor]:
    """A state with its initial value, rounded once, and its scales if its format has some, by their names."""
    if form in storage.BLOCK_WISE:
        return _create_blocks(rule, spec, weight, hypers, form)
    dtype = storage.DTYPES[form]
    if spec.zero:
        zeros = torch.zeros_like(weight, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
        return {spec.name: zeros}
    tensor = torch.empty_like(weight, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    if weight.dtype == coded.CODES:
        for rows in row_bands(*weight.shape):
            tensor[rows].copy_(rule.initial_state(spec.name, _numbers(weight, rows), **hypers))
        return {spec.name: tensor}
    for part, piece in bands(tensor, weight.detach()):
        part.copy_(rule.initial_state(spec.name, piece, **hypers))
    return {spec.name: tensor}


def _numbers(weight: Tensor, rows: slice) -> Tensor:
    """Rows of a weight that is a matrix in memory, in its own type, or in fp32 where it is kept in codes."""
    if weight.dtype == coded.CODES:
        return coded.decode(weight[rows], coded.of(weight).scales[:, rows].contiguous(), torch.float32)
    return weight.detach().view(registry.matrix_shape(weight.shape))[rows]


def _create_blocks(rule: Rule, spec: StateSpec, weight: Tensor, hypers: dict[str, Any], form: str) -> dict[str, Tensor]:
    codec = storage.block_wise(form, spec.nonnegative)
    codes = torch.empty(weight.shape, dtype=codec.code_dtype, device=weight.device)
    scales = torch.empty(registry.scale_shape(weight.shape), dtype=torch.uint8, device=weight.device)
    rows, columns = registry.matrix_shape(weight.shape)
    matrix = codes.view(rows, columns)
    for part in row_bands(rows, columns):
        encoded = codec.encode(rule.initial_state(spec.name, _numbers(weight, part), **hypers))
        assert encoded.scales is not None
        matrix[part].copy_(encoded.codes)
        scales[:, part].copy_(encoded.scales)
    marked = scales.view(torch.float8_e8m0fnu) if form == "fp8" else scales
    return {spec.name: codes, registry.scale_key(spec.name): marked}


def ensure(rule: Rule, variant: Variant, weight: Tensor, state: dict[str, Any], chosen: Choice) -> None:
    """Create the states that this variant has and `optimizer.state[p]` lacks, and the bits beside a bf16 weight."""
    for spec, present in zip(rule.spec.states, variant.present, strict=True):
        if present and state.get(spec.name) is None:
            state.update(create(rule, spec, weight, variant.hypers, storage.format_of(chosen, spec, weight)))
    if chosen.extra_bits and weight.dtype == torch.bfloat16 and state.get(registry.LOW_KEY) is None:
        state[registry.LOW_KEY] = beside(weight, torch.int8 if chosen.extra_bits == 8 else torch.int16).zero_()


def check(rule: Rule, name: str, weight: Tensor, state: dict[str, Any]) -> None:
    """Raise RuntimeError unless what `optimizer.state[p]` holds can be the states of this weight, before they are used.

    Users may replace states or take them out, after which they begin anew. name: the weight, for the message
    """
    for key in rule.spec.state_names:
        value = state.get(key)
        if value is None or (isinstance(value, Tensor) and is_like(value, weight) and value.device == weight.device):
            continue
        got = f"{list(value.shape)} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise RuntimeError(
            f"optimizer.state of {name}: {key!r} is {got}; expected a strided tensor of shape {list(weight.shape)} on "
            f"{weight.device}. Take it out to begin it anew, or load it with load_state_dict"
        )


def is_like(value: Tensor, weight: Tensor) -> bool:
    """Whether a tensor could be a state of the weight on some device."""
    return value.shape == weight.shape and value.layout == torch.strided and not value.is_meta


def in_order(rule: Rule, variant: Variant, weight: Tensor, state: dict[str, Any]) -> list[Tensor | None]:
    """The tensors of `spec.states`, None where the variant has none. The kernels read all of them with one layout."""
    names = [name for name, present in zip(rule.spec.state_names, variant.present, strict=True) if present]
    if any(state[name].stride() != state[names[0]].stride() for name in names[1:]):
        for name in names:
            state[name] = laid_out(state[name], weight)
    return [
        state[name] if present else None for name, present in zip(rule.spec.state_names, variant.present, strict=True)
    ]


@torch.no_grad()
def laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy of a loaded state on the weight's device and in its layout, bit for bit."""
    copy = torch.empty_like(weight, dtype=tensor.dtype, requires_grad=False, memory_format=torch.preserve_format)
    return copy.copy_(tensor.detach())


def beside(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for bits beside a weight, with its very strides: the kernels read both by the same offsets."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)
