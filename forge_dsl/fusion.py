"""`fuse`: any PyTorch model, one line. The linear layers of a model hand their weights' updates to backward.

Only the `forward` of a layer is replaced, on the instance: classes, parameters and names stay what they are, so state
dicts, `repr` and `isinstance` do not notice. Which optimizer updates a weight is asked at each forward; without one the
layer is plain, as in a copy of the model, after the optimizer is gone, or while the weight is frozen.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn.parameter import UninitializedParameter

from forge_dsl.formats.operand import DTYPES
from forge_dsl.runtime import arguments, coded_layers, coded_linear
from forge_dsl.runtime.binding import lookup
from forge_dsl.runtime.coded import CODES
from forge_dsl.runtime.compiled import traced_linear
from forge_dsl.runtime.linear import bound_linear, fused_linear
from forge_dsl.runtime.optimizer import FusedOptimizer

OptimizerT = TypeVar("OptimizerT", bound=FusedOptimizer)
ModuleT = TypeVar("ModuleT", bound=nn.Module)


# Why a layer with a hook on the gradient of its weight is left to step(), or cannot be trained if it came later.
HOOKED = "its weight has a hook on its gradient"
OWN_FORWARD = "has a forward of its own"


def fuse(
    model: nn.Module,
    optimizer_class: type[OptimizerT],
    *,
    params: Iterable[Any] | None = None,
    weight_dtype: str | torch.dtype | None = None,
    **options: Any,
) -> OptimizerT:
    """Build the model's optimizer and let its linear layers update their weights inside backward.

    model            its `nn.Linear` layers, subclasses with the same forward, and transformers' `Conv1D` are fused
                     where that is right; what is left to `step()`, and why, is in `optimizer.report()`
    optimizer_class  a generated class, from `generated`, `forge_dsl.optim` or `forge_dsl.load(...)`
    params           as for the optimizer: parameters, named parameters or param groups; every parameter of the model
                     that requires a gradient by default
    weight_dtype     "fp8" keeps the trained weights of fused layers as float8 e4m3, with a buffer `weight_scale` beside
                     each for every 64 columns of a row; states are bf16 where `state_dtype` does not say otherwise.
                     Weights of fewer than 4096 numbers keep their type. None: weights stay as they are
    options          the optimizer's own arguments

    Returns the optimizer. Calling it again builds another one, which takes the weights over. Raises TypeError,
    ValueError or RuntimeError, before the model is touched, for what cannot be trained like this: a model inside a data
    parallel wrapper, a parameter or an argument that the optimizer refuses.
    """
    _check_class(optimizer_class)
    _check_model(model)
    in_codes = coded_layers.check_choice(model, weight_dtype, options)
    coded_layers.recall(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    taken = list(params) if params is not None else [p for p in names if p.requires_grad]
    if not taken and params is not None:
        raise ValueError("params is empty: nothing to train")
    if not taken:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
    for parameter in _parameters_of(taken):
        if parameter in names:
            arguments.check_parameter(parameter, names[parameter])
    _refuse_sparse(model, {id(parameter) for parameter in _parameters_of(taken)})
    make: Callable[..., OptimizerT] = optimizer_class
    optimizer = make(taken, **options)
    optimizer.know(model, names)
    layers = examine(model, optimizer)
    for layer in layers:
        coded_layers.drop_replaced(layer.module)
        if layer.obstacle is None or coded_layers.coder_of(layer.module) is not None:
            kind = FusedTransposedForward if is_transposed(layer.module) else FusedForward
            layer.module.__dict__["forward"] = kind(layer.module, optimizer)
        elif isinstance(layer.module.__dict__.get("forward"), FusedForward):
            del layer.module.__dict__["forward"]
        suited = in_codes and layer.obstacle is None and coded_layers.unsuited(layer.module) is None
        if suited and coded_layers.convert(layer.module):
            optimizer.take_codes(layer.module.weight)
    optimizer.weight_dtype = "fp8" if in_codes else None
    # A layer with a forward of its own may call the linear function itself.
    if all(layer.obstacle is not None and OWN_FORWARD not in layer.obstacle for layer in layers):
        warnings.warn(
            f"fuse found no linear layer of {type(model).__name__} whose update can move into backward: all of it is "
            "left to step(), as with torch.optim. optimizer.report() says why",
            stacklevel=2,
        )
    return optimizer


def unfuse(model: ModuleT) -> ModuleT:
    """Make every layer that `fuse` changed plain again; returns the model.

    Its optimizer goes on: gradients are then ordinary tensors, which `step()` applies. Weights in fp8 become numbers of
    the type that they had before. Raises RuntimeError, before anything is changed, between backward and step(), where
    such weights are concerned.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    coded_layers.restore(model)
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), FusedForward):
            del module.__dict__["forward"]
    return model


