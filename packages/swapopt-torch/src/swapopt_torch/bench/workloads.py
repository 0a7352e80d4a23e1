"""What is stepped: lists of shapes, as models have them, and which of them get gradients when.

The RFC gives its model's parameters (25,239,552), tensors (816) and hidden size (1024), and no
shapes. 25,239,552 is 24,648 rows of 1024; 816 tensors are 24 layers of 34, which leaves 1027 rows
to a layer. 17 projections of 60 rows (the last of 50) and 17 vectors of one row are just that:
16 x 60 + 50 + 17 = 1027.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]

_MIB = 2**20
_UNITS = {"MIB": _MIB, "GIB": 1024 * _MIB}
_STATES = 2  # Adam's two moments
_MATRIX: Shape = (1024, 1024)
# Attention (4 of 1024 x 1024) and a feed-forward part of twice that: 8 * 2**20 elements.
_UNIFORM_LAYER: list[Shape] = [_MATRIX] * 4 + [(2048, 1024), (1024, 2048)]
_UNIFORM_LAYER_STATE_NBYTES = 8 * 2**20 * _STATES * 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters to be updated.

    Attributes:
        name: what the user calls it.
        title: what it is, in a line.
        shapes: of every parameter, in order.
        dtype: of parameters, gradients and states.
        always: how many parameters, from the first on, get a gradient in every step.
        groups: lengths of the groups that the others come in, each with gradients or without.
        active_share: share of the groups with gradients in a step.
    """

    name: str
    title: str
    shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.float32
    always: int | None = None
    group_length: int = 1
    active_share: float = 1.0

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def state_nbytes(self) -> int:
        """Bytes of both moments of all parameters."""
        return _STATES * self.nbytes

    @property
    def changes(self) -> bool:
        """Whether steps differ in which parameters have a gradient."""
        return self.always is not None

    def moved_nbytes(self, min_numel: int, step: int) -> int:
        """Return the bytes of states that a step has to move in each direction.

        Args:
            min_numel: states with fewer elements stay on the device.
            step: which step; see `active`.
        """
        sizes = [math.prod(self.shapes[index]) for index in self.active(step)]
        moving = sum(numel for numel in sizes if numel >= min_numel)
        return _STATES * moving * self.dtype.itemsize

    def active(self, step: int) -> Sequence[int]:
        """Return the indices of the parameters that have a gradient in a step.

        Equal for equal steps, on any machine.
        """
        if self.always is None:
            return range(len(self.shapes))
        starts = range(self.always, len(self.shapes), self.group_length)
        count = round(len(starts) * self.active_share)
        chosen = sorted(random.Random(step).sample(starts, count))
        routed = [start + offset for start in chosen for offset in range(self.group_length)]
        return [*range(self.always), *routed]


def _rfc() -> Workload:
    layer: list[Shape] = [(60, 1024)] * 16 + [(50, 1024)] + [(1024,)] * 17
    return Workload("rfc", "the RFC's: 816 tensors, hidden size 1024", tuple(layer * 24))


def _uniform(state_nbytes: int, name: str) -> Workload:
    layers = state_nbytes // _UNIFORM_LAYER_STATE_NBYTES
    return Workload(
        name, f"transformer of {layers} equal layers, width 1024", tuple(_UNIFORM_LAYER * layers)
    )


def _tiny(tensors: int, name: str) -> Workload:
    return Workload(name, "tensors of 1024 elements: Python's part", ((1024,),) * tensors)


def _llama_1b() -> Workload:
    width, hidden, vocabulary, layers, key_value = 2048, 8192, 128_256, 16, 512
    layer: list[Shape] = [
        (width, width),
        (key_value, width),
        (key_value, width),
        (width, width),
        (hidden, width),
        (hidden, width),
        (width, hidden),
        (width,),
        (width,),
    ]
    shapes = [(vocabulary, width), *layer * layers, (width,)]
    return Workload("llama-1b", "Llama-like, 16 layers, width 2048", tuple(shapes))


def _moe() -> Workload:
    layers, experts = 16, 64
    projection: Shape = (128, 128)
    always = [projection] * 4 * layers
    expert: list[Shape] = [(64, 128), (64, 128), (128, 64)]
    return Workload(
        "moe",
        f"{layers * experts:,} experts of 3 small tensors, half of them at work in a step",
        (*always, *expert * experts * layers),
        always=len(always),
        group_length=len(expert),
        active_share=0.5,
    )


def _embedding() -> Workload:
    body: list[Shape] = [_MATRIX] * 32
    return Workload("embedding", "half of the parameters in one tensor", ((32 * 1024, 1024), *body))


_NAMED: dict[str, Callable[[], Workload]] = {
    "rfc": _rfc,
    "llama-1b": _llama_1b,
    "moe": _moe,
    "embedding": _embedding,
}
NAMES = (*_NAMED, "uniform-512MiB", "uniform-1GiB")


def find_workload(name: str) -> Workload:
    """Return a workload by its name.

    ``uniform-SIZE`` has any size of states, and ``tiny-COUNT`` any number of tensors.

    Raises:
        ValueError: there is none of this name.
    """
    if name in _NAMED:
        return _NAMED[name]()
    count = re.fullmatch(r"tiny-([1-9]\d*)", name, re.IGNORECASE)
    if count is not None:
        return _tiny(int(count[1]), name)
    size = re.fullmatch(r"uniform-(\d+)(MiB|GiB)", name, re.IGNORECASE)
    if size is None:
        raise ValueError(
            f"{name!r} is no workload: choose one of {', '.join(NAMES)}, or uniform-SIZE with "
            "another size of states, like uniform-8GiB, or tiny-COUNT, like tiny-1000"
        )
    state_nbytes = int(size[1]) * _UNITS[size[2].upper()]
    if state_nbytes == 0 or state_nbytes % _UNIFORM_LAYER_STATE_NBYTES:
        raise ValueError(
            f"{name!r}: the states come in layers of {_UNIFORM_LAYER_STATE_NBYTES // _MIB} MiB; "
            "choose a multiple of that"
        )
    return _uniform(state_nbytes, name)
