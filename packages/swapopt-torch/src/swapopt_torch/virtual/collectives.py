"""Process groups of virtual devices: the backend ``vccl`` of ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from ._native import native

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

BACKEND = "vccl"


def register() -> None:
    """Make ``vccl`` the backend for tensors of the virtual device, where torch has gloo."""
    if dist.is_available() and dist.is_gloo_available():
        dist.Backend.register_backend(BACKEND, _create, devices=["virtual"])
        # torch copies the options of a group before it splits it, and gloo's cannot be copied.
        options_class = vars(dist.ProcessGroupGloo)["_Options"]
        options_class.__deepcopy__ = _copied


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    if native().is_dry():
        raise RuntimeError(
            "a dry virtual device has no values to send to other processes: be one rank of torch's "
            "fake process group, init_process_group('cpu:fake,virtual:fake', ...), or "
            "enable(dry=False)"
        )
    return native().Group(_make_transport(store, rank, size, timeout), _make_transport)


def _make_transport(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


class _GlooOptions(Protocol):
    """What gloo's options have; torch's own annotations leave these names out."""

    _devices: list[object]
    _threads: int
    _timeout: timedelta


def _copied(options: _GlooOptions, memo: dict[int, object]) -> _GlooOptions:
    del memo
    copied = type(options)()
    copied._devices, copied._threads = options._devices, options._threads
    copied._timeout = options._timeout
    return copied
