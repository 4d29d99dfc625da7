"""Compiling a spec in memory: the same module that `forge-gen` writes, without a file."""

from __future__ import annotations

import keyword
import linecache
import os
import sys
import types
import warnings
from pathlib import Path

from forge_dsl.compile import Compiled, compile_source
from forge_dsl.diagnostics import Diagnostic, DiagnosticError, render
from forge_dsl.emit.module import render_module
from forge_dsl.inputs import read_named
from forge_dsl.language.syntax import NOWHERE


def load(spec: str | os.PathLike[str]) -> types.ModuleType:
    """Compile a spec and return its module, which has the optimizer class, `<stem>_linear`, the kernels and `SPEC`.

    spec: the path of a `.opt` file, or the text of a spec (anything with a line break). Raises DiagnosticError with all
    that is wrong with it, and passes warnings on. Loading the same text again returns the same module.
    """
    if isinstance(spec, str) and "\n" in spec:
        return _loaded(compile_source(spec, "<string>"), spec)
    path = Path(spec)
    if isinstance(spec, str) and not path.name.endswith(".opt") and not (spec and path.exists()):
        message = f"cannot read `{spec}`: there is no such file"
        help_ = 'give the path of a .opt file, or the text of a spec, which has more than one line: "optimizer A\\n..."'
        raise DiagnosticError([Diagnostic("E0001", "error", message, NOWHERE, help=help_)], "", spec)
    text = read_named(path)
    if not (path.stem.isascii() and path.stem.isidentifier()) or keyword.iskeyword(path.stem):
        message = f"the file's name gives functions called `{path.stem}_linear` and so on, which Python cannot have"
        found = Diagnostic("E0903", "error", message, NOWHERE, help="rename it to letters, digits and underscores")
        raise DiagnosticError([found], text, str(path))
    return _loaded(compile_source(text, str(path)), text)


def _loaded(compiled: Compiled, text: str) -> types.ModuleType:
    """`module_of`, passing on what the compiler warns of; `text` is the spec's, which the warnings point into."""
    if compiled.warnings:
        found = render(compiled.warnings, text, compiled.checked.filename, color=False)
        warnings.warn(f"the compiler warns:\n{found}", stacklevel=3)
    return module_of(compiled)


def module_of(compiled: Compiled) -> types.ModuleType:
    """The module of a compiled spec, made once per spec text, name and generator version."""
    name = f"forge_dsl._loaded.{compiled.stem}_{compiled.digest}"
    if name in sys.modules:
        return sys.modules[name]
    source = render_module(compiled)
    filename = f"<forge_dsl {compiled.stem}.opt {compiled.digest}>"
    # Triton reads a kernel's source through inspect, which asks linecache; an entry without a time is never discarded.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name, f"Compiled from {compiled.checked.filename}.")
    module.__file__ = filename
    sys.modules[name] = module
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
