"""Collectives of MindSpore's CPU target, and what parallel models build of them.

On a CPU all_reduce works within any group, all_gather among all ranks only, and there is no
reduce_scatter, all_to_all, send or receive: a reduce_scatter is an all_reduce of which each rank
keeps its part. None of them takes bfloat16, which travels as float32 without loss.
"""

from __future__ import annotations

from functools import cache

from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_rank

Group = tuple[int, ...]
"""The ranks that communicate, in rising order."""


@cache
def _name_of(group: Group) -> str:
    assert get_rank() in group
    name = "ranks-" + "-".join(map(str, group))
    create_group(name, list(group))
    return name


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum over the group."""
    summed: Tensor = ops.AllReduce(group=_name_of(group))(tensor)
    return summed


def all_gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, one behind the other along the first axis."""
    gathered: Tensor = ops.AllGather()(tensor)
    return gathered


class SumOfParts(nn.Cell):
    """Adds what each rank has computed of a result; every rank then goes on with all of it.

    A cell, since it has a derivative of its own: each rank's part counts once.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def construct(self, part: Tensor) -> Tensor:
        return all_reduce(part, self._group)

    def bprop(self, part: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout,)


class SharedByParts(nn.Cell):
    """Hands a tensor that every rank has to the ranks' parts; its gradient is their sum."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def construct(self, whole: Tensor) -> Tensor:
        return whole * 1.0  # a tensor of its own, so that this cell has a derivative

    def bprop(self, whole: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (all_reduce(dout, self._group),)
