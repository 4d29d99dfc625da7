"""What `weight.grad` holds after a fused update: the metadata of a gradient that never was, and an error on any use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_READ = (
    "torch.autograd.grad(loss, weight) returns the exact gradient and updates nothing. What needs the stored gradient "
    "needs torch.nn.functional.linear for this weight: its gradient is then an ordinary tensor, and step() applies it"
)
_READ_CODES = (
    "It is kept in fp8, and a gradient in its type would have no meaning. What needs the gradient needs ordinary "
    "weights: forge_dsl.unfuse(model) makes them, and gradients are then ordinary tensors, which step() applies"
)
_CLIPPED = (
    "Clipping, or a norm of the gradients for a log, comes too late: the weights hold this step's update already, so "
    "reload them if it had to be clipped. Leave the clipping out (max_grad_norm=0 in a Hugging Face Trainer, "
    "gradient_clip_val=None in Lightning, no call of clip_grad_norm_), clip per coordinate in the rule with clamp, or "
    "use torch.nn.functional.linear for this weight, whose gradient is then an ordinary tensor that step() applies"
)
_ADDED = (
    "A second gradient arrived for it by another route (torch.nn.functional.linear on the same weight, or another "
    "layer that shares it), after the fused update: use the fused linear function for every use of this weight, or "
    "for none. The weight has already changed: reload it before going on"
)
_SCALED = (
    "A GradScaler cannot unscale it, and backward has already updated the weight with the scaled gradient: reload it. "
    "Train in bfloat16, which needs no scaler, or use torch.nn.functional.linear for this weight"
)


class GradientPlaceholder(torch.Tensor):
    """A tensor of the weight's shape, dtype and device without storage. Reading or writing it raises RuntimeError.

    Its metadata, `repr`, and `is None` work. A deep copy is None: the copied weight already holds the update, and no
    gradient waits for it. Pickling raises.
    """

    subject: str

    @staticmethod
    def __new__(cls, weight: Tensor, subject: str) -> GradientPlaceholder:
        """`subject` names the weight in error messages."""
        placeholder: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device, strides=weight.stride()
        )
        placeholder.subject = subject
        return placeholder

    def explain(self, operation: str) -> str:
        """Why `operation` cannot work, and the way out."""
        if "amp" in operation and "unscale" in operation:
            way_out = _SCALED
        elif operation.startswith("aten.add_."):
            way_out = _ADDED
        elif any(name in operation for name in ("norm", "clamp", "_foreach_mul_")):
            way_out = _CLIPPED
        else:
            way_out = _READ if self.dtype != torch.float8_e4m3fn else _READ_CODES
        return (
            f"{operation} needs the gradient of {self.subject}, which was never stored: backward updated the weight "
            f"tile by tile. {way_out}."
        )

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        return f"GradientPlaceholder({self.subject}: updated inside backward, no gradient was stored)"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty one: compilers and `share_memory` ask every `.grad` for its storage, and need no values of it."""
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self.explain("pickling"))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = _find([*args, *(kwargs or {}).values()])
        operation = str(func)
        raise RuntimeError(operation if found is None else found.explain(operation))


def _find(values: Any) -> GradientPlaceholder | None:
    for value in values:
        if isinstance(value, GradientPlaceholder):
            return value
        if isinstance(value, list | tuple) and (found := _find(value)) is not None:
            return found
    return None


def _refuse(name: str) -> Any:
    def refuse(self: GradientPlaceholder, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self.explain(name))

    return refuse


# These reach for the storage, or fail for another reason, before the dispatcher is asked.
_DIRECT = ("__bool__", "item", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
for _name in _DIRECT:
    setattr(GradientPlaceholder, _name, _refuse(_name))
