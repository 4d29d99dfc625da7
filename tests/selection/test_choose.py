"""Which schedule an update gets: by rule, by the package's table, by the user's; and never a file that is not right."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_dsl.selection import choose, table
from forge_dsl.selection.table import Device, Measurement, Table, bucket

HOPPER = Device(name="NVIDIA H200", capability=(9, 0), versions={"torch": "2.11.0", "triton": "3.6.0"})
OTHER = Device(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), versions={"torch": "2.11.0", "triton": "3.6.0"})
BF16, FP32 = torch.bfloat16, torch.float32


class OnGpu:
    """Shape and type of a tensor that is said to be on a GPU."""

    def __init__(self, *shape: int, dtype: torch.dtype = BF16) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda", 0)

    def element_size(self) -> int:
        return self.dtype.itemsize


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use(monkeypatch, HOPPER)
    yield tmp_path / "forge-dsl" / "schedules"
    choose.forget()


def use(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(table, "this_device", lambda index: device)
    choose.forget()


def chosen(
    rows: int = 4096,
    tokens: int = 2048,
    operand: torch.dtype = BF16,
    state: torch.dtype = BF16,
    setting: str = "auto",
    **more: Any,
) -> str:
    """The schedule of an AdamW update of a bf16 weight [rows, 4096]."""
    weight: Any = OnGpu(rows, 4096)
    stored: Any = [weight, *(OnGpu(rows, 4096, dtype=state) for _ in range(2))]
    x: Any = OnGpu(tokens, 4096, dtype=operand)
    return choose.choose(setting, x, weight, stored, **more)


def measured(
    ms: dict[str, float], rows: int = 4096, tokens: int = 2048, stored: int = 6, bits: int = 24
) -> Measurement:
    sizes = {"rows": rows, "columns": 4096, "tokens": tokens, "gradient_bits": bits}
    return Measurement(operand="bfloat16", stored=stored, wide=stored > 6, milliseconds=ms, **sizes)


def keep(device: Device, *found: Measurement) -> Path:
    path = table.write(Table(device=device, measured=found))
    choose.forget()
    return path


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
@pytest.mark.parametrize(("rows", "state"), [(4096, BF16), (14336, BF16), (4096, FP32)])
def test_the_package_knows_what_was_measured_on_an_h200(rows: int, tokens: int, state: torch.dtype) -> None:
    assert choose.measured_order(
        0, "bfloat16", 6 if state == BF16 else 10, state == FP32, bucket(rows), 12, bucket(tokens)
    )
    assert chosen(rows, tokens, state=state, on_hopper=True) == "hopper"
    assert chosen(rows, tokens, state=state) == ("portable" if state == BF16 else "banded")


def test_the_package_holds_no_class_twice_and_says_of_what_device() -> None:
    for one in table.packaged():
        assert len(one.orders()) == len(one.measured)
        assert one.device.name and one.device.versions


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"on_hopper": True}, "hopper"),
        ({}, "portable"),
        ({"state": FP32}, "banded"),
        ({"operand": FP32}, "banded"),
        ({"state": FP32, "on_hopper": True}, "hopper"),
        ({"measured": False}, "portable"),
        ({"measured": False, "state": FP32}, "banded"),
        ({"setting": "banded", "on_hopper": True}, "banded"),
        ({"setting": "fused", "state": FP32}, "portable"),
        ({"setting": "fused", "on_hopper": True}, "hopper"),
    ],
)
def test_what_was_not_measured_follows_the_rule(more: dict[str, Any], expected: str) -> None:
    assert chosen(rows=104, tokens=3, **more) == expected


def test_rows_that_do_not_begin_at_16_bytes_take_bands_whatever_was_measured_for_aligned_ones() -> None:
    assert chosen(tokens=2048, on_hopper=True) == "hopper"
    assert chosen(rows=4097, tokens=2048) == "banded"
    assert chosen(rows=4097, tokens=2048, setting="fused") == "portable"


def test_a_cpu_takes_bands_unless_told_otherwise() -> None:
    weight = torch.zeros(4, 4)
    assert choose.choose("auto", weight, weight, [weight]) == "banded"
    assert choose.choose("fused", weight, weight, [weight]) == "portable"


def test_what_the_user_measured_comes_before_the_package_and_before_the_rule() -> None:
    keep(HOPPER, measured({"hopper": 3.0, "portable": 2.0, "banded": 1.0}), measured({"banded": 1.0}, rows=128))
    assert chosen(on_hopper=True) == "banded"
    assert chosen(setting="fused", on_hopper=True) == "portable"
    assert chosen(rows=128, on_hopper=True) == "banded"
    assert chosen(tokens=8192, on_hopper=True) == "hopper"
    assert chosen(on_hopper=True, measured=False) == "hopper"


@pytest.mark.parametrize("bits", [16, 20, 32])
def test_bits_of_the_gradient_go_by_24_until_they_were_measured(bits: int) -> None:
    keep(HOPPER, measured({"hopper": 2.0, "portable": 3.0, "banded": 1.0}))
    assert chosen(on_hopper=True, gradient_bits=bits) == "banded"
    assert chosen(tokens=8192, on_hopper=True, gradient_bits=bits) == "hopper"
    keep(HOPPER, measured({"banded": 1.0}), measured({"hopper": 2.0, "portable": 1.0}, bits=bits))
    assert chosen(on_hopper=True, gradient_bits=bits) == "portable"
    assert chosen(on_hopper=True) == "banded"


def test_a_measured_schedule_that_cannot_take_the_update_gives_way_to_the_next() -> None:
    keep(HOPPER, measured({"hopper": 1.0, "banded": 2.0, "portable": 3.0}))
    assert chosen(on_hopper=True) == "hopper" and chosen() == "banded"


def test_another_device_or_version_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(HOPPER, measured({"banded": 1.0, "portable": 2.0}))
    newer = HOPPER.model_copy(update={"versions": {"torch": "2.14.0", "triton": "3.8.0"}})
    for device in (OTHER, newer):
        use(monkeypatch, device)
        assert chosen() == "portable"
    assert len({table.cache_file(device) for device in (HOPPER, OTHER, newer)}) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1448, 1449, 2048, 2896, 2897, 14336, 128256])
def test_buckets_are_rounded_logarithms(size: int) -> None:
    import math

    assert bucket(size) == round(math.log2(size))


def test_a_bucket_speaks_for_sizes_near_it_and_no_others() -> None:
    keep(HOPPER, measured({"banded": 1.0, "portable": 2.0}))
    assert chosen(tokens=1449) == chosen(tokens=2896) == chosen(rows=5120) == "banded"
    assert chosen(tokens=1448) == chosen(tokens=2897) == chosen(rows=6144) == "portable"


BROKEN = {
    "not JSON": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "another format": lambda text: text.replace('"format": 1', '"format": 2'),
    "an unknown schedule": lambda text: text.replace('"banded"', '"psychic"'),
    "a time that is none": lambda text: text.replace("1.0", "NaN"),
    "a negative time": lambda text: text.replace("1.0", "-1.0"),
    "another device": lambda text: text.replace("H200", "H100"),
    "not even text": lambda text: "\x00\x01",
    "a list": lambda text: json.dumps([1, 2]),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_right_is_ignored_with_one_warning(spoil: Any) -> None:
    path = keep(HOPPER, measured({"banded": 1.0, "portable": 2.0}))
    assert chosen() == "banded"
    path.write_text(spoil(path.read_text()))
    choose.forget()
    with pytest.warns(RuntimeWarning, match=r"are ignored .*forge-gen tune --clear") as caught:
        assert {chosen(), chosen(tokens=512), chosen(rows=128)} == {"portable"}
    assert len(caught) == 1 and str(path) in str(caught[0].message)


def test_a_folder_in_the_place_of_the_file_is_ignored_too() -> None:
    table.cache_file(HOPPER).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="are ignored"):
        assert chosen() == "portable"


def test_no_file_is_no_reason_to_say_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    monkeypatch.delenv("HOME", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "portable"
    assert table.cache_folder().is_absolute()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = keep(HOPPER, measured({"banded": 1.0}))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        table.write(Table(device=HOPPER, measured=(measured({"portable": 1.0}),)))
    assert path.read_bytes() == before and list(cache.iterdir()) == [path]


def test_measuring_again_replaces_a_class_and_keeps_the_others() -> None:
    first = Table(device=HOPPER, measured=(measured({"banded": 1.0}), measured({"banded": 1.0}, tokens=512)))
    again = first.with_more([measured({"portable": 1.0}, tokens=2000)])
    assert sorted(one.tokens for one in again.measured) == [512, 2000]
    assert again.with_more([]) == again


def test_a_choice_is_a_look_up() -> None:
    chosen(on_hopper=True)
    before = choose.measured_order.cache_info()
    for tokens in (2048, 2000, 1800, 2500):
        chosen(tokens=tokens, on_hopper=True)
    after = choose.measured_order.cache_info()
    assert (after.hits - before.hits, after.misses) == (4, before.misses)
