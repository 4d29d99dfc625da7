"""Bytes that a forward keeps for backward, with the inputs of linear layers whole and in 8 bits. CPU.

    python benchmarks/saved_activations.py

Distinct memory of everything that the graph saves, parameters left out, in bytes for each token and feature: bf16
models of 256 features on 512 tokens, without checkpointing. Counted, not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forge_dsl
from forge_dsl import optim

WIDTH, TOKENS, HEADS = 256, 512, 4


class QueryKeyValue(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


class Gated(nn.Module):
    """A block's second half with SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Self-attention; the output projection reads what the attention keeps for its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def block(second: Callable[[], nn.Module]) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.first, self.second = Attention(), second()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(self.norm1(x))
            return x + self.second(self.norm2(x))

    return Block()


def gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one linear layer": lambda: nn.Linear(WIDTH, WIDTH),
    "q, k and v of one input": QueryKeyValue,
    "attention": Attention,
    "linear, GELU, linear": gelu,
    "SwiGLU": Gated,
    "a block with GELU": lambda: block(gelu),
    "a block with SwiGLU": lambda: block(Gated),
}


def saved(model: nn.Module) -> float:
    """Bytes a token and feature."""
    kept: dict[int, tuple[Tensor, int]] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = tensor, memory.nbytes()
        return tensor

    x = torch.randn(1, TOKENS, WIDTH).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x + 0)  # a tensor that only the model holds
    return sum(size for _, size in kept.values()) / (TOKENS * WIDTH)


def main() -> None:
    print("| model | torch | fused | fused, fp8 | fp8 saves |\n|---|---|---|---|---|")
    for name, make in MODELS.items():
        sizes = [saved(make().bfloat16())]
        for choice in (None, "fp8"):
            model = make().bfloat16()
            optimizer = forge_dsl.fuse(model, optim.AdamW, saved_activations=choice)
            sizes.append(saved(model))
            del optimizer
        cells = " | ".join(f"{size:.2f}" for size in sizes)
        print(f"| {name} | {cells} | {1 - sizes[2] / sizes[1]:.0%} |")


if __name__ == "__main__":
    main()
