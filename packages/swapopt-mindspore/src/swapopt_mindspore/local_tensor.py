"""The one place where a DTensor is opened.

Adam updates each element by itself, so a shard is updated like any tensor: operators and copies
see the local part, and nothing about mesh and placement is asked.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor that holds this rank's elements: the tensor itself, if it is no DTensor.

    Writing to it writes to the DTensor. A DTensor is known by its ``to_local``, whichever
    package it comes from.
    """
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
