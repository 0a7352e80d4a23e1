"""The one place where a DTensor is opened and closed.

A DTensor is a local tensor (the part of it that this process holds) in a frame: mesh, placements,
global shape and stride. What swaps is the local tensor; the optimizer's state shows it framed.

DTensor's own module is never imported here: torch may be built without torch.distributed, and a
DTensor can only exist once somebody has imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_NO_DTENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Say whether something is a DTensor, or a parameter that is one; a subclass is not."""
    return type(tensor) is _dtensor_class()


def _dtensor_class() -> type[DTensor] | None:
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, which shares its memory, and any other tensor as it is.

    Unlike ``to_local()`` it is the same object each time, also for a parameter, and has no history.
    """
    # Asked several times per parameter and step, where looking for DTensor's class takes longer.
    if type(tensor) in _NO_DTENSORS:
        return tensor
    return tensor._local_tensor if is_dtensor(tensor) else tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """What a DTensor has beside its local tensor: mesh, placements, global shape and stride."""

    _spec: DTensorSpec

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor over a local tensor, without a history and without communication.

        It shares the local tensor's memory, and its device and dtype are the local tensor's:
        ``DTensor.from_local`` would move one in host memory to the device of the mesh.
        """
        kind = _dtensor_class()
        meta = self._spec.tensor_meta
        assert kind is not None and meta is not None, "a frame is taken from a DTensor"
        # DTensors do not share a spec: some of torch's functions change it in place.
        spec = copy.copy(self._spec)
        spec.tensor_meta = meta._replace(dtype=local.dtype)
        return kind(local, spec, requires_grad=False)


def frame_of(tensor: torch.Tensor) -> Frame | None:
    """Return the frame of a DTensor, and None for any other tensor."""
    return Frame(tensor._spec) if is_dtensor(tensor) else None


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return how a tensor is laid out over processes; empty for one that is no DTensor."""
    if not is_dtensor(tensor):
        return ()
    return tensor._spec.mesh, tensor._spec.placements, tensor._local_tensor.shape


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor, and None for any other tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether every process holds the same part of both tensors."""
    return tensor.shape == other.shape and layout_of(tensor) == layout_of(other)


def holds_sums(tensor: torch.Tensor) -> bool:
    """Say whether the tensor's value is yet to be summed (or otherwise reduced) over processes."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def is_local_work(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether an elementwise operator on these tensors is one on their local tensors.

    So it is if they are laid out alike and hold no sums: DTensor's dispatch would call the operator
    on the local tensors, without communication, at several times the host's time. Otherwise it is
    for the dispatch to redistribute, or to refuse.
    """
    layout = layout_of(tensors[0])
    return not holds_sums(tensors[0]) and all(layout_of(other) == layout for other in tensors[1:])
