"""The eight optimizers of the package, compiled in memory on first use: `from forge_dsl.optim import AdamW`.

For each there are the class, its linear function and its linear module: `AdamW`, `adamw_linear`, `AdamWLinear`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_dsl.loading import load
from forge_dsl.resources import optimizers_dir

if TYPE_CHECKING:
    from types import ModuleType

_CLASSES = {
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "lion": "Lion",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "sgd": "SGD",
    "sgd_momentum": "SGDMomentum",
}
_HOME = {
    name: stem
    for stem, cls in _CLASSES.items()
    for name in (cls, f"{cls}Linear", f"{stem}_linear", f"{stem}_reference")
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "Adam":
        raise AttributeError(f"module {__name__!r} has no Adam: without weight decay it is AdamW(..., weight_decay=0)")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _module(stem: str) -> ModuleType:
    return load(optimizers_dir() / f"{stem}.opt")
