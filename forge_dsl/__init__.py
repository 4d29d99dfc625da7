"""forge-dsl: optimizers written as mathematics, compiled into kernels that train without storing a weight gradient.

    import forge_dsl
    module = forge_dsl.load("my.opt")       # a compiled module, for notebooks
    from forge_dsl.optim import AdamW       # the eight optimizers that come with the package
"""

from __future__ import annotations

from forge_dsl.version import __version__

__all__ = ["__version__", "load", "optim"]


def __getattr__(name: str) -> object:
    # Lazily, so that the command line, which needs none of it, does not pay for importing torch.
    if name == "load":
        from forge_dsl.loading import load

        return load
    if name == "optim":
        import importlib

        return importlib.import_module("forge_dsl.optim")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
