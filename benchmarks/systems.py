"""What the kernel benchmark times: one weight, our schedules on it, and the unfused pairs of others.

The pairs are cuBLAS for `dY^T X` with a bf16 gradient, then somebody's AdamW. Other libraries are imported if they are
installed and left out, with the reason, if not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

FUSED_PEER = "cuBLAS + torch AdamW(fused)"
PRODUCT = "cuBLAS dW alone"
ELEMENTWISE = "forge-dsl element-wise alone"
HOPPER, PORTABLE, BANDED = "forge-dsl hopper", "forge-dsl portable", "forge-dsl banded"
# Elements of a part of the weight for which the reference is computed at a time.
_PART = 1 << 26


class Update:
    """One weight in bf16 with bf16 states, and every way of ours to update it.

    kept: formats and rounding of the stored tensors, handed on to the launchers if given.
    """

    def __init__(self, stem: str, rows: int, columns: int, tokens: int, kept: Any = None) -> None:
        import torch

        from forge_dsl import testing

        self.rule = importlib.import_module(f"generated.{stem}").RULE
        plain = [case for case in testing.cases(self.rule) if not any(case.flags.values())]
        # With every state that the arguments, and not a flag, decide about: SGD with momentum, RMSprop with momentum.
        self.case = max(plain, key=lambda case: sum(self.rule.present(*case.switches)))
        self.kept = () if kept is None else (kept,)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.x = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
        self.dy = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
        self.fill_operands()
        self.weight = self._uniform(rows, columns).sub_(0.5).mul_(0.1)
        self.states = [
            state.typical(self._uniform(rows, columns)) if there else None
            for state, there in zip(self.rule.spec.states, self.rule.present(*self.case.switches), strict=True)
        ]
        small = testing.make_problem(self.rule, self.case, (1, 1), torch.float32, torch.float32, 0)
        self.table = testing.next_table(self.rule, self.case, small)
        self.grad = torch.zeros_like(self.weight)
        self.bytes = 2 * 2 * (1 + sum(state is not None for state in self.states))

    def _uniform(self, rows: int, columns: int) -> Any:
        import torch

        return torch.rand(rows, columns, device="cuda", generator=self.generator, dtype=torch.bfloat16)

    def fill_operands(self, whole: bool = False) -> None:
        """Random numbers, or small whole ones, whose products are summed exactly."""
        for operand in (self.x, self.dy):
            if whole:
                operand.random_(-3, 4, generator=self.generator)
            else:
                operand.normal_(generator=self.generator)

    def arguments(self) -> tuple[Any, ...]:
        """What every route takes after its gradient."""
        return self.states, self.table, self.case.switches, False, *self.kept

    def on_hopper(self) -> Any:
        """The launch of the kernel for Hopper, or None where it is not taken."""
        from forge_dsl.runtime import hopper

        arguments = self.rule, self.x, self.dy, self.weight, self.states, self.case.switches
        return hopper.find(*arguments, *self.kept)

    def hopper(self) -> None:
        """The kernel for Hopper, the gradient handed over with 24 bits."""
        from forge_dsl.runtime import hopper

        arguments = self.rule, self.x, self.dy, self.weight, self.states, self.table, self.case.switches
        hopper.linear_step_hopper(*arguments, kept=self.kept[0] if self.kept else None)

    def portable(self) -> None:
        """The Triton kernel, gradient in registers."""
        from forge_dsl.runtime import launch

        launch.linear_step_portable(self.rule, self.x, self.dy, self.weight, *self.arguments())

    def fused(self) -> None:
        """The fused kernel that is taken here."""
        self.portable() if self.on_hopper() is None else self.hopper()

    def banded(self) -> None:
        """The library's product in fp32 bands, each followed by the element-wise kernel."""
        from forge_dsl.runtime.banded import linear_step_banded

        linear_step_banded(self.rule, self.x, self.dy, self.weight, *self.arguments())

    def elementwise(self) -> None:
        """The element-wise kernel alone, on a bf16 gradient."""
        from forge_dsl.runtime import launch

        launch.elementwise_step(self.rule, self.weight, self.grad, *self.arguments())

    def product(self) -> None:
        """cuBLAS alone, bf16 gradient."""
        import torch

        torch.mm(self.dy.T, self.x, out=self.grad)

    def ours(self) -> dict[str, Callable[[], None]]:
        """Every system of ours that takes this weight."""
        hopper = {} if self.on_hopper() is None else {HOPPER: self.hopper}
        return {**hopper, PORTABLE: self.portable, BANDED: self.banded, ELEMENTWISE: self.elementwise}

    def peer(self, make: Callable[..., Any] | None = None) -> Callable[[], None]:
        """cuBLAS, then an optimizer's step on a weight of its own; torch's fused AdamW unless told otherwise."""
        import torch

        parameter = torch.nn.Parameter(self.weight.clone())
        parameter.grad = self.grad
        optimizer = (make or PEERS[FUSED_PEER])([parameter])

        def run() -> None:
            self.product()
            optimizer.step()

        return run

    def peers(self) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
        """The unfused pairs that can be had here, and for the others the reason why not."""
        found, missing = {}, {}
        for name, make in PEERS.items():
            try:
                found[name] = self.peer(make)
            except ImportError as error:
                missing[name] = f"not installed ({error})"
        return found, missing

    def check(self) -> dict[str, float]:
        """One step of every system of ours: the share of numbers that differ from the reference beyond rounding.

        On whole numbers, whose gradient is exact in any order. Weight and states are as before when it returns.
        """
        import torch

        self.fill_operands(whole=True)
        # A gradient of whole numbers, rounded once to bf16, for the element-wise kernel.
        self.product()
        tensors = [self.weight, *(state for state in self.states if state is not None)]
        start = [tensor.clone() for tensor in tensors]
        shares = {}
        for name, run in self.ours().items():
            run()
            shares[name] = self._share(start, tensors, name == ELEMENTWISE)
            for tensor, before in zip(tensors, start, strict=True):
                tensor.copy_(before)
        self.fill_operands()
        torch.cuda.synchronize()
        return shares

    def _share(self, start: list[Any], tensors: list[Any], given: bool) -> float:
        """The largest share of one part of one tensor. given: from the bf16 gradient, not from the operands."""
        from forge_dsl.runtime.trust import beyond_rounding

        rows, columns = self.weight.shape
        names = [name for name, state in zip(self.rule.spec.state_names, self.states, strict=True) if state is not None]
        worst = 0.0
        for first in range(0, rows, max(1, _PART // columns)):
            part = slice(first, first + max(1, _PART // columns))
            grad = self.grad[part].float() if given else self.dy[:, part].float().T @ self.x.float()
            weight, *states = (tensor[part].float() for tensor in start)
            state = dict(zip(names, states, strict=True))
            wanted, new = self.rule.reference(weight, grad, state, self.table, *self.case.switches)
            for got, want in zip(tensors, [wanted, *(new[name] for name in names)], strict=True):
                worst = max(worst, beyond_rounding(got[part], want.to(got.dtype)))
        return worst


def _torch_adamw(**how: Any) -> Callable[..., Any]:
    def make(parameters: list[Any]) -> Any:
        import torch

        return torch.optim.AdamW(parameters, lr=1e-3, capturable=True, **how)

    return make


def _optimi(parameters: list[Any]) -> Any:
    from optimi import AdamW

    return AdamW(parameters, lr=1e-3, kahan_sum=False, triton=True)


def _flashoptim(parameters: list[Any]) -> Any:
    from flashoptim import FlashAdamW

    return FlashAdamW(parameters, lr=1e-3, master_weight_bits=None)


PEERS: dict[str, Callable[..., Any]] = {
    FUSED_PEER: _torch_adamw(fused=True),
    "cuBLAS + torch AdamW(foreach)": _torch_adamw(foreach=True),
    "cuBLAS + optimi AdamW(triton)": _optimi,
    "cuBLAS + FlashOptim AdamW(8-bit states)": _flashoptim,
}
