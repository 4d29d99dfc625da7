"""For each of the eight optimizers: what the demo passes to it, and the unfused optimizer it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ReferenceLion(Optimizer):
    """Lion as its authors state it: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        foreach: bool = False,
    ) -> None:
        if foreach:
            raise ValueError("this reference updates one tensor at a time")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                moment = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * (beta1 * moment + (1 - beta1) * weight.grad).sign())
                moment.mul_(beta2).add_(weight.grad, alpha=1 - beta2)


@dataclass(frozen=True)
class Counterpart:
    """`name` is the generated class, `unfused` makes the same rule without fusion, `arguments` go to both."""

    name: str
    unfused: Callable[..., Optimizer]
    lr: float
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the unfused run is called."""
        return "unfused Lion" if self.unfused is ReferenceLion else f"torch {self.unfused.__name__}"


COUNTERPARTS = {
    "adamw": Counterpart("AdamW", torch.optim.AdamW, 5e-4, {"weight_decay": 0.1}),
    "nadam": Counterpart("NAdam", torch.optim.NAdam, 5e-4),
    "radam": Counterpart("RAdam", torch.optim.RAdam, 5e-4),
    "lion": Counterpart("Lion", ReferenceLion, 2e-4, {"weight_decay": 0.1}),
    "rmsprop": Counterpart("RMSprop", torch.optim.RMSprop, 5e-4),
    "adagrad": Counterpart("Adagrad", torch.optim.Adagrad, 1e-3),
    "sgd": Counterpart("SGD", torch.optim.SGD, 0.1),
    "sgd_momentum": Counterpart("SGDMomentum", torch.optim.SGD, 0.05, {"momentum": 0.9, "nesterov": True}),
}
