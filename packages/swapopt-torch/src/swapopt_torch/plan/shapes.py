"""The parameters of models of any size, and what one of the ranks that share them holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Size = tuple[int, ...]

_WIDTH_STEP = 128
_HIDDEN_STEP = 16
_LARGEST_WIDTH = 1 << 16
_WIDTH_PER_LAYER = 102.4  # 80 layers of width 8,192
_LARGEST_VOCABULARY = 32_000
_EMBEDDING_SHARE = 0.2
_KEY_VALUE_SHARE = 8  # queries per key and value head
_LARGEST_SIDE = 4096


@dataclass(frozen=True)
class Model:
    """A model's parameters.

    Attributes:
        description: its dimensions, for people.
        sizes: of its parameters, in the order in which it has them.
    """

    description: str
    sizes: tuple[Size, ...]

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return sum(map(math.prod, self.sizes))


@dataclass(frozen=True)
class _Dimensions:
    layers: int
    width: int
    hidden: int
    vocabulary: int


def llama(numel: int) -> Model:
    """Return a transformer like Llama: grouped queries, gated feed-forward, untied embeddings.

    Its width and depth grow together as those of that family do; the width of the feed-forward
    layers brings the total close to what is asked for.
    """
    found = min(
        (_with_width(numel, width) for width in range(_WIDTH_STEP, _LARGEST_WIDTH, _WIDTH_STEP)),
        key=lambda it: abs(math.log(it.layers * _WIDTH_PER_LAYER / it.width)),
    )
    width, hidden, narrow = found.width, found.hidden, found.width // _KEY_VALUE_SHARE
    layer: list[Size] = [
        (width, width),
        (narrow, width),
        (narrow, width),
        (width, width),
        (hidden, width),
        (width, hidden),
        (hidden, width),
        (width,),
        (width,),
    ]
    ends: Size = (found.vocabulary, width)
    return Model(
        f"{found.layers} layers of width {width:,}, feed-forward {hidden:,}, "
        f"vocabulary {found.vocabulary:,}",
        (ends, *(layer * found.layers), (width,), ends),
    )


def _with_width(numel: int, width: int) -> _Dimensions:
    most = int(numel * _EMBEDDING_SHARE / 2 / width)
    vocabulary = min(_LARGEST_VOCABULARY, max(1, most // _HIDDEN_STEP) * _HIDDEN_STEP)
    left = numel - 2 * vocabulary * width - width
    attention = 2 * width**2 + 2 * width**2 // _KEY_VALUE_SHARE + 2 * width
    layers = max(1, round(left / (attention + 3 * width * 3.5 * width)))
    hidden = (left / layers - attention) / (3 * width)
    return _Dimensions(
        layers, width, max(1, round(hidden / _HIDDEN_STEP)) * _HIDDEN_STEP, vocabulary
    )


def uniform(numel: int) -> Model:
    """Return square matrices of one size, the last one cut to give the exact total."""
    side = min(_LARGEST_SIDE, max(1, math.isqrt(numel // 64)))
    whole, rest = divmod(numel, side * side)
    sizes: list[Size] = [(side, side)] * whole
    if rest:
        sizes.append((-(-rest // side), side) if rest % side == 0 else (rest,))
    return Model(f"{len(sizes):,} matrices of {side:,} x {side:,}", tuple(sizes))


def embedding(numel: int) -> Model:
    """Return a model with half of its parameters in one embedding, which no batch can divide."""
    rest = uniform(numel - numel // 2)
    width = rest.sizes[0][-1]
    table = (numel // 2 // width, width)
    return Model(
        f"an embedding of {table[0]:,} x {table[1]:,} and {rest.description}", (table, *rest.sizes)
    )


SHAPES: Mapping[str, Callable[[int], Model]] = {
    "llama": llama,
    "uniform": uniform,
    "embedding": embedding,
}


def shard(sizes: Sequence[Size], shards: int) -> list[Size]:
    """Return what the first of so many ranks holds, which is the most that any holds.

    As FSDP2 does it: every parameter is divided along its first dimension, rounded up.
    """
    return [(-(-size[0] // shards), *size[1:]) for size in sizes]
