"""What the Hopper kernel is asked to take and what not, decided without a GPU; and that it never stands in the way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_dsl import optim, testing
from forge_dsl.runtime import gluon_support, hopper, hopper_plan
from forge_dsl.runtime.storage import Storage, plain

ROOT = Path(__file__).parents[2]
RULE = replace(optim.AdamW.rule, hopper_kernel=object())
SWITCHES = testing.cases(RULE)[0].switches
GPU = torch.device("cuda", 0)


class OnGpu:
    """A tensor's shape, strides and type, said to be on a GPU."""

    def __init__(self, tensor: torch.Tensor, address: int = 256) -> None:
        self.device, self.shape, self.dtype = GPU, tensor.shape, tensor.dtype
        self.stride, self.data_ptr, self.element_size = tensor.stride, lambda: address, tensor.element_size
        self.is_contiguous = tensor.is_contiguous


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, row: int | None = None) -> Any:
    """A matrix without memory, its rows `row` elements apart."""
    tensor = torch.empty(1, device="meta", dtype=dtype).as_strided((rows, columns), (row or columns, 1))
    return OnGpu(tensor)


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "_FOUND", {})


def update(**changes: Any) -> dict[str, Any]:
    """The arguments of an update that it takes, but for the changes."""
    state = matrix(2048, 2048)
    common = {"x": matrix(64, 2048), "dy": matrix(64, 2048), "weight": matrix(2048, 2048)}
    return {"rule": RULE, **common, "states": [state, state, None], **changes}


def test_a_common_update_suits() -> None:
    assert hopper.suits(**update()) is None
    assert all(hopper.suits(**update(), gradient_bits=bits) is None for bits in hopper.GRADIENT_BITS)
    assert hopper.find(**update(), switches=SWITCHES) is not None


def bits_of(found: Any) -> tuple[int, bool]:
    """With how many bits a launch hands the gradient over, and whether its arithmetic is exact."""
    return found.constants["gradient_bits"], found.constants["exact"]


def test_every_choice_of_bits_has_a_launch_of_its_own() -> None:
    launches = [hopper.find(**update(), switches=SWITCHES, gradient_bits=bits) for bits in hopper.GRADIENT_BITS]
    assert [bits_of(found) for found in launches] == [(bits, False) for bits in hopper.GRADIENT_BITS]
    assert bits_of(hopper.find(**update(), switches=SWITCHES)) == (24, False)


@pytest.mark.parametrize("bits", hopper.GRADIENT_BITS)
def test_exact_arithmetic_has_all_bits_whatever_is_asked_for(bits: int) -> None:
    found = hopper.find(**update(), switches=SWITCHES, exact=True, gradient_bits=bits)
    assert bits_of(found) == (32, True)
    wide = matrix(2048, 2048, torch.float32)
    for changes in ({"weight": wide}, {"states": [wide, wide, None]}):
        assert bits_of(hopper.find(**update(**changes), switches=SWITCHES, exact=True)) == (32, True)


OUTSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "fp32 operands": ({"x": matrix(64, 2048, torch.float32), "dy": matrix(64, 2048, torch.float32)}, "float32"),
    "mixed operands": ({"x": matrix(64, 2048, torch.float16)}, "float16 and torch.bfloat16"),
    "no tokens": ({"x": matrix(0, 2048), "dy": matrix(0, 2048)}, "no tokens"),
    "odd columns": ({"x": matrix(64, 2047), "weight": matrix(2048, 2047)}, "TMA"),
    "a transposed operand": ({"dy": OnGpu(torch.empty(2048, 64, device="meta").bfloat16().T)}, "TMA"),
    "an expanded operand": ({"dy": OnGpu(torch.empty(1, 2048, device="meta").bfloat16().expand(64, -1))}, "TMA"),
    "an unaligned operand": ({"x": OnGpu(torch.empty(64, 2048, device="meta").bfloat16(), 258)}, "address 2 mod 16"),
    "a transposed weight": ({"weight": OnGpu(torch.empty(2048, 2048, device="meta").T)}, "16 bytes at a time"),
    "fp64 states": ({"states": [matrix(2048, 2048, torch.float64), None, None]}, "float64"),
    "states apart": ({"states": [matrix(2048, 2048), matrix(2048, 2048, row=4096), None]}, "differently"),
    "rows too far apart": ({"weight": matrix(2048, 2048, row=2**24)}, "16 bytes at a time"),
}


