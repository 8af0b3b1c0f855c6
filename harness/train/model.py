"""A small byte-level transformer: an ordinary bf16 ``nn.Module`` whose gradients come from autograd.

Dimensions: B windows, T positions of a window, D = ``width``, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.train.messages import ModelSize

NUM_BYTES = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised copy of what it adds to."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        batch, length, width = hidden.shape
        heads = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        wide = functional.gelu(self.widen(self.feed_forward_norm(hidden)))
        added: Tensor = hidden + self.narrow(wide)
        return added


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, T) to logits (B, T, 256)."""
        hidden = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy (nats a byte, fp32) of each byte given the ones before it; int64 windows (B, T + 1)."""
        logits = self(windows[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def build_model(size: ModelSize, seed: int) -> ByteModel:
    """The model with the initial weights of a seed, in bf16; the same bits wherever it is built."""
    model = ByteModel(size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.fill_(0.0)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
        model.to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.add_(0.0)  # turns -0.0 into 0.0: with a zero gradient its sign is not promised
    return model
