"""A small decoder-only transformer of plain `torch.nn` layers, its data, and the eight optimizers with torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_dsl import optim

VOCABULARY, WIDTH, CONTEXT = 29, 16, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options)


def tokens_of(step: int) -> Tensor:
    """A batch that depends on the step alone, [3, CONTEXT + 1]."""
    return torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Next-token loss on a batch that depends on the step alone."""
    tokens = tokens_of(step)
    output = model(tokens[:, :-1])
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    scheduler: Any = None,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
) -> None:
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


class TorchLion(torch.optim.Optimizer):
    """Lion as its paper has it, since torch.optim has none."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    self.state[p]["step"] = self.state[p].get("step", torch.tensor(0.0)) + 1
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_((beta1 * moment + (1 - beta1) * p.grad).sign(), alpha=-group["lr"])
                    moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@dataclass(frozen=True)
class Pair:
    """A generated class and torch's, with arguments at which every hyper matters, `eps` too."""

    ours: str
    reference: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def fused(self) -> Any:
        return getattr(optim, self.ours)

    def make_torch(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        if self.reference == "Lion":
            return TorchLion(params, **{**self.arguments, **more})
        return getattr(torch.optim, self.reference)(params, **{**self.arguments, "foreach": False, **more})


PAIRS = [
    Pair("AdamW", "AdamW", {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}),
    Pair("NAdam", "NAdam", {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.01}),
    Pair("RAdam", "RAdam", {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.01}),
    Pair("Lion", "Lion", {"lr": 1e-3, "weight_decay": 0.1}),
    Pair("RMSprop", "RMSprop", {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01, "momentum": 0.5}),
    Pair("Adagrad", "Adagrad", {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    Pair("SGD", "SGD", {"lr": 0.05, "weight_decay": 0.01}),
    Pair("SGDMomentum", "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
]


def reason(optimizer: Any, name: str) -> tuple[str, str]:
    """Where a parameter is updated, and why, as the report has it."""
    (row,) = (row for row in optimizer.report().rows if row.name == name)
    return row.route, row.reason