@pytest.mark.parametrize(("changes", "reason"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_it_cannot_take_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(hopper.suits(**update(**changes)))
    assert hopper.find(**update(**changes), switches=SWITCHES) is None
    arguments = update(**changes)
    with pytest.raises(ValueError, match="cannot take this update"):
        hopper.linear_step_hopper(**arguments, table=matrix(1, 16, torch.float32), switches=SWITCHES)


def test_bits_that_no_hand_over_has_are_refused() -> None:
    assert "16 or 20 or 24 or 32 bits, not 28" in str(hopper.suits(**update(), gradient_bits=28))


def test_padded_rows_suit_whatever_the_number_of_columns_but_are_slow() -> None:
    narrow = matrix(2048, 2047, row=2048)
    padded = update(x=matrix(64, 2047, row=2048), weight=narrow, states=[narrow, narrow, None])
    assert hopper.suits(**padded) is None
    assert hopper.find(**padded, switches=SWITCHES) is None


def test_weights_with_few_tiles_are_left_to_smaller_tiles() -> None:
    small = matrix(512, 2048)
    few = update(dy=matrix(64, 512), weight=small, states=[small, small, None])
    assert hopper.suits(**few) is None
    assert hopper.find(**few, switches=SWITCHES) is None


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_capability", lambda device: (8, 0))
    assert "9.0" in str(hopper.suits(**update()))
    assert hopper.find(**update(), switches=SWITCHES) is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "ENABLED", False)
    assert hopper.find(**update(), switches=SWITCHES) is None


def test_without_gluon_a_hopper_says_once_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_support, "REASON", "it is another one")
    hopper._say_once.cache_clear()
    without = update(rule=replace(RULE, hopper_kernel=None))
    with pytest.warns(RuntimeWarning, match="portable one is: it is another one") as caught:
        for _ in range(3):
            assert hopper.find(**without, switches=SWITCHES) is None
    assert len(caught) == 1


