"""From the arguments of a command to compiled specs: find the files, compile each, and compare them with each other."""

from __future__ import annotations

import keyword
import os
import re
import site
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.language.source import read_spec
from forge_dsl.language.syntax import NOWHERE, Span
from forge_dsl.leftovers import Leftovers
from forge_dsl.report import Report

if TYPE_CHECKING:
    from forge_dsl.compile import Compiled

# Libraries that the generated modules import, whether this Python has them or not.
NEEDED = frozenset({"forge_dsl", "torch", "triton", "numpy"})
# Modules of the package itself, and names that would hide a library from a script that runs inside the folder.
UNUSABLE = frozenset({"__init__", "__main__", "conftest", "tests", "math", "typing", *NEEDED})


def find_specs(paths: Iterable[Path], report: Report) -> list[Path]:
    """The spec files that `paths` name: a file stands for itself, a folder for the `.opt` files in it, by name.

    A file named twice is taken once. A folder without specs is an error in `report`; whether a file can be read shows
    when it is read.
    """
    found: dict[str, Path] = {}
    for path in paths:
        specs = [path]
        if path.is_dir():
            try:
                names = sorted(os.listdir(path))
            except OSError as error:
                report.add([_error("E0001", f"cannot read the folder `{path}`: {error.strerror}")], "", str(path))
                continue
            specs = [path / name for name in names if name.endswith(".opt") and not name.startswith(".")]
            if not specs:
                report.add([_error("E0001", f"the folder `{path}` holds no .opt file")], "", str(path))
        for spec in specs:
            found.setdefault(os.path.realpath(spec), spec)
    return list(found.values())


def read_named(path: Path) -> str:
    """The text of the spec at `path`. Raises DiagnosticError if it is not called `name.opt`, or as `read_spec` does."""
    text = read_spec(path)
    if not path.name.removesuffix(".opt") or not path.name.endswith(".opt"):
        message = f"a spec is a file called `name.opt`, whose name becomes the module's, and this is `{path.name}`"
        renamed = path.stem if path.stem.isidentifier() else "my_rule"
        raise DiagnosticError([_error("E0903", message, help=f"rename it: {renamed}.opt")], "", str(path))
    return text


def compile_specs(
    paths: Iterable[Path], report: Report, on_done: Callable[[Path], None] | None = None
) -> list[Compiled]:
    """Compile every file, noting errors and warnings of each in `report`; what could not be compiled is left out."""
    from forge_dsl.compile import compile_source

    compiled: list[Compiled] = []
    for path in paths:
        try:
            result = compile_source(read_named(path), str(path))
        except DiagnosticError as error:
            report.add_error(error)
        else:
            report.add(result.warnings, result.checked.source, str(path))
            compiled.append(result)
        if on_done is not None:
            on_done(path)
    check_modules(compiled, report)
    return compiled


def check_modules(compiled: Iterable[Compiled], report: Report) -> None:
    """Note every file whose name makes no module, and everything that two files would both put into the package.

    Case does not tell modules apart: not every file system does.
    """
    taken: dict[str, str] = {}
    modules: dict[str, str] = {}
    compiled = list(compiled)
    files = {item.stem: item.checked.filename for item in compiled}
    for item in compiled:
        tree, stem, filename = item.checked.tree, item.stem, item.checked.filename
        found = []
        if not (stem.isascii() and stem.isidentifier()) or keyword.iskeyword(stem) or stem in UNUSABLE:
            found.append(_unfit_module(stem))
        if (other := modules.setdefault(stem.casefold(), filename)) != filename:
            message = f"the module `{stem}` would be written twice: {other} has the same file name"
            found.append(_error("E0901", message, help="rename one of the two files"))
        for name in (tree.name, f"{tree.name}Linear", f"{stem}_linear", f"{stem}_reference"):
            if (other := taken.setdefault(name, filename)) != filename:
                message = f"the name `{name}` would be generated twice: {other} makes it too"
                found.append(_error("E0901", message, tree.name_span, "give each optimizer of a run a name of its own"))
                break
            if name in files:
                message = f"the name `{name}` would be in the package twice: as the module of {files[name]} too"
                help_ = f"begin classes with a capital letter: `optimizer {_capital(name)}`"
                if _capital(name) == name:
                    help_ = f"give the file another name, as in {name.lower()}.opt"
                found.append(_error("E0901", message, tree.name_span, help_))
                break
        report.add(found, item.checked.source, filename)


