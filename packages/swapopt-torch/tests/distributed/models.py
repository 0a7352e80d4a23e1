"""What parallel trainings train: a transformer of uneven sizes, its data and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from swapopt_torch import optim

VOCABULARY = 67
WIDTH = 64
LENGTH = 16
HEAD_WIDTH = 16
BATCH = 8

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "HyperParallel AdamW": lambda params: optim.AdamW(params, lr=1e-2),
}


class Transformer(nn.Module):
    """A small language model, whose parts a parallel training may shard or replace.

    Two or four ranks do not divide the vocabulary (67), four not the inner width of a block (150),
    and one of four has no row of the three tables of positions. Local parts of matrices have 1024
    elements or more, those of vectors fewer.

    Args:
        blocks: maps of hidden [batch, length, 64] to the same shape; two of `Block` by default.
    """

    def __init__(self, blocks: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList([Block(), Block()] if blocks is None else blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, 67] of tokens [batch, length], at most 16 long."""
        hidden = self.positions(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Positions(nn.Module):
    """Three tables of positions, added up: a parameter of three long rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(3, LENGTH * WIDTH) / 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.tables.sum(0).view(LENGTH, WIDTH)[: hidden.shape[1]]


class Attention(nn.Module):
    """Causal attention over as many heads as the projections give.

    A subclass may attend over a sequence that several ranks share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Mix the values; all tensors are [batch, heads, length, 16]."""
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, inner: int = 150) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(hidden)))


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm before and a sum after it."""

    def __init__(
        self, attention: nn.Module | None = None, feed_forward: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = attention or Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed_forward = feed_forward or FeedForward()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.feed_forward(self.norm2(hidden))


def tokens(step: int, device: torch.device, part: int = 0, parts: int = 1) -> torch.Tensor:
    """Return one of so many parts of a step's tokens [8 / parts, 17]; same step, same tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)[part::parts].to(
        device
    )


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in fp32, of guessing each token of a batch from those before it."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
