"""What a functional update takes: the tensors of several parameters, a list per kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from swapopt_torch.local_tensor import is_local_work, local_of
from swapopt_torch.units import Share, TorchUnit

_Row = list[torch.Tensor]
"""A parameter, its gradient and its states in the order of its slots."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Parameters that one functional call updates; every list is in the order of the shares.

    Attributes:
        shares: the parameters, or ranges of them.
        params: what is updated: the parameters, their local tensors, or flat ranges of these.
        grads: their gradients, of the same shapes.
        states: a list per slot, of the same shapes again.
    """

    shares: Sequence[Share]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[list[torch.Tensor]]

    def chosen(self, indices: Sequence[int]) -> Operands:
        """Return some of the parameters."""
        return Operands(
            [self.shares[index] for index in indices],
            [self.params[index] for index in indices],
            [self.grads[index] for index in indices],
            [[row[index] for index in indices] for row in self.states],
        )


def operands_of(shares: Sequence[Share]) -> list[Operands]:
    """Return what updates shares of units, whose swapped states are on their device.

    Adam is elementwise. So DTensors whose gradients and states are laid out as they are, which is
    the rule, are updated by their local tensors: bit for bit what DTensor's dispatch would do, in
    less of the host's time, and no communication either way. Others go through the dispatch, which
    redistributes or refuses as it does natively: one at a time, because ranks cut their batches in
    different places, and whatever communicates must do so in one order on all of them. (Such a
    parameter is not cut itself: see `may_be_cut`.)
    """
    if not any(share.unit.is_dtensor for share in shares):
        return [_operands(shares, [_row(share) for share in shares])]
    local: list[Share] = []
    others: list[Share] = []
    for share in shares:
        (local if _is_local_work(share.unit) else others).append(share)
    operands = []
    if local:
        operands.append(_operands(local, [_local_row(share) for share in local]))
    operands.extend(_operands([share], [_row(share)]) for share in others)
    return operands


def may_be_cut(unit: TorchUnit) -> bool:
    """Say whether a unit's tensors, its gradient if it has one, can be updated range by range.

    They must be in one order in memory, so that a range of elements is one of addresses.
    """
    if is_lazy(unit.param):
        return False
    states = [slot.exposed if slot.swappable else slot.tensor for slot in unit.slots]
    tensors = [unit.param, *(state for state in states if state is not None)]
    if unit.grad is not None:
        tensors.append(unit.grad)
    if unit.is_dtensor and not is_local_work(tensors):
        return False
    return all(
        local_of(tensor).is_contiguous() and not tensor.is_complex() for tensor in tensors
    ) and all(slot.numel == local_of(unit.param).numel() for slot in unit.slots)


def _operands(shares: Sequence[Share], rows: Sequence[_Row]) -> Operands:
    params, grads, *states = map(list, zip(*rows, strict=True))
    return Operands(shares, params, grads, states)


def _is_local_work(unit: TorchUnit) -> bool:
    # Swapped states were laid out as their parameter once; others may have changed that since.
    states = [slot.exposed if slot.swappable else slot.tensor for slot in unit.slots]
    return is_local_work([unit.param, _grad(unit), *(s for s in states if s is not None)])


def _local_row(share: Share) -> _Row:
    unit = share.unit
    if not share.is_whole:
        return _range_row(share)
    states = [slot.tensor for slot in unit.slots if slot.tensor is not None]
    return [local_of(tensor) for tensor in (unit.param, _grad(unit), *states)]


def _row(share: Share) -> _Row:
    unit = share.unit
    if not share.is_whole:
        return _range_row(share)
    states = [
        slot.framed(slot.tensor) if slot.swappable else slot.tensor
        for slot in unit.slots
        if slot.tensor is not None
    ]
    return [unit.param, _grad(unit), *states]


def _range_row(share: Share) -> _Row:
    moving = iter(share.slots)
    states = [
        next(moving).tensor if s.swappable else _range(share, s.tensor) for s in share.unit.slots
    ]
    return [
        _range(share, share.unit.param),
        _range(share, _grad(share.unit)),
        *(state for state in states if state is not None),
    ]


def _range(share: Share, tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "an update has all its states"
    return local_of(tensor).view(-1)[share.start : share.stop]


def _grad(unit: TorchUnit) -> torch.Tensor:
    assert unit.grad is not None, "only units with a gradient are updated"
    return unit.grad
