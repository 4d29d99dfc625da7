"""The seam between a generated module and the runtime: everything the runtime needs to apply one update rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forge_dsl.spec import Spec

Hyper = float | Tensor | tuple[float | Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """One compiled update rule.

    spec              the facts of the spec
    step_scalars      `(step, <scalars>, first_<state>, <hypers>, <flags>)`, by keyword, in float64 -> (table,
                      scalars): the table's values in the order of `spec.table`, the recurrent scalars' new values
    check_arguments   `(<hypers>, <flags>)` by keyword; raises ValueError as torch does
    switches          `(<hypers>, <flags>)` by keyword -> one bool per `spec.switches`
    present           `(*switches)` -> one bool per `spec.states`: whether the variant has that state
    initial_state     `(name, weight, <hypers by keyword>)` -> the state's first value, fp32, of the weight's shape
    reference         `(weight, grad, state, s, *switches)` -> (weight, state): one step in the precision of `s`,
                      unrounded; `state` is a dict of the present states, the result a dict of the same names
    linear_kernel     Triton: `dY^T X` and the rule, tile by tile
    hopper_kernel     Gluon: the same as linear_kernel for sm_90a; None without Gluon (`gluon_support`)
    elementwise_kernel  Triton: the rule on a given gradient
    many_kernel       Triton: the same for many parameters in one launch
    scalars_kernel    Triton: `step_scalars` on the device, one program per weight
    """

    spec: Spec
    step_scalars: Callable[..., tuple[tuple[float, ...], tuple[float, ...]]]
    check_arguments: Callable[..., None]
    switches: Callable[..., tuple[bool, ...]]
    present: Callable[..., tuple[bool, ...]]
    initial_state: Callable[..., Tensor]
    reference: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    linear_kernel: Any
    elementwise_kernel: Any
    many_kernel: Any
    scalars_kernel: Any
    hopper_kernel: Any = None

    @property
    def counter_names(self) -> tuple[str, ...]:
        """The float64 numbers of each weight: `step` if kept, recurrent scalars, `written_<state>` per `first`.

        A rule that keeps no `step` counts `_updates` last, which stochastic rounding draws from.
        """
        step, last = (("step",), ()) if self.spec.uses_step else ((), ("_updates",))
        scalars = tuple(s.name for s in self.spec.scalars)
        return step + scalars + tuple(f"written_{name}" for name in self.spec.first) + last
