"""forge-dsl: optimizers written as mathematics, compiled into kernels that train without storing a weight gradient.

import forge_dsl
module = forge_dsl.load("my.opt")       # a compiled module, for notebooks
from forge_dsl.optim import AdamW       # the eight optimizers that come with the package
optimizer = forge_dsl.fuse(model, AdamW, lr=3e-4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_dsl.version import __version__

if TYPE_CHECKING:
    from forge_dsl import fp8 as fp8
    from forge_dsl import optim as optim
    from forge_dsl.diagnostics import DiagnosticError
    from forge_dsl.formats.operand import Scaled
    from forge_dsl.fusion import fuse, unfuse
    from forge_dsl.groups import decay_groups
    from forge_dsl.loading import load

__all__ = ["DiagnosticError", "Scaled", "__version__", "decay_groups", "fp8", "fuse", "load", "optim", "unfuse"]

_HOMES = {
    "load": "loading",
    "fuse": "fusion",
    "unfuse": "fusion",
    "decay_groups": "groups",
    "Scaled": "formats.operand",
    "DiagnosticError": "diagnostics",
}


def __getattr__(name: str) -> object:
    # Lazily, so that the command line, which needs none of it, does not pay for importing torch.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"forge_dsl.{_HOMES[name]}"), name)
    if name in ("fp8", "optim"):
        return importlib.import_module(f"forge_dsl.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
