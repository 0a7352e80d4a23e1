"""The order of a packed step as the RFC writes it down, as a reference to measure against.

One copy stream per device; the copy of batch i to the host and that of batch i + 2 to the device
follow one another on it; the device is synchronised before the step, and the host waits at its
end. Every batch moves whole, in arenas that live as long as the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.optim import adam as torch_adam

from swapopt_common import partition
from swapopt_torch.host_memory import allocate_region
from swapopt_torch.optim.adamw import adamw
from swapopt_torch.streams import compute_stream

ARENAS = 2
BETAS, EPS, LR, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-3, 1e-2


class Update(ABC):
    """AdamW's arithmetic on some of the parameters, whose moments are on the device."""

    @abstractmethod
    def begin(self) -> None:
        """Note that a step begins."""

    @abstractmethod
    def __call__(
        self,
        indices: Sequence[int],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        """Update parameters, which are those of ``indices``, and their moments in place."""


class TorchUpdate(Update):
    """torch's functional AdamW; one step count per parameter, where torch keeps it."""

    def __init__(self, params: Sequence[torch.Tensor], *, fused: bool) -> None:
        self._fused = fused
        self._steps = [
            torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
            for param in params
        ]

    def begin(self) -> None:
        """Do nothing: every update advances its own counts."""

    def __call__(
        self,
        indices: Sequence[int],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        """Call it."""
        torch_adam.adam(
            params,
            grads,
            *moments,
            [],
            [self._steps[index] for index in indices],
            foreach=False,
            fused=self._fused,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            maximize=False,
            decoupled_weight_decay=True,
        )


class HyperUpdate(Update):
    """HyperParallel's functional AdamW; one step count for all."""

    def __init__(self) -> None:
        self._step = 0

    def begin(self) -> None:
        """Advance the count."""
        self._step += 1

    def __call__(
        self,
        indices: Sequence[int],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        """Call it."""
        del indices
        adamw(
            params,
            grads,
            *moments,
            [],
            self._step,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class _Sized:
    index: int
    numel: int
    swappable_nbytes: int


class _Batch:
    """Neighbouring parameters; their first moments, then their second ones, in host memory."""

    def __init__(self, params: Sequence[torch.Tensor], units: Sequence[_Sized]) -> None:
        self.indices = [unit.index for unit in units]
        self.params = [params[index] for index in self.indices]
        self.numels = [unit.numel for unit in units]
        dtype, device = params[0].dtype, params[0].device
        self._region = allocate_region(dtype, 2 * sum(self.numels), device, pageable_fallback=False)
        self.host = self._region.flat
        self.ready, self.updated, self.offloaded = (torch.Event(device) for _ in range(3))

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of pinned host memory."""
        return self._region.pinned_nbytes

    def moments(self, arena: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the moments of every parameter as they lie in an arena."""
        pieces = torch.split(arena[: self.host.numel()], [*self.numels, *self.numels])
        views = [
            piece.view(param.shape) for piece, param in zip(pieces, self.params * 2, strict=True)
        ]
        return views[: len(self.params)], views[len(self.params) :]


class RfcOrder:
    """AdamW whose moments live in pinned host memory and move in the RFC's order.

    Args:
        params: of one dtype, on one device.
        update: the arithmetic.
        swap_times: how many batches they are divided into.
    """

    def __init__(self, params: Sequence[torch.Tensor], update: Update, swap_times: int) -> None:
        self._update = update
        self._device = params[0].device
        self._dtype = params[0].dtype
        self._copies = torch.Stream(device=self._device)
        units = [
            _Sized(index, math.prod(param.shape), 2 * param.nbytes)
            for index, param in enumerate(params)
        ]
        self._batches = [_Batch(params, part) for part in partition(units, swap_times)]
        self._arena_numel = max(batch.host.numel() for batch in self._batches)

    def pinned_nbytes(self) -> int:
        """Return the bytes of pinned host memory the moments take."""
        return sum(batch.pinned_nbytes for batch in self._batches)

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return both moments of every parameter, flat, as views of host memory."""
        found = []
        for batch in self._batches:
            ends = list(accumulate(batch.numels, initial=0))
            first, second = batch.host.chunk(2)
            found += [(first[start:end], second[start:end]) for start, end in pairwise(ends)]
        return found

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; returns when all copies are done."""
        torch.get_device_module(self._device).synchronize(self._device)
        self._update.begin()
        arenas = [
            torch.empty(self._arena_numel, dtype=self._dtype, device=self._device)
            for _ in range(min(ARENAS, len(self._batches)))
        ]
        allocated = torch.Event(self._device)
        allocated.record(compute_stream(self._device))
        self._copies.wait_event(allocated)
        for position, arena in enumerate(arenas):
            self._prefetch(self._batches[position], arena)
        for position, batch in enumerate(self._batches):
            arena = arenas[position % ARENAS]
            self._update_batch(batch, arena)
            self._copies.wait_event(batch.updated)
            with self._copies:
                batch.host.copy_(arena[: batch.host.numel()], non_blocking=True)
                batch.offloaded.record(self._copies)
            if position + ARENAS < len(self._batches):
                self._prefetch(self._batches[position + ARENAS], arena)
        self._batches[-1].offloaded.synchronize()

    def _prefetch(self, batch: _Batch, arena: torch.Tensor) -> None:
        with self._copies:
            arena[: batch.host.numel()].copy_(batch.host, non_blocking=True)
            batch.ready.record(self._copies)

    def _update_batch(self, batch: _Batch, arena: torch.Tensor) -> None:
        stream = compute_stream(self._device)
        stream.wait_event(batch.ready)
        first, second = batch.moments(arena)
        rows = [
            (index, param, param.grad, exp_avg, exp_avg_sq)
            for index, param, exp_avg, exp_avg_sq in zip(
                batch.indices, batch.params, first, second, strict=True
            )
            if param.grad is not None
        ]
        if rows:
            indices, params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*rows, strict=True))
            self._update(indices, params, grads, (exp_avgs, exp_avg_sqs))
        batch.updated.record(stream)
