"""The command `forge-gen`: generate, and the tools `explain`, `fmt`, `new` and `tune`.

Exit status: 0 good, 1 diagnostics (nothing was written), 2 usage. Everything heavy is imported where it is used: the
command must answer at once, and no part of the compiler needs torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from forge_dsl.report import Report

TOOLS = ("explain", "fmt", "new", "tune")
_EPILOG = (
    "Tools: forge-gen explain SPEC, forge-gen fmt PATHS, forge-gen new NAME, forge-gen tune (each has --help). "
    "A spec or folder with such a name is written ./explain."
)


class Format(StrEnum):
    """How results are shown."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Show diagnostics and results as text or JSON.")]

_settings = {"add_completion": False, "pretty_exceptions_enable": False}
_generate = typer.Typer(**_settings)  # type: ignore[arg-type]
_tools = typer.Typer(**_settings)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `forge-gen` with `arguments` (default: those of the process) and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a file name or a formula may not fit the terminal's encoding
    argv = list(sys.argv[1:] if arguments is None else arguments)
    app = _tools if argv and argv[0] in TOOLS else _generate
    if argv and argv[0] == "tune":
        argv = _spread(argv)
    app.rich_markup_mode = "rich" if sys.stdout.isatty() else None
    try:
        try:
            app(argv, prog_name="forge-gen")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except OSError as error:
        if error.filename is not None:  # not a stream
            raise
        _output_lost(error)
    raise AssertionError("typer exits")


def _spread(argv: list[str]) -> list[str]:
    """`--tokens 512 2048` as `--tokens 512 --tokens 2048`: the options of `tune` that take several values."""
    found: list[str] = []
    option = ""
    for word in argv:
        if word.startswith("-"):
            option = word if word in ("--shape", "--tokens", "--optimizer") else ""
        elif option and found[-1] != option:
            found.append(option)
        found.append(word)
    return found


