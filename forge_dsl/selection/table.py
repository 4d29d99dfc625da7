"""Tables of measured schedules: the one in the package, and one file per device and versions in the user's cache.

A table belongs to a device and says, for classes of updates, how long each schedule took. Both kinds have one format,
JSON; `Table` and its parts define it. A file that cannot be used never stops a program: it is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_dsl.version import __version__

Schedule = Literal["hopper", "portable", "banded"]
SCHEDULES: tuple[Schedule, ...] = ("hopper", "portable", "banded")
PACKAGED = Path(__file__).with_name("measured.json")
_STRICT = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Update:
    """A class of updates that one measurement speaks for.

    operand: type of x and dy; stored: bytes per parameter of the weight and its states together; wide: whether one of
    them is fp32; rows, columns, tokens: base-2 logarithms, rounded (`bucket`); gradient_bits: with how many the kernel
    for Hopper handed gradients over.
    """

    operand: str
    stored: int
    wide: bool
    rows: int
    columns: int
    tokens: int
    gradient_bits: int = 24


def bucket(size: int) -> int:
    """The base-2 logarithm of a size, rounded to the nearest whole number: 1449 to 2896 tokens are 11. -1 for 0."""
    return ((2 * size * size).bit_length() - 1) // 2


class Measurement(BaseModel):
    """What one class of updates took, in milliseconds, at the sizes that were measured."""

    model_config = _STRICT

    operand: Literal["bfloat16", "float16", "float32"]
    stored: int = Field(gt=0)
    wide: bool
    rows: int = Field(gt=0)
    columns: int = Field(gt=0)
    tokens: int = Field(gt=0)
    gradient_bits: Literal[16, 20, 24, 32] = 24
    milliseconds: dict[Schedule, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)

    @property
    def update(self) -> Update:
        """The class that it speaks for."""
        sizes = bucket(self.rows), bucket(self.columns), bucket(self.tokens)
        return Update(self.operand, self.stored, self.wide, *sizes, self.gradient_bits)

    @property
    def order(self) -> tuple[Schedule, ...]:
        """Schedules from the fastest to the slowest; of two that took the same time, the one named first above."""
        known = [name for name in SCHEDULES if name in self.milliseconds]
        return tuple(sorted(known, key=lambda name: self.milliseconds[name]))


class Device(BaseModel):
    """A device and the software that it was measured with; equal where a measurement still holds."""

    model_config = _STRICT

    name: str
    capability: tuple[int, int]
    versions: dict[str, str]


class Table(BaseModel):
    """Everything that was measured on one device."""

    model_config = _STRICT

    format: Literal[1] = 1
    device: Device
    measured: tuple[Measurement, ...]

    def orders(self) -> dict[Update, tuple[Schedule, ...]]:
        """For each class the schedules by time; the last measurement of a class counts."""
        return {one.update: one.order for one in self.measured}

    def with_more(self, measured: list[Measurement]) -> Table:
        """This table with measurements added, each in the place of an older one of its class."""
        kept = {one.update: one for one in (*self.measured, *measured)}
        ordered = sorted(
            kept.values(),
            key=lambda m: (m.operand, m.stored, m.wide, m.rows, m.columns, m.tokens, m.gradient_bits),
        )
        return self.model_copy(update={"measured": tuple(ordered)})


def packaged() -> list[Table]:
    """The tables that come with the package; each holds for its compute capability."""
    return [Table.model_validate(one) for one in json.loads(PACKAGED.read_text())["tables"]]


def this_device(index: int) -> Device:
    """A device of this machine."""
    import torch

    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    major, minor = torch.cuda.get_device_capability(index)
    versions = {"torch": torch.__version__, "triton": triton, "forge_dsl": __version__}
    return Device(name=torch.cuda.get_device_name(index), capability=(major, minor), versions=versions)


def cache_folder() -> Path:
    """Where tables of the user are: `forge-dsl/schedules` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of these folders says to ignore a relative path.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "forge-dsl" / "schedules"


def cache_file(device: Device) -> Path:
    """The file of a device and its versions; other versions have another."""
    digest = hashlib.sha256(device.model_dump_json().encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return cache_folder() / f"{readable}-{digest}.json"


def read(device: Device) -> Table | None:
    """The user's table of a device, or None where there is none or none that can be used (with a warning)."""
    try:
        path = cache_file(device)
        text = path.read_bytes()
    except (FileNotFoundError, RuntimeError):  # no such file; no home folder
        return None
    except OSError as error:
        _ignored(path, error.strerror or str(error))
        return None
    try:
        table = Table.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        _ignored(path, f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}")
        return None
    if table.device != device:
        _ignored(path, f"it was measured on {described(table.device)}, and this is {described(device)}")
        return None
    return table


def described(device: Device) -> str:
    """Name and versions, for people."""
    return " ".join([device.name, *(f"{name} {version}" for name, version in device.versions.items())])


def _ignored(path: Path, reason: str) -> None:
    warnings.warn(
        f"the measured schedules in {path} are ignored ({reason}); measure again with `forge-gen tune`, "
        "or remove them with `forge-gen tune --clear`",
        RuntimeWarning,
        stacklevel=2,
    )


def write(table: Table) -> Path:
    """Put a table into the user's cache: a reader sees the old file or the new one, whole. Raises OSError."""
    path = cache_file(table.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(table.model_dump_json(indent=1) + "\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def clear() -> list[Path]:
    """Remove every table from the user's cache; returns what was removed. Raises OSError."""
    found = cached()
    for path in found:
        path.unlink()
    return found


def cached() -> list[Path]:
    """The files in the user's cache."""
    return sorted(cache_folder().glob("*.json"))
