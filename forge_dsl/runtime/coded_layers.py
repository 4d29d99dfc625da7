"""Linear layers whose weight is kept in fp8: the parameter is codes, a buffer `weight_scale` its scales.

The parameter stays the same object, so that param groups, ties and names stay what they are; both tensors are in the
state dict. What PyTorch does to all tensors of a module would spoil codes: a cast to another floating type, or loading
numbers into them. So two methods are replaced on the layer, beside its `forward`: `_apply`, which moves codes between
devices and casts none of them, and `_load_from_state_dict`, which encodes the numbers of an ordinary state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_dsl.runtime import coded, storage
from forge_dsl.runtime.binding import lookup
from forge_dsl.runtime.coded import CODES, SCALES
from forge_dsl.runtime.placeholder import GradientPlaceholder

CHOICES = (None, "fp8", CODES)
BUFFER = "weight_scale"
_METHODS = {"_apply": "apply", "_load_from_state_dict": "load"}


class Coder:
    """What a layer with its weight in codes does otherwise than `nn.Linear`. Copied with the layer, it is the copy's.

    dtype: what the weight was and becomes again, and what the layer computes in without autocast; `.half()` and the
    like change it.
    """

    __slots__ = ("__weakref__", "_module", "dtype")

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = weakref.ref(module)
        self.dtype = dtype

    def apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`nn.Module._apply`, but codes and scales are bytes to `fn`: it may move them and not cast them."""
        module: Any = self._module()
        weight, scales = module.weight, module.weight_scale
        if weight.dtype != CODES:
            return type(module)._apply(module, fn, recurse)
        moved = [fn(coded.stored(weight)), fn(scales.view(torch.uint8))]
        if any(tensor.dtype != torch.uint8 for tensor in moved):
            raise TypeError(
                f"the weight of shape {list(weight.shape)} is kept in fp8 codes, which cannot become "
                f"{moved[0].dtype}: use .to(dtype), which leaves them alone, or forge_dsl.unfuse(model) first"
            )
        probe = fn(torch.empty(0, dtype=self.dtype, device=weight.device))
        module._parameters["weight"], module._buffers[BUFFER] = None, None
        try:
            type(module)._apply(module, fn, recurse)
        finally:
            module._parameters["weight"], module._buffers[BUFFER] = weight, scales
        for tensor, new in zip((weight, scales), moved, strict=True):
            if new.device != tensor.device or new.data_ptr() != tensor.data_ptr():
                tensor.data = new.view(tensor.dtype)
        if probe.dtype in storage.DTYPES.values():
            self.dtype = probe.dtype
        kept = coded.find(weight)
        if kept is None or kept.scales is scales:
            coded.register(weight, scales, self.dtype)
        return module

    def load(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """`nn.Module._load_from_state_dict`; numbers without scales are encoded, codes without scales refused."""
        module: Any = self._module()
        name, scale_name = prefix + "weight", prefix + BUFFER
        given, scales = state_dict.get(name), state_dict.get(scale_name)
        if isinstance(given, Tensor) and module.weight.dtype != CODES:
            if given.dtype == CODES:
                error_msgs.append(
                    f"{name} is {given.dtype}, and the layer's was replaced by one of numbers: fuse() again"
                )
                return
            given = None
        if isinstance(given, Tensor) and given.shape == module.weight.shape:
            plain = given.dtype in storage.DTYPES.values() or given.dtype == torch.float64
            if scales is None and plain:
                state_dict[name], state_dict[scale_name] = coded.encode(given)
            elif not isinstance(scales, Tensor) or given.dtype not in (CODES, torch.uint8):
                error_msgs.append(f"{name} is {given.dtype} {'without' if scales is None else 'with'} {scale_name}")
                return
            elif scales.dtype not in (SCALES, torch.uint8):
                error_msgs.append(f"{scale_name} is {scales.dtype}, expected {SCALES}")
                return
            elif scales.shape != module.weight_scale.shape:
                error_msgs.append(
                    f"{scale_name} has shape {list(scales.shape)}, expected {list(module.weight_scale.shape)}"
                )
                return
            else:
                # Some files know no 8-bit floats and hold the bytes.
                state_dict[name], state_dict[scale_name] = given.view(CODES), scales.view(SCALES)
        errors = len(error_msgs)
        type(module)._load_from_state_dict(
            module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if isinstance(given, Tensor) and len(error_msgs) == errors:
            try:
                coded.register(module.weight, module.weight_scale, self.dtype)
            except (TypeError, ValueError) as error:  # of tensors that were assigned as they are
                error_msgs.append(f"{name}: {error}")
                return
            coded.note_written(module.weight)

    def __getstate__(self) -> dict[str, Any]:
        """The weight is in it for the scales: a copied module has no tensors yet when its coder is restored."""
        module: Any = self._module()
        weight = module._parameters.get("weight")
        if _holds_codes(module):
            recall_layer(module)
        return {
            "module": module,
            "dtype": self.dtype,
            "weight": weight,
            "kept": None if weight is None else coded.packed(weight),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self.dtype = state["dtype"]
        if state["weight"] is not None:
            coded.unpack(state["weight"], state["kept"])


def check_choice(model: nn.Module, weight_dtype: Any, options: Mapping[str, Any]) -> bool:
    """Whether weights are to be kept in fp8; ValueError for what does not exist or does not go together with it."""
    if not isinstance(weight_dtype, str | torch.dtype | None) or weight_dtype not in CHOICES:
        raise ValueError(f'Invalid weight_dtype: {weight_dtype!r} (expected None or "fp8")')
    if weight_dtype is None:
        return False
    if options.get("extra_bits"):
        raise ValueError(f'weight_dtype="fp8" with extra_bits={options["extra_bits"]}: {coded.NO_BITS_BESIDE}')
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is None or weight.grad is None:
            continue
        if not isinstance(weight.grad, GradientPlaceholder):
            raise ValueError(
                f"{name}.weight has a gradient, which would be lost when the weight becomes fp8: apply it, or clear it "
                "with model.zero_grad(), first"
            )
        _refuse_within_a_step(weight)
    return True


def coder_of(module: nn.Module) -> Coder | None:
    """What makes a layer one whose weight is in codes, or None for any other layer."""
    found: Coder | None = getattr(module.__dict__.get("_apply"), "__self__", None)
    return found if isinstance(found, Coder) else None


def unsuited(layer: nn.Module) -> str | None:
    """Why the weight of a fused layer keeps its type, or None where it can be codes, or is already."""
    weight: Any = layer._parameters["weight"]
    if weight.dtype == CODES:
        return None
    if not isinstance(layer, nn.Linear):
        return "its layer is no torch.nn.Linear"
    if not weight.requires_grad:
        return "it is not trained"
    if weight.numel() < storage.SMALLEST:
        return f"it has fewer than {storage.SMALLEST} numbers"
    if not storage.takes_blocks(weight):
        return "it is not contiguous in memory"
    if hasattr(layer, BUFFER) or "_apply" in layer.__dict__ or "_load_from_state_dict" in layer.__dict__:
        return f"its layer has a {BUFFER}, or ways to move or load tensors, of its own"
    return None


@torch.no_grad()
def convert(layer: nn.Linear) -> bool:
    """Round a layer's weight to fp8, once and to nearest, in place of what it was; `unsuited` must be None.

    Returns whether it was not in codes before, for itself or for a layer that shares it.
    """
    weight = layer.weight
    rounds = weight.dtype != CODES
    if rounds:
        dtype = weight.dtype
        codes, scales = coded.encode(weight)
        weight.grad = None
        weight.data = codes
        coded.register(weight, scales, dtype)
    if coder_of(layer) is None:
        kept = coded.of(weight)
        layer.register_buffer(BUFFER, kept.scales)
        coder = Coder(layer, kept.dtype)
        layer.__dict__.update({name: getattr(coder, own) for name, own in _METHODS.items()})
    return rounds


@torch.no_grad()
def restore(model: nn.Module) -> None:
    """Make numbers of every weight in codes again, of the type that it was."""
    layers: list[tuple[Any, Coder]] = []
    for module in model.modules():
        coder = coder_of(module)
        if coder is not None:
            layers.append((module, coder))
    recall(model)
    for layer, _ in layers:
        _refuse_within_a_step(layer.weight)
        coded.check_written(layer.weight)
    for layer, coder in layers:
        weight = layer.weight
        if weight.dtype == CODES:
            weight.grad = None
            weight.data = coded.decode(weight, layer.weight_scale, coder.dtype)
            coded.forget(weight)
            binding = lookup(weight)
            if binding is not None:
                binding.retake()
        _strip(layer)


def _strip(layer: nn.Module) -> None:
    """Make an ordinary layer of one whose weight is not in codes any more."""
    del layer._buffers[BUFFER]
    layer._non_persistent_buffers_set.discard(BUFFER)
    for name in _METHODS:
        del layer.__dict__[name]


def drop_replaced(layer: nn.Module) -> None:
    """Strip a layer whose weight somebody has replaced by one of numbers."""
    if coder_of(layer) is not None and not _holds_codes(layer):
        _strip(layer)


def _holds_codes(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dtype == CODES


def recall(model: nn.Module) -> None:
    """Learn the scales of every weight in codes from its layer, as for a copy of a model.

    A parameter that was put into its layer with scales of its own brings them along, so that they are saved with it.
    """
    module: Any
    for module in model.modules():
        if coder_of(module) is not None and _holds_codes(module):
            recall_layer(module)
            module._buffers[BUFFER] = coded.known(module.weight).scales


def recall_layer(layer: Any) -> None:
    """Likewise of one layer; a look-up where nothing has changed.

    A weight that has other scales than the layer's buffer is another layer's, which `torch.func.functional_call` has
    put in the place of its own: its own scales are the right ones. RuntimeError for codes that nobody knows scales of
    where the buffer's belong to another weight.
    """
    weight, scales = layer.weight, layer.weight_scale
    kept, coder = coded.find(weight), coder_of(layer)
    assert coder is not None
    if kept is None:
        owner = coded.owner(scales)
        if owner is not None and owner is not weight and owner.data_ptr() != weight.data_ptr():
            raise RuntimeError(
                f"the weight of shape {list(weight.shape)} was put in the place of a layer's own, and is codes without "
                "scales: those of the layer belong to its own weight. Give its scales along with it, as the state dict "
                "of its model holds them (functional_call(model, other.state_dict(), x)), pass the parameter itself, "
                "or attach them with forge_dsl.fp8.attach"
            )
        coded.register(weight, scales, coder.dtype)
    elif kept.scales is scales and kept.dtype != coder.dtype:
        coded.register(weight, scales, coder.dtype)
    if not isinstance(weight, nn.Parameter):
        # An entry of a state dict, put here by functional_call: the parameter that it aliases is updated meanwhile.
        coded.note_written(weight)


def _refuse_within_a_step(weight: Tensor) -> None:
    binding = lookup(weight)
    if binding is not None and binding.updated:
        raise RuntimeError(
            f"{binding.describe()} has been updated by a backward that step() has not counted yet: call step() before "
            "its weight changes its type"
        )
