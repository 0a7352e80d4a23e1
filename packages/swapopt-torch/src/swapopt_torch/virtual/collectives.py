"""Process groups of virtual devices: the backend ``vccl`` of ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ._native import native

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

BACKEND = "vccl"


def register() -> None:
    """Make ``vccl`` the backend for tensors of the virtual device, where torch has gloo."""
    if dist.is_available() and dist.is_gloo_available():
        dist.Backend.register_backend(BACKEND, _create, devices=["virtual"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    return native().Group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
