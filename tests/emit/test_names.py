"""Whatever a spec calls its parts, generated code keeps them apart from its own: the name is refused, or it works."""

from __future__ import annotations

import ast

import pytest
import torch

from forge_dsl import testing
from forge_dsl.analysis.builtins import RESERVED
from forge_dsl.compile import Compiled, compile_source
from forge_dsl.diagnostics import DiagnosticError
from forge_dsl.emit.module import render_module
from forge_dsl.ir import words
from forge_dsl.ir.table import scalar_names, tensor_names
from forge_dsl.loading import load, module_of

# Everything in its place; each word in capitals is a name that a test chooses.
SPEC = """
optimizer Subject
hyper HYPER = 0.5 in [0, inf)
hyper PAIR = (0.25, 0.75)
flag FLAG
flag other = true
state STATE = HYPER in [0, inf)
state MAYBE = weight * 0.5 when FLAG
scalar SCALAR = 1
let FIRST, second = PAIR
let LET = sqrt(FIRST) * step % 3
SCALAR = SCALAR * LET + (1 % (2 if other else 3))
require HYPER < 100 or not other, "HYPER must be small"

update:
  LOCAL  = grad if FLAG else -grad
  STATE  = 0.5 * STATE + (1 - FIRST) * LOCAL * LOCAL
  MAYBE  = MAYBE + abs(LOCAL) + (1 if (FLAG and LOCAL > 0) else 0) when FLAG
  weight = weight - (HYPER / 4) * LOCAL / (sqrt(STATE) + 1) - SCALAR * second * LET
  weight = weight - (MAYBE if FLAG else 0) * max(LOCAL, 0) when other
"""
ROLES = ("HYPER", "PAIR", "FLAG", "STATE", "MAYBE", "SCALAR", "FIRST", "LET", "LOCAL")
# Names of another part with what the emitter puts behind them, and ordinary names that a careless one would hide.
TRICKY = {"t1", "t2", "one", "name", "value", "linear", "max", "abs", "sum", "exp", "sqrt", "first", "min", "id"}
TRICKY |= {f"a_{role.lower()}{tail}" for role in ROLES for tail in ("_ptr", "_2", "_at", "_type")} | {
    "is_a_flag",
    "first_row",
}
NAMES = sorted(
    (words.BESIDE_SWITCHES | words.SCALARS | words.MODULE | words.functions("subject") | TRICKY)
    - set(RESERVED)
    - {"grad", "weight", "step"}
)


def compiled(names: dict[str, str], name: str = "Subject", filename: str = "subject.opt") -> Compiled:
    text = SPEC.replace("Subject", name)
    for role in ROLES:
        text = text.replace(role, names.get(role, f"a_{role.lower()}"))
    return compile_source(text, filename)


def refused(names: dict[str, str]) -> bool:
    try:
        compiled(names)
    except DiagnosticError as error:
        assert {d.code for d in error.diagnostics} == {"E0203"}, str(error)
        return True
    return False


def assert_works(one: Compiled) -> None:
    """Every kernel steps the bits of the reference; the optimizer is built and steps."""
    module = module_of(one)
    case = testing.cases(module.RULE)[-1]
    testing.assert_bitwise(module.RULE, case, "elementwise", (2, 1, 3), steps=1)
    testing.assert_bitwise(module.RULE, case, "fused", (2, 1, 3), steps=1)
    testing.assert_bitwise(module.RULE, case, "many", (2, 1, 3), steps=1)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = getattr(module, one.spec.name)([weight], **{one.spec.flags[0].name: True})
    getattr(module, f"{one.stem}_linear")(torch.ones(2, 3), weight).sum().backward()
    optimizer.step()
    assert weight.isfinite().all()
    assert set(optimizer.param_groups[0]) >= {*one.spec.hyper_names, *one.spec.flag_names}
    assert set(optimizer.state[weight]) >= set(one.spec.state_names)


@pytest.mark.skipif(not testing.can_launch(load(SPEC).RULE), reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("start", range(len(NAMES)), ids=NAMES)
def test_a_name_of_the_generated_code_works_in_every_role(start: int) -> None:
    """Nine names at once, each in another role; over all tests each name takes each role."""
    names = {role: NAMES[(start + 23 * offset) % len(NAMES)] for offset, role in enumerate(ROLES)}
    assert len(set(names.values())) == len(ROLES)
    assert not refused(names)
    assert_works(compiled(names))


@pytest.mark.parametrize(
    "name", ["device_math", "device_tiles", "reference_math", "ieee", "torch", "tl", "s", "params"]
)
@pytest.mark.parametrize("role", ROLES)
def test_what_stands_everywhere_is_reserved(role: str, name: str) -> None:
    assert refused({role: name})


@pytest.mark.parametrize("name", sorted(words.MODULE | words.functions("subject")))
def test_an_optimizer_cannot_be_called_as_something_else_in_its_module(name: str) -> None:
    with pytest.raises(DiagnosticError, match=r"E020|E0002"):
        compiled({}, name=name)


def functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def variables(function: ast.FunctionDef) -> set[str]:
    """Parameters, and every name that is assigned or read."""
    arguments = function.args
    found = {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    body = [node for statement in function.body for node in ast.walk(statement)]
    return found | {node.id for node in body if isinstance(node, ast.Name)}


@pytest.mark.parametrize(
    ("function", "known"),
    [
        ("tile", words.TILE),
        ("linear_kernel", words.KERNELS),
        ("elementwise_kernel", words.KERNELS),
        ("many_kernel", words.KERNELS),
        ("hopper_kernel", words.KERNELS),
        ("hopper_fetch", words.SLICE),
        ("hopper_apply", words.SLICE),
        ("hopper_prefetch", words.SLICE),
        ("scalars_kernel", words.SCALARS),
        ("update", words.UPDATE),
        ("update_exact", words.UPDATE),
        ("reference", words.UPDATE),
    ],
)
def test_the_lists_of_words_hold_every_variable_of_the_functions(function: str, known: frozenset[str]) -> None:
    one = compiled({})
    theirs = tensor_names(one.checked) | scalar_names(one.checked) | {slot.name for slot in one.table}
    theirs |= {switch.name for switch in one.spec.switches}
    theirs |= {f"{name}{tail}" for name in one.spec.state_names for tail in ("_ptr", "_type")}
    used = variables(functions(render_module(one))[f"subject_{function}"])
    assert used - theirs - known - words.functions("subject") <= {"range", "t1", "t2", "t3"}


def test_top_level_names_are_listed() -> None:
    module = ast.parse(render_module(compiled({})))
    found = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in module.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert found - words.MODULE - words.functions("subject") == {"Subject", "SubjectLinear", "__all__"}
