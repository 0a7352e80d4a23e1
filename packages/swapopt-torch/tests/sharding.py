"""DTensors in one process: a rank of a group whose other ranks do not exist.

torch's fake process group says who is who and communicates nothing. So every shard can be looked at
here, the uneven and the empty ones, too; what needs communication is tested in `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed import fake_pg

from twins import Twin

# Global shapes and placements. On the last of three ranks the second is empty and the sixth too
# small to swap; the first and the fifth are smaller than on the other ranks.
SHARDED: tuple[tuple[tuple[int, ...], Placement], ...] = (
    ((8, 512), Shard(0)),
    ((2, 2048), Shard(0)),
    ((9, 700), Shard(0)),
    ((40, 50), Replicate()),
    ((300, 16), Shard(1)),
    ((7,), Shard(0)),
)
PLAIN_NUMEL = 3000


@contextmanager
def lone_rank(device_type: str) -> Iterator[None]:
    """Be the last of four ranks for a while; DTensor's caches allow one rank in a process."""
    backend = f"fake_{device_type}"
    if not hasattr(dist.Backend, backend.upper()):
        dist.Backend.register_backend(
            backend, fake_pg._create_fake_pg, extended_api=True, devices=[device_type]
        )
    dist.init_process_group(
        f"cpu:fake,{device_type}:{backend}", store=fake_pg.FakeStore(), rank=3, world_size=4
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(device: torch.device, ranks: list[Any]) -> DeviceMesh:
    """Return a mesh of these ranks; making one leaves the current device as it was."""
    module = torch.get_device_module(device)
    current = module.current_device()
    mesh = DeviceMesh(device.type, ranks)
    module.set_device(current)
    return mesh


def shard(
    values: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], device: torch.device
) -> torch.Tensor:
    """Return values that every rank knows as a DTensor, this rank's part on the device."""
    with torch.get_device_module(device).device(device):
        return distribute_tensor(values, mesh, placements, src_data_rank=None)


@dataclass
class ShardedTwin(Twin):
    """One of two, over DTensors and a parameter that is none."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters:
            values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = like(values, parameter, self.device)


def like(values: torch.Tensor, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values as a tensor that is sharded as a parameter is."""
    if not hasattr(parameter, "placements"):
        return values.to(device)
    return shard(values, parameter.device_mesh, parameter.placements, device)


def make_sharded_twin(
    device: torch.device,
    mesh: DeviceMesh,
    make: Callable[[list[dict[str, list[nn.Parameter]]]], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
) -> ShardedTwin:
    """Make parameters and a native optimizer over them; always the same."""
    parameters = [
        nn.Parameter(shard(_values(shape, dtype), mesh, [placement], device))
        for shape, placement in SHARDED
    ]
    plain = nn.Parameter(_values((PLAIN_NUMEL,), dtype).to(device))
    # Groups of their own: torch's fused kernel takes DTensors only, or none.
    optimizer = make([{"params": parameters}, {"params": [plain]}])
    parameters.append(plain)
    return ShardedTwin(parameters, optimizer, optimizer, device=device)


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.linspace(-1, 1, numel).view(shape).to(dtype)
