"""What is planned: a rank's share of a model, its optimizer, its device and its host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from swapopt_torch.optim import AdamW
from swapopt_torch.plan.shapes import SHAPES, Model, Size, shard
from swapopt_torch.virtual import Profile

DEFAULT_HOST_BYTES_PER_SECOND = 400e9
"""Two sockets of eight DDR5-4800 channels, at two thirds of their 614 GB/s; an assumption."""

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, foreach=False),
    "hyper-adamw": AdamW,
}
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank of a training run.

    Attributes:
        params: parameters of the whole model, about.
        shards: ranks that each hold a part of every parameter.
        shape: a key of `SHAPES`.
        optimizer: a key of `OPTIMIZERS`.
        dtype: a key of `DTYPES`: of parameters, gradients and states.
        packed: whether states move through staging arenas or each by itself.

    Raises:
        ValueError: no model can be so small.
    """

    params: int
    shards: int = 1
    shape: str = "llama"
    optimizer: str = "adamw-fused"
    dtype: str = "fp32"
    packed: bool = True

    def __post_init__(self) -> None:
        if self.params < _FEWEST_PARAMS:
            raise ValueError(f"expected at least {_FEWEST_PARAMS:,} params, found {self.params:,}")

    def model(self) -> Model:
        """Return the whole model."""
        return SHAPES[self.shape](self.params)

    def shard_sizes(self) -> list[Size]:
        """Return the sizes of what the rank holds."""
        return shard(self.model().sizes, self.shards)


_FEWEST_PARAMS = 100_000


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the ranks on it.

    Attributes:
        ranks: how many step at the same time.
        bytes_per_second: what its memory gives, reads and writes together.
    """

    ranks: int = 1
    bytes_per_second: float = DEFAULT_HOST_BYTES_PER_SECOND

    def share_bytes_per_second(self, profile: Profile) -> float:
        """Return what one rank gets in each direction; on a full-duplex link it uses both."""
        directions = 2 if profile.full_duplex else 1
        return self.bytes_per_second / self.ranks / directions

    def limit(self, profile: Profile) -> Profile:
        """Return the profile with a link that is no faster than the rank's share."""
        share = self.share_bytes_per_second(profile)
        rates = {
            "h2d_bytes_per_second": min(share, profile.h2d_bytes_per_second),
            "d2h_bytes_per_second": min(share, profile.d2h_bytes_per_second),
        }
        why = f"one of {self.ranks} shares of the host's {self.bytes_per_second / 1e9:,.0f} GB/s"
        limited = {name: why for name, rate in rates.items() if rate == share}
        return replace(
            profile,
            name=f"{profile.name}, {self.ranks} ranks per host",
            h2d_bytes_per_second=rates["h2d_bytes_per_second"],
            d2h_bytes_per_second=rates["d2h_bytes_per_second"],
            sources={**profile.sources, **limited},
        )
