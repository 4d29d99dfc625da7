"""Where the templates and the packaged specs are: inside an installed package, or beside it in a source tree."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """The folder of the Jinja templates. Raises FileNotFoundError if the installation lacks it."""
    return _folder("templates")


def optimizers_dir() -> Path:
    """The folder of the specs that come with the project. Raises FileNotFoundError if the installation lacks it."""
    return _folder("optimizers")


def _folder(name: str) -> Path:
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(f"the installation of forge-dsl is incomplete: no folder {name!r} in or beside {_PACKAGE}")
