"""A small GPT over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from swapopt_torch.demo.settings import ModelSize

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual path.

    Args:
        size: the model's dimensions.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden (batch, context, width) to the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        updated: torch.Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return updated

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, context, width = hidden.shape
        query, key, value = (
            part.view(batch, context, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.attention_output(
            mixed.transpose(1, 2).reshape(batch, context, width)
        )
        return output


class ByteGPT(nn.Module):
    """Predicts the next byte; learned positions, pre-norm, untied head.

    Args:
        size: the model's dimensions.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, size.width)
        self.position_embedding = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self._initialise()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, context) to logits (batch, context, 256)."""
        hidden = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.final_norm(self.blocks(hidden)))
        return logits

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, in nats per byte, over tokens (batch, context + 1)."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