def _output_lost(error: OSError) -> NoReturn:
    """End with status 1 because what was to be printed could not be, and keep Python from trying once more."""
    with contextlib.suppress(OSError):
        print(f"forge-gen: cannot print: {error.strerror or error}", file=sys.stderr, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(1)


def _path(text: str) -> Path:
    """A path of the command line; an empty one would stand for the current folder without saying so."""
    if not text:
        raise typer.BadParameter("the path is empty; the current folder is written .")
    return Path(text)


def _show_version(wanted: bool) -> None:
    if wanted:
        from forge_dsl.version import __version__

        print(f"forge-gen {__version__}")
        raise typer.Exit


@_generate.command(epilog=_EPILOG)
def generate(
    specs: Annotated[
        list[Path], typer.Argument(parser=_path, help="Spec files, and folders of .opt files.", metavar="SPECS...")
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", parser=_path, help="The folder to write to.", metavar="OUT", show_default=False),
    ],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if OUT is not up to date.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    docs: Annotated[
        Path | None, typer.Option(parser=_path, help="Also write one page per optimizer here.", metavar="FOLDER")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove generated files that no spec accounts for.")] = False,
    format: FormatOption = Format.text,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Compile optimizer specs into modules of fused kernels.

    All specs are read and checked before anything is written, and either every file is written or none.
    """
    from forge_dsl import generation

    if check and prune:
        raise typer.BadParameter("--check writes and removes nothing, so --prune has no place beside it")
    if docs is not None and docs.resolve() == out.resolve():
        raise typer.BadParameter("--docs needs a folder of its own")
    as_json = format is Format.json
    run = generation.Run(tuple(specs), out, docs, check=check, strict=strict, prune=prune, as_json=as_json)
    raise typer.Exit(generation.generate(run))


@_tools.command()
def explain(
    spec: Annotated[Path, typer.Argument(parser=_path, help="A spec file.", metavar="SPEC")],
    format: FormatOption = Format.text,
) -> None:
    """Show what a spec costs: state, traffic, arithmetic, scalars, and why its update can be fused."""
    from forge_dsl.explain import explain_spec, render, to_json
    from forge_dsl.inputs import compile_specs
    from forge_dsl.report import Report, show

    report = Report()
    compiled = compile_specs([spec], report)
    as_json = format is Format.json
    if not compiled:
        show(report, as_json)
        raise typer.Exit(1)
    facts = explain_spec(compiled[0])
    if as_json:
        show(report, as_json, **to_json(facts))
    else:
        show(report, as_json)
        render(facts)


@_tools.command()
def fmt(
    paths: Annotated[
        list[Path], typer.Argument(parser=_path, help="Spec files, and folders of .opt files.", metavar="PATHS...")
    ],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file would change.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Put specs into their canonical form, comments kept. Nothing is written if one of them does not parse."""
    from forge_dsl import formatting
    from forge_dsl.report import Report

    report = Report()
    changed = formatting.format_files(paths, report, write=not check)
    _finish(report, format, failed=check and bool(changed), changed=[str(path) for path in changed])
    if format is Format.text:
        for path in changed:
            print(f"{'would change' if check else 'changed'}: {path}")
    raise typer.Exit(int(check and bool(changed)))


@_tools.command()
def new(
    name: Annotated[str, typer.Argument(help="The optimizer's name: AdaFoo, or ada_foo.", metavar="NAME")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", parser=_path, help="File or folder (default: here).", metavar="PATH")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Write a small commented spec to start from. An existing file is never overwritten."""
    from forge_dsl.report import Report
    from forge_dsl.starter import create

    report = Report()
    path = create(name, out, report)
    _finish(report, format, created=str(path))
    if format is Format.text:
        print(f"wrote {path}; compile it with: forge-gen {path} -o generated/")


class Number(StrEnum):
    """Types of tensors."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@_tools.command()
def tune(
    shape: Annotated[
        list[str] | None, typer.Option(help="Weights, out x in.  [default: 4096x4096 14336x4096]", metavar="OUTxIN...")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of tokens.  [default: 512 2048 8192]", metavar="N...")
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Optimizers, or .opt files.  [default: adamw]", metavar="NAME...")
    ] = None,
    dtype: Annotated[Number, typer.Option(help="Type of the operands and the weight.")] = Number.bf16,
    states: Annotated[Number | None, typer.Option(help="Type of the states.  [default: that of the weight]")] = None,
    gradient_bits: Annotated[
        int, typer.Option(help="Bits of a gradient that the kernel for Hopper hands over, 24 or 32.")
    ] = 24,
    device: Annotated[int, typer.Option(min=0, help="Which GPU.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, and write nothing.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what is known, and measure nothing.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what earlier runs wrote.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Measure which schedule is the fastest on this machine's GPU, on clones, and keep it for later programs."""
    from forge_dsl.selection import command

    as_json = format is Format.json
    if show and clear:
        raise typer.BadParameter("--show and --clear are two things")
    if show or clear:
        raise typer.Exit(command.show(as_json) if show else command.clear(as_json))
    try:
        shapes = [command.parse_shape(text) for text in shape or ("4096x4096", "14336x4096")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if gradient_bits not in (24, 32):
        raise typer.BadParameter(f"--gradient-bits is 24 or 32, not {gradient_bits}; with fewer, 24 decides")
    names = optimizer or ["adamw"]
    known = command.optimizer_names()
    for name in names:
        if name not in known and not (name.endswith(".opt") and Path(name).is_file()):
            raise typer.BadParameter(f"there is no optimizer {name!r}; there are {', '.join(known)}, and .opt files")
    wish = command.Wish(
        shapes=tuple(shapes),
        tokens=tuple(tokens or (512, 2048, 8192)),
        optimizers=tuple(names),
        operand=dtype.value,
        state=(states or dtype).value,
        device=device,
        dry_run=dry_run,
        as_json=as_json,
        gradient_bits=32 if gradient_bits == 32 else 24,
    )
    raise typer.Exit(command.tune(wish))


def _finish(report: Report, format: Format, failed: bool = False, **facts: object) -> None:
    """Show the report; leave with status 1 if it holds an error."""
    from forge_dsl.report import show

    show(report, format is Format.json, **({} if report.errors else facts))
    if report.errors:
        raise typer.Exit(1)