def blocks(rows: int = 2048, columns: int = 2048) -> Any:
    """Scales without memory."""
    return matrix(-(-columns // 64), rows, torch.uint8)


def kept(formats: tuple[str, ...], extras: tuple[Any, ...], draws: bool = True) -> dict[str, Any]:
    """Formats and extras of weight and two states; AdamW's third does not exist."""
    return {"kept": Storage((*formats, "plain"), (draws,) * 4, (*extras, None))}


CODES = matrix(2048, 2048, torch.uint8)
LOW = matrix(2048, 2048, torch.int8)
BLOCKS = {"states": [CODES, CODES, None], **kept(("plain", "int8", "int8"), (None, blocks(), blocks()))}
KEPT: dict[str, dict[str, Any]] = {
    "rounding": kept(("plain",) * 3, (None,) * 3),
    "int8": BLOCKS,
    "one state in fp8": {
        "states": [matrix(2048, 2048), CODES, None],
        **kept(("plain", "plain", "fp8"), (None, None, blocks())),
    },
    "bits beside the weight": kept(("bf16+8", "plain", "plain"), (LOW, None, None)),
    "a weight in fp8": {"weight": CODES, **kept(("fp8", "plain", "plain"), (blocks(), None, None))},
    "all of it in 8 bits": {
        "weight": CODES,
        "states": [CODES, CODES, None],
        **kept(("fp8", "int8", "int8"), (blocks(), blocks(), blocks())),
    },
}


@pytest.mark.parametrize("changes", KEPT.values(), ids=KEPT)
def test_every_format_suits_and_has_a_launch_of_its_own(changes: dict[str, Any]) -> None:
    assert hopper.suits(**update(**changes)) is None
    found = hopper.find(**update(**changes), switches=SWITCHES)
    plain = hopper.find(**update(), switches=SWITCHES)
    assert found is not None and found is not plain
    assert found is hopper.find(**update(**changes), switches=SWITCHES)
    assert found.constants["formats"] == changes["kept"].formats
    assert found.constants["draws"] == changes["kept"].draws
    # What is not a plain number spills in exact arithmetic.
    exact = hopper.find(**update(**changes), switches=SWITCHES, exact=True)
    assert (exact is not None) == (set(changes["kept"].formats) == {"plain"})


UNKEPT: dict[str, tuple[dict[str, Any], str]] = {
    "scales of another shape": (
        {**BLOCKS, **kept(("plain", "int8", "int8"), (None, blocks(columns=64), blocks()))},
        "scales of shape",
    ),
    "scales laid out by rows": (
        {**BLOCKS, **kept(("plain", "int8", "int8"), (None, OnGpu(torch.empty(2048, 32, device="meta").T), blocks()))},
        "a state is stored as int8",
    ),
    "codes of another type": (kept(("plain", "int8", "int8"), (None, blocks(), blocks())), "a state is stored as int8"),
    "codes without scales": ({**BLOCKS, **kept(("plain", "int8", "int8"), (None, None, None))}, "stored as int8"),
    "a weight in other blocks": (
        {"weight": CODES, **kept(("int8", "plain", "plain"), (blocks(), None, None))},
        "the weight is stored as int8",
    ),
    "a weight in codes without scales": (
        {"weight": CODES, **kept(("fp8", "plain", "plain"), (None, None, None))},
        "the weight is stored as fp8",
    ),
    "bits that lie otherwise": (
        kept(("bf16+8", "plain", "plain"), (matrix(2048, 2048, torch.int8, row=4096), None, None)),
        "lie otherwise",
    ),
    "bytes beside rows that end within a word": (
        {
            "x": matrix(64, 2046, row=2048),
            "weight": matrix(2048, 2046, row=2048),
            "states": [matrix(2048, 2046, row=2048)] * 2 + [None],
            **kept(("bf16+8", "plain", "plain"), (matrix(2048, 2046, torch.int8, row=2048), None, None)),
        },
        "do not end with a 32-bit word",
    ),
    "bits of another size": (
        kept(("bf16+16", "plain", "plain"), (LOW, None, None)),
        "the weight is stored as bf16+16",
    ),
    "uint8 states without a format": ({"states": [CODES, CODES, None]}, "a state is stored as torch.uint8"),
}


@pytest.mark.parametrize(("changes", "reason"), UNKEPT.values(), ids=UNKEPT)
def test_what_is_kept_otherwise_is_left_to_the_portable_kernel(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(hopper.suits(**update(**changes)))
    assert hopper.find(**update(**changes), switches=SWITCHES) is None


@pytest.mark.parametrize("tokens", [1, 1024, 1025, 8192])
@pytest.mark.parametrize("size", [2, 6, 8, 16])
@pytest.mark.parametrize("bits", hopper.GRADIENT_BITS)
def test_every_plan_fits_a_multiprocessor(tokens: int, size: int, bits: int) -> None:
    kinds = {2: [torch.bfloat16], 6: [torch.bfloat16] * 3, 8: [torch.float32] * 2, 16: [torch.float32] * 4}
    stored = [torch.empty(0, dtype=dtype) for dtype in kinds[size]]
    chosen = hopper.plan(tokens, stored, plain(len(stored) - 1), False, False, bits)
    stages = chosen.stages * chosen.block_t * (hopper.TILE_O + chosen.width) * 2
    # The gradient of one wide tile or of two narrow ones.
    assert stages + hopper.TILE_O * hopper.TILE_I * bits // 8 + 1024 <= 227 * 1024
    assert 0 < chosen.last <= chosen.every <= 8


KINDS = [
    ("plain", "plain", torch.bfloat16, False),
    ("plain", "plain", torch.bfloat16, True),
    ("plain", "plain", torch.float32, False),
    ("bf16+8", "plain", torch.bfloat16, True),
    ("plain", "int8", torch.uint8, True),
    ("plain", "fp8", torch.uint8, True),
    ("fp8", "fp8", torch.uint8, True),
]


@pytest.mark.parametrize("tokens", [1, 1023, 1024, 1025, 1096, 1097, 3072, 3073, 3144, 3145, 100_000])
@pytest.mark.parametrize(("weight", "state", "dtype", "draws"), KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_first_use_is_checked_with_the_plan_of_all_tokens(
    tokens: int, weight: str, state: str, dtype: torch.dtype, draws: bool, masked: bool
) -> None:
    stored = [
        torch.empty(0, dtype=torch.uint8 if weight == "fp8" else torch.bfloat16),
        *[torch.empty(0, dtype=dtype)] * 2,
    ]
    kept = Storage((weight, state, state), (draws,) * 3, (None,) * 3)
    few = hopper_plan.sample_tokens(tokens)
    ours, checked = (hopper.plan(count, stored, kept, masked, False, 24) for count in (tokens, few))
    assert ours == checked and few <= min(tokens, 3144)


IMPORTS = """
import sys
{before}
from forge_dsl.runtime import gluon_support
from generated import AdamW
assert not gluon_support.AVAILABLE and AdamW.rule.hopper_kernel is None
print(gluon_support.REASON)
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("sys.modules['triton'] = None", "Triton is not installed"),
        ("sys.modules['triton.experimental.gluon'] = None", "another Gluon"),
        ("import os; os.environ['TRITON_INTERPRET'] = '1'", "interpreter"),
    ],
)
def test_generated_modules_import_without_it(before: str, reason: str) -> None:
    pytest.importorskip("triton")
    code = IMPORTS.format(before=f"import os; os.environ['TRITON_INTERPRET'] = '0'\n{before}")
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert reason in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["adamw", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum"])
def test_shipped_configurations_compile_without_a_spilled_register(stem: str) -> None:
    """For sm_90a and with no GPU: 168 registers, 16-byte accesses, `wgmma` not serialised. The rest: check-kernels."""
    pytest.importorskip("triton")
    command = [sys.executable, "benchmarks/hopper_registers.py", "--only", stem]
    command += [] if stem == "adamw" else ["--usual"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("\nok ") == (49 if stem == "adamw" else 8)
