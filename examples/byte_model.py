"""A decoder-only transformer over bytes, small enough to train on two CPU cores, and the text that it learns from.

Every linear layer calls the function that the model is given: `torch.nn.functional.linear`, or a generated one that
updates its weight inside the backward pass. Nothing else differs between the two.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LinearFunction = Callable[[Tensor, Tensor], Tensor]


class Linear(nn.Module):
    """`x W^T` by the function given; weight `[out, in]`."""

    def __init__(self, inputs: int, outputs: int, linear: LinearFunction, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight)


class Block(nn.Module):
    """Causal attention, then a two-layer MLP, each on a normalised residual stream `[batch, time, width]`."""

    def __init__(self, width: int, heads: int, depth: int, linear: LinearFunction) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = Linear(width, 3 * width, linear)
        self.mix = Linear(width, width, linear, gain=(2 * depth) ** -0.5)
        self.norm_mlp = nn.RMSNorm(width)
        self.up = Linear(width, 4 * width, linear)
        self.down = Linear(4 * width, width, linear, gain=(2 * depth) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class ByteModel(nn.Module):
    """Logits `[batch, time, 256]` of the next byte for bytes `[batch, time]`.

    Blocks are checkpointed: their activations are recomputed in the backward pass, as where memory is short.
    """

    def __init__(self, linear: LinearFunction, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, depth, linear) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = Linear(width, 256, linear, gain=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))

    @property
    def linear_weights(self) -> list[nn.Parameter]:
        """The weights whose gradients the fused run never allocates."""
        return [module.weight for module in self.modules() if isinstance(module, Linear)]


def standard_library_text(limit: int = 8 << 20) -> Tensor:
    """Up to `limit` bytes of the Python standard library's own sources, uint8. Raises FileNotFoundError without any."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and len(data) < limit:
            data += path.read_bytes()
    if not data:
        raise FileNotFoundError(f"this Python has no .py sources in {folder}; the demo learns from them")
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


def batches(text: Tensor, count: int, batch: int, context: int, seed: int) -> list[Tensor]:
    """`count` batches `[batch, context + 1]` of bytes at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, batch, 1), generator=generator)
    return list(text[starts + torch.arange(context + 1)].long())
