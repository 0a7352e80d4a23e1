"""What a functional update takes: the tensors of several parameters, a list per kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swapopt_torch.layout import TorchUnit
from swapopt_torch.local_tensor import is_local_work, local_of

_Row = list[torch.Tensor]
"""A parameter, its gradient and its states in the order of its slots."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Parameters that one functional call updates; every list is in the order of the units.

    Attributes:
        units: the parameters' units.
        params: what is updated: the parameters, or their local tensors.
        grads: their gradients, of the same shapes.
        states: a list per slot, of the same shapes again.
        are_local: whether DTensors are here as their local tensors.
    """

    units: Sequence[TorchUnit]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    are_local: bool


def operands_of(units: Sequence[TorchUnit]) -> list[Operands]:
    """Return what updates units, whose swapped states are on their device.

    Adam is elementwise. So DTensors whose gradients and states are laid out as they are, which is
    the rule, are updated by their local tensors: bit for bit what DTensor's dispatch would do, in
    less of the host's time, and no communication either way. Others go through the dispatch, which
    redistributes or refuses as it does natively: one at a time, because ranks cut their batches in
    different places, and whatever communicates must do so in one order on all of them.
    """
    if not any(unit.is_dtensor for unit in units):
        return [_operands(units, [_row(unit) for unit in units], are_local=False)]
    local: list[TorchUnit] = []
    others: list[TorchUnit] = []
    for unit in units:
        (local if _is_local_work(unit) else others).append(unit)
    operands = []
    if local:
        operands.append(_operands(local, [_local_row(unit) for unit in local], are_local=True))
    operands.extend(_operands([unit], [_row(unit)], are_local=False) for unit in others)
    return operands


def _operands(units: Sequence[TorchUnit], rows: Sequence[_Row], *, are_local: bool) -> Operands:
    params, grads, *states = map(list, zip(*rows, strict=True))
    return Operands(units, params, grads, states, are_local)


def _is_local_work(unit: TorchUnit) -> bool:
    # Swapped states were laid out as their parameter once; others may have changed that since.
    states = [slot.exposed if slot.swappable else slot.tensor for slot in unit.slots]
    return is_local_work([unit.param, _grad(unit), *(s for s in states if s is not None)])


def _local_row(unit: TorchUnit) -> _Row:
    states = [slot.tensor for slot in unit.slots if slot.tensor is not None]
    return [local_of(tensor) for tensor in (unit.param, _grad(unit), *states)]


def _row(unit: TorchUnit) -> _Row:
    states = [
        slot.framed(slot.tensor) if slot.swappable else slot.tensor
        for slot in unit.slots
        if slot.tensor is not None
    ]
    return [unit.param, _grad(unit), *states]


def _grad(unit: TorchUnit) -> torch.Tensor:
    assert unit.grad is not None, "only units with a gradient are updated"
    return unit.grad
