"""What constructor, groups, parameters and operands may be; every refusal comes before anything changes."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from tests.runtime.handwritten import SGD, AdamW, Linear, linear


def parameter(*shape: int, **options) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, **options), requires_grad=options.get("dtype") is None)


BAD_HYPERS = [
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan"),
    ({"lr": float("inf")}, ValueError, "Invalid learning rate: inf"),
    ({"lr": "fast"}, TypeError, "Invalid learning rate: 'fast'.*got str"),
    ({"lr": None}, TypeError, "Invalid learning rate: None"),
    ({"lr": torch.tensor([1.0, 2.0])}, ValueError, "Tensor lr must be 1-element"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "Invalid learning rate"),
    ({"lr": (0.1, 0.2)}, ValueError, "Invalid lr value"),
    ({"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
    ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value: -0.1"),
    ({"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
    ({"betas": (0.9,)}, ValueError, "Invalid betas value.*tuple of 2 numbers"),
    ({"betas": 0.9}, ValueError, "Invalid betas value.*tuple of 2 numbers"),
    ({"amsgrad": 1}, TypeError, "Invalid amsgrad value: 1"),
    ({"state_dtype": torch.int8}, ValueError, "Invalid state_dtype"),
    ({"arithmetic": "quick"}, ValueError, "Invalid arithmetic"),
    ({"schedule": "later"}, ValueError, "Invalid schedule"),
    ({"schedule": "fused"}, RuntimeError, "needs a GPU.*TRITON_INTERPRET"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_HYPERS)
def test_bad_arguments_are_refused_as_by_torch(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        AdamW([parameter(2, 3)], **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"), [case for case in BAD_HYPERS if "Invalid s" not in case[2]][:15]
)
def test_bad_arguments_of_a_group_leave_the_optimizer_as_it_was(arguments, error, message) -> None:
    optimizer = AdamW([parameter(2, 3)])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [parameter(2, 3)], **arguments})
    assert len(optimizer.param_groups) == 1


def test_requirements_between_arguments() -> None:
    with pytest.raises(ValueError, match="Nesterov"):
        SGD([parameter(2, 3)], nesterov=True)


def test_a_tensor_cannot_choose_a_kernel() -> None:
    SGD([parameter(2, 3)], lr=torch.tensor(0.1), weight_decay=torch.tensor(0.1))
    with pytest.raises(TypeError, match="Tensor momentum is not possible"):
        SGD([parameter(2, 3)], momentum=torch.tensor(0.9))


BAD_PARAMETERS = [
    (parameter(2, 3, dtype=torch.float64), TypeError, r"parameter w of shape \[2, 3\], torch.float64 on cpu.*float32"),
    (parameter(2, 3, dtype=torch.complex64), TypeError, "expected float32, bfloat16 or float16"),
    (parameter(2, 3, dtype=torch.int64), TypeError, "expected float32, bfloat16 or float16"),
    (torch.nn.Parameter(torch.eye(3).to_sparse()), TypeError, "expected a dense tensor"),
    (torch.nn.Parameter(torch.empty(2, 3, device="meta")), ValueError, "materialise the model"),
    (torch.zeros(2, 3, requires_grad=True) * 2, ValueError, "non-leaf"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_PARAMETERS)
def test_parameters_that_cannot_be_updated_are_refused_by_name(bad, error, message) -> None:
    good = parameter(2, 3)
    optimizer = AdamW([("good", good)])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [("w", bad)]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(error, match=message):
        AdamW([("w", bad)])


def test_duplicates_and_empty_lists_are_refused() -> None:
    weight = parameter(2, 3)
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="more than once"):
        AdamW([weight, weight])
    optimizer = AdamW([weight])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})


OPERANDS = [
    (lambda x, w, b: (x.long(), w, b), TypeError, r"x of shape \[4, 3\]: expected floating point, got torch.int64"),
    (lambda x, w, b: (x.double(), w, b), (TypeError, RuntimeError), r"x of shape \[4, 3\]"),
    (lambda x, w, b: (x[:, :2], w, b), RuntimeError, r"x of shape \[4, 2\].*weight of shape \[2, 3\].*\[..., 3\]"),
    (lambda x, w, b: (x[0, 0], w, b), RuntimeError, r"x of shape \[\]"),
    (lambda x, w, b: (x, w[0], b), ValueError, r"weight: expected \[out, in\], got shape \[3\]"),
    (lambda x, w, b: (x, w, b[:1]), RuntimeError, r"bias of shape \[1\].*expected \[2\]"),
    (lambda x, w, b: (x.to("meta"), w, b), RuntimeError, "x of shape .* is on meta.*cpu"),
    (lambda x, w, b: (x, w, b.to("meta")), RuntimeError, "bias of shape .* is on meta.*cpu"),
    (lambda x, w, b: (x.half(), w, b), RuntimeError, "x of shape .* is torch.float16, weight .* torch.float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), OPERANDS)
@pytest.mark.parametrize("grad", [True, False])
def test_operands_that_do_not_fit_are_named(change, error, message, grad: bool) -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight, bias])
    with torch.set_grad_enabled(grad), pytest.raises(error, match=message):
        linear(*change(torch.randn(4, 3), weight, bias))
    del optimizer


def test_gradients_that_step_cannot_apply_are_named_before_anything_changes() -> None:
    layer, table = Linear(3, 2), torch.nn.Embedding(4, 3, sparse=True)
    optimizer = AdamW([*layer.named_parameters(), ("table", table.weight)])
    layer.bias.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"table \[4, 3\]: sparse gradients"):
        optimizer.step()
    assert torch.equal(optimizer.state[layer.bias].get("step", torch.zeros(())), torch.zeros(()))


def test_numbers_of_other_types_are_accepted() -> None:
    import numpy

    optimizer = AdamW([parameter(2, 3)], lr=1, betas=[numpy.float32(0.5), 0], eps=numpy.float64(1e-3))
    linear(torch.ones(1, 3), optimizer.param_groups[0]["params"][0]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (None, TypeError, "params is NoneType: expected model.parameters()"),
        (torch.nn.Linear(2, 2), TypeError, "params is Linear: expected model.parameters()"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), TypeError, "params is Sequential: expected model.parameters()"),
        ({"params": [parameter(2)]}, TypeError, "params is dict: expected a list of such param groups"),
        ("all", TypeError, "params is str"),
        ([{"lr": 0.1}], ValueError, "param_groups[0] has no 'params'"),
        ([{"params": [parameter(2)]}, {"param": [parameter(2)]}], ValueError, "param_groups[1] has no 'params'"),
    ],
)
def test_what_is_no_list_of_parameters_is_named(params, error, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        AdamW(params)


def test_what_is_no_param_group_is_named() -> None:
    optimizer = AdamW([parameter(2)])
    with pytest.raises(TypeError, match=r"param_groups\[1\] is list: expected a dict with 'params'"):
        optimizer.add_param_group([parameter(2)])
    with pytest.raises(ValueError, match=r"param_groups\[1\] has no 'params'"):
        optimizer.add_param_group({"lr": 1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("slip", "name"), [("weigth_decay", "weight_decay"), ("beta", "betas"), ("maximise", "maximize"), ("LR", "lr")]
)
def test_a_misspelt_argument_of_a_group_is_told(slip: str, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"param_groups\[0\] has '{slip}', .* did you mean '{name}'"):
        AdamW([{"params": [parameter(2)], slip: 0.5}])


def test_keys_that_schedules_and_loops_keep_in_groups_are_not() -> None:
    keys = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_scale", "name", "layer", "foreach")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([{"params": [parameter(2)], **dict.fromkeys(keys)}])
        SGD([{"params": [parameter(2)], **dict.fromkeys(keys)}])


@pytest.mark.parametrize("bits", [8.0, 16.0, True, 3, "8", None])
def test_extra_bits_are_a_whole_number(bits) -> None:
    with pytest.raises(ValueError, match="Invalid extra_bits"):
        AdamW([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))], extra_bits=bits)


def test_a_number_of_many_digits_is_cut_short() -> None:
    with pytest.raises(ValueError, match=r"Invalid learning rate: 10{59}\.\.\. \(expected") as caught:
        AdamW([parameter(2)], lr=10**400)
    assert len(str(caught.value)) < 160
