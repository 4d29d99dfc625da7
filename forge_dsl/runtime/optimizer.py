"""`FusedOptimizer`: a `torch.optim.Optimizer` whose linear weights are updated inside backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from forge_dsl.formats import registry
from forge_dsl.formats.operand import Operand
from forge_dsl.runtime import (
    activations,
    arguments,
    checkpoint,
    coded,
    ordinary,
    param_groups,
    states,
    step_hooks,
    storage,
    torch_layout,
)
from forge_dsl.runtime.binding import Binding, bind, note_counted_together
from forge_dsl.runtime.counters import StepTable
from forge_dsl.runtime.gradient_bits import check_choice as check_gradient_bits
from forge_dsl.runtime.placeholder import GradientPlaceholder
from forge_dsl.runtime.rule import Rule
from forge_dsl.runtime.storage import StateDtype
from forge_dsl.runtime.update import apply_elementwise, forget_stale_bits

if TYPE_CHECKING:
    from rich.console import Console

    from forge_dsl.fusion_report import FusionReport


# Options that no param group has, with their defaults.
_OF_THE_WHOLE = {
    "state_dtype": None,
    "arithmetic": "fast",
    "schedule": "auto",
    "stochastic_rounding": None,
    "seed": 0,
    "extra_bits": 0,
    "saved_activations": None,
    "gradient_bits": 24,
    "weight_dtype": None,
}


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the generated optimizers, which set `rule` and name their hypers.

    Two-dimensional parameters that reach the loss through the optimizer's linear function are updated inside backward;
    `step()` updates every parameter that has an ordinary gradient, counts the step and ends it.

    params        as for torch.optim: tensors, (name, tensor) pairs, or dicts that are param groups
    hypers, flags  the defaults of every group, by the spec's names
    state_dtype   format of the states, or a dict of formats by state: a torch dtype, "fp32", "bf16", "fp16", or "int8"
                  or "fp8" in blocks of 64; the parameter's own dtype by default
    arithmetic    "fast", or "exact": division and root rounded to nearest, no fused multiply-add
    schedule      "auto", "fused" (one kernel) or "banded" (fp32 gradient of a few rows at a time)
    stochastic_rounding  None: of bf16 weights and states, and of 8-bit codes; True: of fp16 too; False: to nearest
    seed          what stochastic rounding draws from, with the step and the weight's place in `param_groups`
    extra_bits    8 or 16 more bits beside each bf16 weight, which then holds 24 or all 32 bits of an fp32 one

    gradient_bits  24, 32, 20 or 16: how many bits of a gradient reach the update at least. Fast arithmetic on Hopper
                  hands over so many, every other route and exact arithmetic all 32
    saved_activations  "fp8": fused layers save their inputs for backward in 8 bits and a scale a token; None: as is

    torch.optim's own switches (`foreach`, `fused`, `capturable`, ...) are accepted at their neutral values.

    Raises ValueError or TypeError for an argument or parameter that it cannot use.
    """

    rule: ClassVar[Rule]
    # What `fuse` was asked to keep weights in, for the report.
    weight_dtype: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Generated constructors take what the spec declares by position, in its order, which may not be torch's."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = torch_layout.refusing_misplaced(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        params: Any,
        hypers: dict[str, Any],
        flags: dict[str, bool],
        *,
        state_dtype: StateDtype = None,
        arithmetic: str = "fast",
        schedule: str = "auto",
        stochastic_rounding: bool | None = None,
        seed: int = 0,
        extra_bits: int = 0,
        saved_activations: str | None = None,
        gradient_bits: int = 24,
        **switches: Any,
    ) -> None:
        for unknown in torch_layout.without_switches(self.rule.spec, switches):
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {unknown!r}")
        if arithmetic not in arguments.ARITHMETICS:
            raise ValueError(f'Invalid arithmetic: {arithmetic!r} (expected "fast" or "exact")')
        if schedule not in arguments.SCHEDULES:
            raise ValueError(f'Invalid schedule: {schedule!r} (expected "auto", "fused" or "banded")')
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise ValueError(f"Invalid seed: {seed!r} (expected a whole number from 0 up to 2^63)")
        activations.check_choice(saved_activations)
        check_gradient_bits(gradient_bits)
        self.choice = storage.choice(self.rule, state_dtype, stochastic_rounding, extra_bits)
        self.seed = seed
        arguments.check_hypers(self.rule, {**hypers, **flags})
        self.state_dtype = state_dtype
        self.arithmetic = arithmetic
        self.schedule = schedule
        self.saved_activations = saved_activations
        self.gradient_bits = gradient_bits
        self.warned_of: set[str] = set()
        self.loaded_amid_step = False
        self._told_of_cleared = False
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._names: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._bindings: dict[int, Binding] = {}
        self._tables: list[StepTable] = []
        self._groups: list[param_groups.Added] = []
        arguments.check_params(params)
        # A constructor that raises must not have taken the weights from the optimizer that has them.
        self._binds = False
        super().__init__(params, {**hypers, **flags})
        if extra_bits and all(binding.weight.dtype != torch.bfloat16 for binding in self.bindings()):
            raise ValueError(
                f"Invalid extra_bits: {extra_bits} bits beside bfloat16 weights, and no parameter is bfloat16 (convert "
                "the model before the optimizer is made, or leave extra_bits at 0)"
            )
        self._binds = True
        for binding in self.bindings():
            if len(binding.shape) == 2:
                bind(binding)

    # -- param groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; the group's arguments and parameters are checked before anything is taken."""
        index = len(self.param_groups)
        arguments.check_group(self.rule, param_group, index)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            wrong = [name for name in _OF_THE_WHOLE if name in param_group]
            if wrong:
                raise ValueError(
                    f"{wrong[0]} of a param group: it is an option of the whole optimizer, an argument of "
                    f"{type(self).__name__} or of forge_dsl.fuse"
                )
            kept = torch_layout.without_switches(self.rule.spec, group)
            for key in group.keys() - kept.keys():
                del group[key]
            arguments.check_hypers(self.rule, group)
            if len({id(parameter) for parameter in group["params"]}) < len(group["params"]):
                raise ValueError("a parameter appears more than once in a parameter group")
            for number, parameter in enumerate(group["params"]):
                arguments.check_parameter(
                    parameter, self._names.get(parameter) or param_groups.name(group, index, number)
                )
                arguments.check_schedule(self.rule, self.schedule, parameter)
                if self.choice.extra_bits and parameter.dtype == coded.CODES:
                    raise ValueError(f"extra_bits={self.choice.extra_bits}: {coded.NO_BITS_BESIDE}")
        except Exception:
            self.param_groups.pop()
            raise
        self._take(index)

    def _take(self, index: int) -> None:
        """Give the group's parameters their rows and bindings, and the states that exist from construction on."""
        group = self.param_groups[index]
        self._groups.append((group, list(group["params"])))
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, parameter in enumerate(group["params"]):
            by_device.setdefault(parameter.device, []).append((number, parameter))
        for device, members in by_device.items():
            ids = [len(self._bindings) + number for number, _ in members]
            table = StepTable(self.rule, group, device, [parameter for _, parameter in members], self.seed, ids)
            self._tables.append(table)
            for row, (number, parameter) in enumerate(members):
                name = self._names.get(parameter) or param_groups.name(group, index, number)
                binding = Binding(parameter, name, self, table, row)
                self._bindings[id(parameter)] = binding
                table.adopt(row, self.state.get(parameter, {}))
                if self._binds and parameter.dim() == 2:
                    bind(binding)
        note_counted_together(self._bindings.values())
        if any(state.begins == "construction" for state in self.rule.spec.states):
            for parameter in group["params"]:
                self._begin_at_construction(parameter)

    def _begin_at_construction(self, parameter: Tensor) -> None:
        binding = self._bindings[id(parameter)]
        variant = binding.table.arguments.select()
        state = self.state[parameter]
        binding.table.show(binding.row, state)
        for spec, present in zip(self.rule.spec.states, variant.present, strict=True):
            if spec.begins == "construction" and present and spec.name not in state:
                form = storage.format_of(self.choice, spec, parameter)
                state.update(states.create(self.rule, spec, parameter, variant.hypers, form))

    def take_codes(self, parameter: Tensor) -> None:
        """Before any update: a parameter has become codes, which decides the type of states that exist already."""
        self._bindings[id(parameter)].retake()
        held = self.state.get(parameter, {})
        begun = [state.name for state in self.rule.spec.states if state.name in held]
        for name in begun:
            del held[name]
            held.pop(registry.scale_key(name), None)
        if begun:
            self._begin_at_construction(parameter)

    def binding_of(self, parameter: Tensor) -> Binding:
        """The binding of one of this optimizer's parameters."""
        return self._bindings[id(parameter)]

    def bindings(self) -> Iterator[Binding]:
        """One per parameter, in the order in which the groups were added."""
        return iter(self._bindings.values())

    def has(self, parameter: Tensor) -> bool:
        """Whether a param group has this parameter."""
        return id(parameter) in self._bindings

    def know(self, model: torch.nn.Module, names: Mapping[Tensor, str]) -> None:
        """Remember, weakly, the model that is trained, and call its parameters by these names in messages."""
        self._model = weakref.ref(model)
        for parameter, name in names.items():
            self._names[parameter] = name
            if self.has(parameter):
                self.binding_of(parameter).name = name

    def report(self, console: Console | None = None, *, details: bool = False) -> FusionReport:
        """Print what is updated inside backward, what is not and why, and the memory it takes; returns it as data.

        console: where to print, the standard output by default. details: a row per parameter instead of per reason.
        """
        from forge_dsl.fusion_report import make_report, show

        report = make_report(self, None if self._model is None else self._model())
        show(report, console, details)
        return report

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has an ordinary gradient, and end the step that backward began.

        closure: as in torch.optim, runs forward and backward first; its loss is returned. Raises RuntimeError, before
        anything changes, if a parameter has a gradient that cannot be applied.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_groups()
        gradients = self._gradients()
        for table in self._tables:
            table.check_unchanged()
        apply_elementwise(self, gradients)
        for table in self._tables:
            table.end_step()
        for binding in self._bindings.values():
            binding.updated = False
        self.loaded_amid_step = False
        return loss

    def _patch_step_function(self) -> None:
        """What torch does to the class of every new optimizer, and ours after it."""
        cls = type(self)
        is_patched = getattr(cls.step, "hooked", False)
        super()._patch_step_function()
        if not is_patched:
            cls.step = step_hooks.only_where_heard(cls.step)  # type: ignore[method-assign]

    def update_linear(self, weight: Tensor, x: Operand, dy: Operand) -> bool:
        """Update a weight [out, in] with the gradient `dy^T x`, which is never stored: a fused layer's update, for the
        backward of a linear layer of your own.

        x   [..., in], dy [..., out]: tensors of fp32, bf16 or fp16, or `forge_dsl.Scaled` [tokens, features] in 8 bits

        One call is all of the weight's gradient in this step; `step()` counts it, as after a fused layer, and
        `weight.grad` raises on use. Call it in the backward of an autograd function that has the parameter as an input
        and returns None for its gradient, and compute `dx` first: the weight is another one afterwards. Outside of any
        backward, call it under `torch.no_grad()`.

        Returns whether the weight was updated: not if it is frozen, nor in a backward that does not accumulate its
        gradient (`torch.autograd.grad` of something else, `backward(inputs=...)`). Raises TypeError, ValueError or
        RuntimeError, before the weight changes, for one that is not this optimizer's, operands that do not fit, a
        second update before `step()`, hyper-parameters that changed since the step's first update, or a gradient that
        comes by another route.
        """
        from forge_dsl.runtime.delivery import update_linear

        return update_linear(self, weight, x, dy)

    def check_groups(self) -> None:
        """Raise RuntimeError if param_groups are not as they were added."""
        param_groups.check(self.param_groups, self._groups, self._bindings.keys())

    def _gradients(self) -> list[tuple[Binding, Tensor]]:
        """Each parameter that `step` must update, with its gradient."""
        found, cleared = ordinary.gradients(self._bindings.values())
        if cleared and not self._told_of_cleared:
            self._told_of_cleared = True
            raise ordinary.were_cleared(cleared)
        self._told_of_cleared = False
        return found

    def prepare_replay(self) -> None:
        """Before `graph.replay()` of a captured step: upload hyper-parameters that a scheduler has changed as numbers.

        Waits for nothing, and does nothing where none has changed. A hyper-parameter that is a tensor on the device
        needs no call: a replay reads it. Raises RuntimeError if a change needs another kernel than the captured one.
        """
        self.check_groups()
        for table in self._tables:
            table.prepare_replay()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim, but after a backward only once step() has counted it: RuntimeError before.

        set_to_none=False zeroes ordinary gradients; a fused weight has none, and its `.grad` becomes None.
        """
        for binding in self._bindings.values():
            if binding.updated:
                raise RuntimeError(
                    f"zero_grad() would discard a gradient, but backward has already updated {binding.describe()} with "
                    "it. Call step() first to count the update; decide whether to skip a step before calling backward"
                )
        self.loaded_amid_step = False
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None and (set_to_none or isinstance(grad, GradientPlaceholder)):
                    parameter.grad = None
        if not set_to_none or step_hooks.is_profiled():
            super().zero_grad(set_to_none)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """In torch.optim's layout, so that its optimizer of the same rule loads it. Counts are copies.

        Warns, once, where torch would round a state on loading, since it casts states to the parameter's dtype, and
        between backward and step(), where half of a step would be saved.
        """
        self.check_groups()
        if any(binding.updated for binding in self._bindings.values()):
            warnings.warn(
                "state_dict() between backward and step(): the update of fused weights is in it, and that of the other "
                "parameters is not. Save after step()",
                stacklevel=2,
            )
        self._settle()
        return checkpoint.exported(self, super().state_dict())

    def decoded_state_dict(self) -> dict[str, Any]:
        """The state dict with 8-bit states in fp32, as torch.optim's optimizer of the same rule reads it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checkpoint.decoded(self, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of torch.optim's, bit for bit in the dtypes that it holds.

        Raises ValueError, before anything changes, naming the parameter whose entry is missing or does not fit. After
        a backward whose updates step() has not counted, its gradients are lost: step() says so, and zero_grad() ends
        that step.
        """
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        loaded = checkpoint.read(self, state_dict)
        checkpoint.install(self, loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _settle(self) -> None:
        """Count the updates made so far, and let every parameter that has begun have the states its group asks for."""
        for table in self._tables:
            table.commit()
            variant = table.arguments.select()
            for row, parameter in enumerate(table.parameters):
                state = self.state.get(parameter, {})
                table.attach(row, state)
                if state:
                    states.ensure(self.rule, variant, parameter, state, self.choice)
                    forget_stale_bits(self.binding_of(parameter), state)

    def __copy__(self) -> Self:
        """The same optimizer twice, as in torch: groups and states are shared, and the weights stay the first one's."""
        same = type(self).__new__(type(self))
        same.__dict__.update(self.__dict__)
        return same

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        knobs = {name: value for name, value in self.__dict__.items() if name in ("choice", *_OF_THE_WHOLE)}
        rounding = [(*binding.table.position(binding.row), binding.fingerprint) for binding in self.bindings()]
        scales = [coded.packed(binding.weight) for binding in self.bindings()]
        return {**super().__getstate__(), **knobs, "rounding": rounding, "scales": scales}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled and copied optimizers own the parameters that came with them."""
        rounding, scales = state.pop("rounding", ()), state.pop("scales", ())
        super().__setstate__(state)
        self.warned_of = set()
        self.loaded_amid_step = self._told_of_cleared = False
        self._model, self._names = None, WeakIdKeyDictionary()
        self._binds = True
        self._bindings, self._tables, self._groups = {}, [], []
        for index in range(len(self.param_groups)):
            self._take(index)
        for binding, (seed, weight_id, updates, expected) in zip(self.bindings(), rounding, strict=False):
            binding.table.set_seed(binding.row, seed, weight_id)
            binding.table.set_updates(binding.row, updates)
            binding.fingerprint = expected
        for binding, kept in zip(self.bindings(), scales, strict=False):
            coded.unpack(binding.weight, kept)

    @property
    def stochastic_rounding(self) -> bool | None:
        """As given: None rounds stochastically what is kept in bf16 or in 8 bits."""
        return self.choice.stochastic

    @property
    def extra_bits(self) -> int:
        """How many bits each bf16 weight has beside it."""
        return self.choice.extra_bits

    def __repr__(self) -> str:
        """torch's, and the options of the whole optimizer that are not at their defaults."""
        chosen = {name: getattr(self, name) for name in _OF_THE_WHOLE}
        lines = [f"    {name}: {value}\n" for name, value in chosen.items() if value != _OF_THE_WHOLE[name]]
        shown = super().__repr__()
        return f"{shown.removesuffix(')')}All groups\n{''.join(lines)})" if lines else shown

    def describe(self, parameter: Tensor) -> str:
        """The parameter's name and shape, for messages."""
        return self.binding_of(parameter).describe()