def _capital(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name


def _unfit_module(stem: str) -> Diagnostic:
    help_ = "rename the file to letters, digits and underscores: my_rule.opt"
    reason = "which Python cannot import"
    if keyword.iskeyword(stem):
        reason, help_ = "a keyword of Python, which Python cannot import", f"rename the file, as in {stem}_rule.opt"
    elif stem in UNUSABLE:
        reason, help_ = "which the package needs itself, or which would hide a library", "rename the file: my_rule.opt"
    return _error("E0903", f"the file's name gives the module `{stem}`, {reason}", help=help_)


def check_package(folder: Path, report: Report) -> None:
    """Note an output folder whose last part is no name of a package, or that of a library, which it would hide.

    `.` and `..` are taken as they are: whoever writes where they stand imports the modules themselves. What is no
    folder is the writer's to refuse.
    """
    name = folder.name
    if folder.exists() and not folder.is_dir():
        return
    if folder.anchor and folder == Path(folder.anchor):
        message = f"the output folder is the root `{folder}`, which has no name to import"
        report.add([_error("E0904", message, help="give it a name: -o generated")], "", str(folder))
        return
    if name in ("", ".."):
        return
    shown = f"the output folder gives the package `{name}`"
    help_ = f"give it another name: -o {folder.with_name(_another_name(name, folder))}"
    # Python looks for the file of the normal form, whichever form the import is written in.
    if name == "__init__":
        found = _error("E0904", f"{shown}, the name of the file that makes a folder a package", help=help_)
    elif not name.isidentifier() or unicodedata.normalize("NFKC", name) != name or keyword.iskeyword(name):
        kind = "a keyword of Python" if keyword.iskeyword(name) else "no name in Python"
        found = _error("E0904", f"{shown}, {kind}, so it cannot be imported", help=help_)
    elif not (folder.parent / "__init__.py").exists() and (library := _library(name, folder)) is not None:
        found = _error("E0904", f"{shown}, which would hide {library}", help=help_)
    else:
        return
    report.add([found], "", str(folder))


def _another_name(name: str, folder: Path) -> str:
    """A name like this one that can be imported and hides nothing. (A folder below it would be imported through it.)"""
    words = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", name)).strip("_") or "generated"
    words = words if words.isidentifier() else f"rules_{words}"
    taken = words == name or keyword.iskeyword(words) or _library(words, folder) is not None
    return f"{words}_rules" if taken else words


def _library(name: str, folder: Path) -> str | None:
    """What else is imported by this name: a module of Python, or a package that is installed, elsewhere than here."""
    if name in sys.stdlib_module_names or name == "test":  # which is one, but not among these names
        return f"Python's own module `{name}`"
    if name in NEEDED:
        return f"the library `{name}`, which the generated modules need"
    places = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}
    found = PathFinder.find_spec(name, sorted(places))
    if found is None or found.origin is None or Path(found.origin).resolve().parent == folder.resolve():
        return None
    return f"the installed package `{name}`"


def check_leftovers(compiled: Iterable[Compiled], folder: Path, others: Leftovers, report: Report) -> None:
    """Note every name that this run and a module of an earlier run in `folder` would both put into the package."""
    from forge_dsl.emit.module import package_names

    taken = {name: one.stem for one in others.modules for name in (one.stem, *one.names)}
    for item in compiled:
        for name in (item.stem, *package_names(item)):
            if name in taken:
                path = folder / f"{taken[name]}.py"
                message = f"the name `{name}` would be in the package twice: {path}, of an earlier run, has it too"
                help_ = "remove what earlier runs left with --prune, or give this optimizer a name of its own"
                found = _error("E0901", message, item.checked.tree.name_span, help_)
                report.add([found], item.checked.source, item.checked.filename)
                break


def _error(code: str, message: str, span: Span = NOWHERE, help: str | None = None) -> Diagnostic:
    return Diagnostic(code, "error", message, span, help=help)
