"""The files that one run of the command writes: modules, tests, the package, and pages of documentation."""

from __future__ import annotations

from collections.abc import Sequence

from forge_dsl.compile import Compiled
from forge_dsl.emit.module import render_module, render_package, render_tests, render_tests_package
from forge_dsl.emit.page import render_page

__all__ = ["render", "render_page"]


def render(compiled: Sequence[Compiled]) -> dict[str, str]:
    """The files of an output folder, by relative path: a module and its tests per spec, and the package itself."""
    files = {f"{one.stem}.py": render_module(one) for one in compiled}
    files |= {f"tests/test_{one.stem}.py": render_tests(one) for one in compiled}
    files["__init__.py"] = render_package(compiled)
    files["tests/__init__.py"] = render_tests_package()
    return files
