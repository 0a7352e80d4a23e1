"""Opening and closing DTensors: nothing is copied, sent or lost on the way."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sharding import mesh_of, shard
from swapopt_torch.local_tensor import (
    are_alike,
    frame_of,
    holds_sums,
    is_dtensor,
    is_local_work,
    layout_of,
    local_of,
)

pytestmark = pytest.mark.usefixtures("lone_group")


class SubclassOfDTensor(DTensor):
    pass


def test_what_is_a_dtensor(device: torch.device, mesh: DeviceMesh) -> None:
    sharded = shard(torch.ones(8, 4), mesh, [Shard(0)], device)
    assert is_dtensor(sharded)
    assert is_dtensor(nn.Parameter(sharded))
    assert not is_dtensor(torch.ones(2))
    assert not is_dtensor(None)
    assert not is_dtensor(SubclassOfDTensor(local_of(sharded), sharded._spec, requires_grad=False))


def test_opening_is_free_of_history_and_gives_the_same_object(
    device: torch.device, mesh: DeviceMesh
) -> None:
    sharded = shard(torch.ones(8, 4), mesh, [Shard(0)], device)
    parameter = nn.Parameter(sharded)
    assert local_of(sharded) is local_of(sharded) is sharded._local_tensor
    assert local_of(parameter) is local_of(parameter)
    assert not local_of(parameter).requires_grad
    plain = torch.ones(2)
    assert local_of(plain) is plain


@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2)], ids=str
)
def test_a_frame_around_a_host_tensor(
    device: torch.device, mesh: DeviceMesh, placement: Shard
) -> None:
    """Same mesh, placements, global shape and stride; device and dtype of the local tensor."""
    local = torch.ones(3, 5, device=device)
    sharded = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size((8, 16)), stride=(16, 1)
    )
    frame = frame_of(sharded)
    assert frame is not None
    host = torch.full((3, 5), 2.0, dtype=torch.bfloat16)
    framed = frame.around(host)
    assert framed.device == host.device
    assert framed.dtype is torch.bfloat16
    assert local_of(framed) is host
    assert framed.device_mesh is mesh
    assert framed.placements == (placement,)
    assert framed.shape == (8, 16)
    assert framed.stride() == (16, 1)
    assert not framed.requires_grad
    assert layout_of(framed) == layout_of(sharded)
    framed.add_(1)
    assert host.eq(3).all()
    # Work on it stays on the host: from_local would have taken it to the mesh's device.
    assert (framed * 2).device.type == local_of(framed * 2).device.type == "cpu"
    # A spec of its own: what is changed in one DTensor is not changed in another.
    assert framed._spec is not sharded._spec
    assert sharded.dtype is torch.float32 and sharded._spec.tensor_meta.dtype is torch.float32


def test_a_frame_around_an_empty_shard(device: torch.device, mesh: DeviceMesh) -> None:
    sharded = shard(torch.ones(2, 16), mesh, [Shard(0)], device)
    assert local_of(sharded).shape == (0, 16)
    frame = frame_of(sharded)
    assert frame is not None
    framed = frame.around(torch.empty(0, 16))
    assert framed.shape == (2, 16)
    assert layout_of(framed) == layout_of(sharded)


def test_other_tensors_have_no_frame() -> None:
    assert frame_of(torch.ones(2)) is None
    assert layout_of(torch.ones(2)) == layout_of(torch.ones(3)) == ()


def test_alike(device: torch.device, mesh: DeviceMesh) -> None:
    rows, columns, copies = (
        shard(torch.ones(9, 9), mesh, [placement], device)
        for placement in (Shard(0), Shard(1), Replicate())
    )
    other_mesh = shard(torch.ones(9, 9), mesh_of(device, [0, 2, 3]), [Shard(0)], device)
    plain = torch.ones(9, 9, device=device)
    same = shard(torch.zeros(9, 9), mesh, [Shard(0)], device)
    assert are_alike(rows, same)
    assert is_local_work([rows, same, rows])
    for other in (columns, copies, other_mesh, plain):
        assert not are_alike(rows, other)
        assert not is_local_work([rows, same, other])
        assert not is_local_work([other, rows])
    # Of ten rows and of eight, three ranks hold 4, 4, 2 and 3, 3, 2: on the last it looks the same.
    ten, eight = (shard(torch.ones(count, 9), mesh, [Shard(0)], device) for count in (10, 8))
    assert local_of(ten).shape == local_of(eight).shape
    assert not are_alike(ten, eight)
    assert is_local_work([plain, torch.ones(9, 9, device=device)])


def test_sums(device: torch.device, mesh: DeviceMesh) -> None:
    local = torch.ones(4, device=device)
    sums = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    assert holds_sums(sums)
    assert not is_local_work([sums, sums])
    assert not holds_sums(shard(torch.ones(4), mesh, [Replicate()], device))
    assert not holds_sums(local)


def test_without_torch_distributed_everything_else_works() -> None:
    """A torch that was built without it has no DTensor; ours must not look for one."""
    code = """
import sys, torch
torch.distributed.is_available = lambda: False
sys.modules["torch.distributed.tensor"] = None  # importing it raises ImportError
from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from swapopt_torch.local_tensor import is_dtensor, layout_of, local_of
parameter = torch.nn.Parameter(torch.ones(4))
assert not is_dtensor(parameter) and local_of(parameter) is parameter and layout_of(parameter) == ()
optimizer = swap_optimizer(torch.optim.AdamW([parameter], foreach=False))
parameter.grad = torch.ones(4)
optimizer.step()
assert optimizer.state[parameter]["exp_avg"].ne(0).all()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)
