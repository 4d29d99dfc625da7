"""The spec that `forge-gen new` writes: small, complete, commented, and correct as it stands."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from forge_dsl import writer
from forge_dsl.compile import compile_source
from forge_dsl.diagnostics import Diagnostic, DiagnosticError
from forge_dsl.inputs import check_modules
from forge_dsl.language.syntax import NOWHERE
from forge_dsl.report import Report

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TEXT = """\
# {name}: say in one line what the rule does and where it comes from. This line becomes the title of its documentation.
#
# A rule is stated for one coordinate: the new value of `weight` and of each state may depend on this coordinate of
# `grad`, `weight` and the states, and on numbers. Sums, means and norms over a tensor are refused.
#
#     forge-gen {stem}.opt -o generated/
#     from generated import {name}, {stem}_linear
optimizer {name}

# Hyper-parameters: a default and a valid range each. They change at run time without compiling anything.
hyper lr           = 1e-3  in [0, inf)
hyper beta         = 0.9   in [0, 1)
hyper weight_decay = 0     in [0, inf)

# A flag is chosen when the optimizer is made, and each choice gets a kernel of its own.
flag  maximize = false

# Tensors of the weight's shape that last from step to step; they start at zero.
state momentum

# Numbers of the step, computed once per step in float64. `step` counts this weight's updates from 1.
let bias = 1 - beta ** step

# The rule. Statements run in order; a name that is neither declared nor built in is a local.
update:
  g        = -grad if maximize else grad
  weight   = weight * (1 - lr * weight_decay)
  momentum = beta * momentum + (1 - beta) * g
  weight   = weight - lr / bias * momentum
"""


def starter(name: str) -> tuple[str, str]:
    """The stem and the text for an optimizer called `name`: `AdaFoo` gives ada_foo, and `ada_foo` the class AdaFoo."""
    if name == name.lower():
        return name, _TEXT.format(name="".join(part[:1].upper() + part[1:] for part in name.split("_")), stem=name)
    stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()
    return stem, _TEXT.format(name=name, stem=stem)


def create(name: str, out: Path | None, report: Report) -> Path:
    """Write the starter spec for `name` to `out`, a `.opt` file or a folder; `report` gets the reason if that fails."""
    stem, text = starter(name)
    path = (out or Path()) / f"{stem}.opt"
    if out is not None and out.suffix == ".opt" and not out.is_dir():
        path, text = out, text.replace(f"{stem}.opt", out.name).replace(f"{stem}_linear", f"{out.stem}_linear")
    _check_arguments(name, out, report)
    if report.errors:
        return path
    # What is wrong now is the name: there is no file to point into.
    problems = Report()
    try:
        check_modules([compile_source(text, str(path))], problems)
    except DiagnosticError as error:
        problems.add_error(error)
    report.add([replace(problem, span=NOWHERE) for problem in problems], "", str(path))
    if not report.errors:
        try:
            writer.create_text(path, text)
        except writer.OutputError as error:
            report.add_output(error)
    return path


def _check_arguments(name: str, out: Path | None, report: Report) -> None:
    """Note a name that no file could put right, and an output that is neither a spec nor a folder."""
    if not _NAME.fullmatch(name):
        help_ = "a name is made of ASCII letters, digits and underscores and begins with a letter: AdaFoo"
        found = Diagnostic("E0204", "error", f"`{name}` is not a name for an optimizer", NOWHERE, help=help_)
        report.add([found], "", name)
    if out is not None and (out.suffix not in ("", ".opt") or out.name == ".opt") and not out.is_dir():
        message = f"a spec is a file called `name.opt`, and -o names `{out.name}`"
        file = out.with_suffix(".opt") if out.suffix else out.with_name("my_rule.opt")
        help_ = f"write -o {file}, or make the folder `{out.name}` first"
        report.add([Diagnostic("E0903", "error", message, NOWHERE, help=help_)], "", str(out))
