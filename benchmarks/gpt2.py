"""A transformer in the shape of GPT-2, of plain torch modules, for training in any number format."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Of the model and of a batch; `megabytes` of text at most."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 512
    vocabulary: int = 25_344
    batch: int = 16
    megabytes: float = 120


TINY = Shape(layers=2, width=64, heads=2, context=64, vocabulary=512, batch=4, megabytes=3)


class Norm(nn.LayerNorm):
    """In fp32, whatever its weight is stored in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm; the residual stream stays fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 with a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, context] -> logits [batch, context, vocabulary]."""
        x = self.tokens(tokens).float() + self.positions.weight[: tokens.shape[1]].float()
        return self.head(self.norm(self.blocks(x)))


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Model:
    """The model as GPT-2 initialises it, the same numbers each time, as near as `dtype` has them.

    fp32 weights must not begin as numbers of bf16: autocast rounds them to nearest for each product, and from there it
    would not see a change before it has grown to half a unit.
    """
    generator = torch.Generator().manual_seed(0)
    model = Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                parameter.normal_(0, 0.02 / math.sqrt(2 * shape.layers if residual else 1), generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return model.to(device, dtype).train()