class FusedForward:
    """The `forward` of a fused layer; lies in the layer's `__dict__` and keeps neither it nor the optimizer alive.

    Copied or unpickled with its layer it belongs to the copy, and knows no optimizer.
    """

    __slots__ = ("__weakref__", "_module", "_optimizer")

    def __init__(self, module: nn.Module, optimizer: FusedOptimizer | None) -> None:
        self._module = weakref.ref(module)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        module: Any = self._module()
        weight, bias = module.weight, module.bias
        if weight.requires_grad and weight.dtype is not CODES and not is_compiling() and is_grad_enabled():
            binding = lookup(weight)
            if binding is not None and binding.optimizer is not None:
                return bound_linear(input, weight, bias, binding)
        if weight.dtype == CODES:
            return self._apart(module, input) if torch.compiler.is_compiling() else self._eager(module, input)
        if torch.compiler.is_compiling():
            return self._traced(input, weight, bias)
        optimizer = self._optimizer_of(weight)
        if optimizer is not None:
            return fused_linear(input, weight, bias, type(optimizer))
        return F.linear(input, weight, bias)

    def _optimizer_of(self, weight: Tensor) -> FusedOptimizer | None:
        """The optimizer that updates the weight inside backward, None where the layer is plain."""
        if not weight.requires_grad or not isinstance(weight, nn.Parameter):
            return None
        binding = lookup(weight)
        optimizer = None if binding is None else binding.optimizer
        if optimizer is None and torch.is_grad_enabled():
            self._check_known(weight)
        return optimizer

    def _eager(self, module: Any, input: Tensor) -> Tensor:
        """A layer whose weight is in codes: in a copy of the model its scales are not known yet."""
        coded_layers.recall_layer(module)
        weight, bias = module.weight, module.bias
        if weight.requires_grad and torch.is_grad_enabled():
            binding = lookup(weight)
            optimizer = None if binding is None else binding.optimizer
            if optimizer is not None:
                return fused_linear(input, weight, bias, type(optimizer))
            self._check_known(weight)
            gone = self._optimizer is not None and self._optimizer() is None
            way = "keep what fuse() returns" if gone else "call fuse() for this model, which may be a copy"
            raise RuntimeError(
                f"the weight of shape {list(weight.shape)} is kept in fp8 and "
                f"{'its optimizer was deleted' if gone else 'no optimizer has it'}, so nothing could use its gradient: "
                f"{way}; or run it under torch.no_grad(), freeze it with requires_grad_(False), or make its weights "
                "plain with unfuse()"
            )
        return coded_linear.linear(input, weight, bias)

    @torch.compiler.disable(reason="weights in fp8 or [in, out] run eagerly")  # type: ignore[untyped-decorator, no-untyped-call]
    def _apart(self, module: Any, input: Tensor) -> Any:
        """The same as a break in a compiled graph."""
        return self._eager(module, input)

    def _traced(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a compiler sees: it cannot ask for the weight's binding, so whether there is one is found out later."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or not isinstance(weight, nn.Parameter):
            return F.linear(input, weight, bias)
        return traced_linear(input, weight, bias, type(optimizer).__name__)

    def _check_known(self, weight: Tensor) -> None:
        """Raise RuntimeError rather than train a model in which this weight silently stands still."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            raise RuntimeError(
                f"the weight of shape {list(weight.shape)}, {weight.dtype} on {weight.device} requires a gradient, and "
                f"the {type(optimizer).__name__} of its model does not have it: it was frozen when fuse() was called, "
                'or was replaced since, as by FSDP. Give it to optimizer.add_param_group({"params": [weight]}), call '
                "fuse() again, or make the model plain with unfuse()"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self._optimizer = None


class FusedTransposedForward(FusedForward):
    """Likewise of transformers' `Conv1D`, a linear layer whose weight is [in, out]."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        module: Any = self._module()
        return self._apart(module, input) if torch.compiler.is_compiling() else self._eager(module, input)

    def _eager(self, module: Any, input: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        optimizer = self._optimizer_of(weight)
        if optimizer is not None:
            return fused_linear(input, weight, bias, type(optimizer), transposed=True)
        return F.linear(input, weight.t(), bias)


@dataclass(frozen=True)
class Layer:
    """A linear layer; `obstacle` says why its weight is left to step(), None where it is fused."""

    name: str
    module: Any
    obstacle: str | None


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer with a weight [in, out]: the `Conv1D` of transformers, which GPT-2 is made of."""
    known = _conv1d()
    return known is not None and isinstance(module, known)


def _conv1d() -> Any:
    """The class, None where transformers was not imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def examine(model: nn.Module, optimizer: FusedOptimizer) -> list[Layer]:
    """Every linear layer of the model, each once, with what is in the way of fusing it."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_transposed(module)
    ]
    attention = {id(child) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for child in m.children()}
    own = {
        id(module): "torch.nn.MultiheadAttention computes with its weight itself"
        if id(module) in attention
        else _obstacle(module, optimizer)
        for _, module in found
    }
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((f"{name}.{attribute}".lstrip("."), module))
    shared = _sharing_memory(model)
    layers = []
    for name, module in found:
        obstacle = own[id(module)]
        if obstacle is None:
            others = [(n, m) for n, m in owners[id(module.weight)] if m is not module]
            tied = next((n for n, m in others if id(m) not in own or own[id(m)] is not None), None)
            obstacle = f"tied: {tied} and {name}.weight are one parameter" if tied else shared.get(id(module.weight))
        layers.append(Layer(name, module, obstacle))
    return layers


def _obstacle(module: nn.Module, optimizer: FusedOptimizer) -> str | None:
    """What is in the way within the layer itself."""
    kind = type(module)
    known = _conv1d() if is_transposed(module) else nn.Linear
    if kind.forward is not known.forward:
        return f"{kind.__name__} {OWN_FORWARD}"
    if not isinstance(module.__dict__.get("forward"), FusedForward | None):
        return "its forward was replaced on the instance"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed in each forward (parametrised, weight-normed or pruned)"
    plain = weight.dtype in DTYPES or coded_layers.coder_of(module) is not None
    if type(weight) is not nn.Parameter or not plain:
        return f"its weight is {type(weight).__name__} of {weight.dtype} (quantised?)"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return HOOKED
    if weight.requires_grad and not optimizer.has(weight):
        return "no param group has its weight"
    if optimizer.has(weight) and optimizer.binding_of(weight).together is not None:
        return "its weight and other parameters are slices of one tensor"
    return None


def _sharing_memory(model: nn.Module) -> dict[int, str]:
    """Parameters, by id, that overlap in memory with another one: torch steps each of them, one after the other."""
    spans = sorted(_spans(model))
    found: dict[int, str] = {}
    reach, last = -1, ("", 0)
    for start, end, name, key in spans:
        if start < reach:
            found[key] = f"its memory is also {last[0]}'s"
            found.setdefault(last[1], f"its memory is also {name}'s")
        if end > reach:
            reach, last = end, (name, key)
    return found


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str, int]]:
    """First and last address, name and id of each parameter that has memory."""
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.device.type != "meta":
            start = parameter.data_ptr()
            last = sum(stride * (size - 1) for stride, size in zip(parameter.stride(), parameter.shape, strict=True))
            if parameter.numel():
                yield start, start + (last + 1) * parameter.element_size(), name, id(parameter)


def _parameters_of(taken: list[Any]) -> Iterator[Tensor]:
    """The tensors among parameters, named parameters and param groups; what is none is the optimizer's to refuse."""
    for item in taken:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple):
            yield from (part for part in item if isinstance(part, Tensor))
        elif isinstance(item, dict) and "params" in item:
            if isinstance(item["params"], Tensor):
                yield item["params"]
            elif not isinstance(item["params"], set):
                item["params"] = list(item["params"])
                yield from _parameters_of(item["params"])


def _refuse_sparse(model: nn.Module, taken: set[int]) -> None:
    """Raise ValueError for an embedding whose gradient step() would refuse, when other weights are updated already."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            weight = module._parameters.get("weight")
            if weight is not None and weight.requires_grad and id(weight) in taken:
                raise ValueError(
                    f"{name or type(module).__name__} has sparse=True, and sparse gradients are not supported: build "
                    "it with sparse=False, or leave its weight out of params"
                )


def _check_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer):
        return
    if isinstance(optimizer_class, nn.Module):
        raise TypeError("fuse takes the model first and then the optimizer class: fuse(model, AdamW, lr=1e-3)")
    if isinstance(optimizer_class, torch.optim.Optimizer):
        kind = type(optimizer_class).__name__
        raise TypeError(
            f"fuse takes an optimizer's class and builds it: fuse(model, {kind}, lr=1e-3). This is one that is built"
        )
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if isinstance(optimizer_class, type):
        name = f"{optimizer_class.__module__}.{name}"
    elif isinstance(optimizer_class, ModuleType):
        name = f"the module {name}"
    raise TypeError(
        f"{name} is not a generated optimizer class: use one from forge_dsl.optim, from the package that forge-gen "
        'wrote, or from forge_dsl.load("my.opt")'
    )


def _check_model(model: Any) -> None:
    """Raise for what cannot be fused at all: wrappers that average gradients, and parameters that have no data."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        wrapper = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise RuntimeError(
                f"{name or 'the model'} is wrapped in {wrapper}, which averages or shards gradients, and a fused "
                "weight is updated inside backward, before any average: fuse the model without the wrapper, on one "
                "device, or train it with torch.optim"
            )
    distributed = sys.modules.get("torch.distributed.tensor")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the lazy module once before calling fuse()")
        if distributed is not None and isinstance(parameter, distributed.DTensor):
            raise RuntimeError(f"{name} is sharded (a DTensor): fuse the model without FSDP or tensor parallelism")


_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"})
