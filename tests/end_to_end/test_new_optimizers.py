"""Rules that the project does not ship, from the command line to a trained weight, with no change to the compiler.

Each has something that the eight lack: Adadelta a state in the units of the weight, Rprop a step size per coordinate
and choices by sign, Adan a gradient kept for the next step and three coefficients, Schedule-Free AdamW a second copy of
the weight and two recurrent scalars.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from forge_dsl import testing
from forge_dsl.cli import main

SPECS = Path(__file__).parents[2] / "examples" / "specs"
STEMS = ["adadelta", "adan", "rprop", "schedule_free_adamw"]
CLASSES = {"adadelta": "Adadelta", "adan": "Adan", "rprop": "Rprop", "schedule_free_adamw": "ScheduleFreeAdamW"}
# Rprop compares, so that a coordinate within rounding of zero may take another branch.
BOUNDS = {"rprop": testing.Bound(flips=0.02)}
SHAPE = (9, 17, 33)
Array = np.ndarray


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """What `forge-gen examples/specs -o made --strict` writes, imported."""
    folder = tmp_path_factory.mktemp("end_to_end") / "made_of_examples"
    with pytest.raises(SystemExit) as exit_:
        sys.argv = ["forge-gen", str(SPECS), "-o", str(folder), "--strict"]
        main()
    assert exit_.value.code in (0, None)
    assert sorted(path.stem for path in folder.glob("*.py")) == ["__init__", *STEMS]
    spec = importlib.util.spec_from_file_location("made_of_examples", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_of_examples"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "made_of_examples"]:
        del sys.modules[name]


def rule(package: ModuleType, stem: str):
    return sys.modules[f"made_of_examples.{stem}"].RULE


KERNELS = ["fused", "elementwise", "many", "banded"]


@pytest.mark.parametrize("how", KERNELS)
@pytest.mark.parametrize("stem", STEMS)
def test_its_generated_tests_pass(package: ModuleType, stem: str, how: str) -> None:
    """Fewer shapes and types than the generated file has."""
    found = rule(package, stem)
    if how != "banded" and not testing.can_launch(found):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    cases = testing.cases(found)
    for case in cases:
        testing.assert_bitwise(found, case, how, (17, 33, 65))
    for shape in ((1, 1, 1), (3, 2, 1), (0, 5, 7), (31, 17, 129)):
        testing.assert_bitwise(found, cases[0], how, shape)
    testing.assert_bitwise(found, cases[-1], how, (33, 17, 63), torch.bfloat16, torch.bfloat16, torch.bfloat16)
    testing.assert_bitwise(found, cases[-1], how, (33, 17, 63), torch.float16, torch.float32, torch.bfloat16)
    if how in {"fused", "banded"}:
        testing.assert_near_float64(found, cases[0], how, bound=BOUNDS.get(stem))


@pytest.mark.parametrize(("how", "exact"), [("fused", False), ("elementwise", True), ("banded", False)])
@pytest.mark.parametrize("stem", ["adadelta", "rprop"])
def test_it_follows_torch_for_20_steps(package: ModuleType, stem: str, how: str, exact: bool) -> None:
    found = rule(package, stem)
    if how != "banded" and not testing.can_launch(found):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    for case in testing.cases(found):
        testing.assert_near_torch(found, case, how, exact, bound=BOUNDS.get(stem))


# -- from the papers, in float64 --------------------------------------------------------------------------------------

Paper = Callable[[Array, list[Array]], list[Array]]


def adan(theta: Array, gradients: list[Array]) -> list[Array]:
    """Algorithm 1 of arXiv:2208.06677, whose betas are one minus ours, with the bias corrections of its code."""
    eta, decay, epsilon, (b1, b2, b3) = 0.01, 0.1, 1e-3, (0.02, 0.08, 0.01)
    m = v = n = np.zeros_like(theta)
    before, path = gradients[0], []
    for k, g in enumerate(gradients, start=1):
        m = (1 - b1) * m + b1 * g
        v = (1 - b2) * v + b2 * (g - before)
        n = (1 - b3) * n + b3 * (g + (1 - b2) * (g - before)) ** 2
        rate = eta / (np.sqrt(n / (1 - (1 - b3) ** k)) + epsilon)
        moved = m / (1 - (1 - b1) ** k) + (1 - b2) * v / (1 - (1 - b2) ** k)
        theta = (theta - rate * moved) / (1 + decay * eta)
        before = g
        path.append(theta)
    return path


def schedule_free(y: Array, gradients: list[Array]) -> list[Array]:
    """Algorithm 1 of arXiv:2405.15682, with its three sequences x, y and z. The weight that trains is y."""
    gamma, b1, b2, decay, epsilon, warmup = 0.05, 0.9, 0.99, 0.1, 1e-3, 5
    x, z, v, total, path = y, y, np.zeros_like(y), 0.0, []
    for t, g in enumerate(gradients, start=1):
        v = b2 * v + (1 - b2) * g**2
        rate = gamma * np.sqrt(1 - b2**t) * min(1.0, t / warmup)
        z = z - rate * (g / (np.sqrt(v) + epsilon) + decay * y)
        total += rate**2
        x = (1 - rate**2 / total) * x + rate**2 / total * z
        y = (1 - b1) * z + b1 * x
        path.append(y)
    return path


PAPERS: dict[str, tuple[Paper, dict[str, object]]] = {
    "adan": (adan, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
    "schedule_free_adamw": (
        schedule_free,
        {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-3, "warmup_steps": 5},
    ),
}


@pytest.mark.parametrize("arithmetic", ["fast", "exact"])
@pytest.mark.parametrize("stem", PAPERS)
def test_twenty_steps_of_training_are_those_of_the_paper(package: ModuleType, stem: str, arithmetic: str) -> None:
    """Through the optimizer's class and its linear function; the gradient of this loss is the same at every weight."""
    paper, arguments = PAPERS[stem]
    tokens, rows, columns = SHAPE
    weight = torch.nn.Parameter(testing.integers((rows, columns), 1, torch.float32) / 4)
    start = weight.detach().double().cpu().numpy()
    optimizer = getattr(package, CLASSES[stem])([weight], arithmetic=arithmetic, **arguments)
    linear = getattr(package, f"{stem}_linear")
    gradients, found = [], []
    for step in range(20):
        x = testing.integers((tokens, columns), 2 * step, torch.float32)
        dy = testing.integers((tokens, rows), 2 * step + 1, torch.float32)
        linear(x, weight).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        gradients.append((dy.double().T @ x.double()).cpu().numpy())
        found.append(weight.detach().double().cpu().numpy())
    change = np.abs(np.diff([start, *found], axis=0)).max()
    for step, (ours, theirs) in enumerate(zip(found, paper(start, gradients), strict=True), start=1):
        # A step rounds the weight as it puts it together, four times at most, and its change in fp32 64 times at most.
        bound = step * 2.0**-24 * (4 * np.abs(ours).max() + 64 * change)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=f"step {step}")
    assert np.abs(found[-1] - start).max() > 0.05


def test_the_rules_need_what_the_eight_do_not_have(package: ModuleType) -> None:
    facts = {stem: rule(package, stem).spec for stem in STEMS}
    assert facts["adan"].first == ("previous_grad",)
    assert [scalar.name for scalar in facts["schedule_free_adamw"].scalars] == ["lr_max", "weight_sum"]
    assert not facts["schedule_free_adamw"].states[0].zero
    assert facts["rprop"].states[1].begins == "construction"
    assert len(facts["rprop"].hypers[1].ranges) == 2
