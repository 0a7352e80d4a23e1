"""The collectives of the virtual accelerator against gloo's on the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collective_calls import CALLS, bits
from pool import Rank, RankPool
from torch.distributed.device_mesh import init_device_mesh

BOTH_SIZES = pytest.mark.parametrize("ranks", [2, 4], indirect=True)


def same_as_on_the_cpu(rank: Rank) -> list[str]:
    """Run every collective on both; return those that differ."""
    different = []
    for name, call in CALLS.items():
        expected = call(rank, torch.device("cpu"))
        found = call(rank, rank.device)
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert one.device == rank.device, name
            if not torch.equal(bits(one), bits(other)):
                different.append(name)
    return different


@BOTH_SIZES
def test_every_collective_gives_the_bits_of_the_cpu(ranks: RankPool) -> None:
    assert ranks.run(same_as_on_the_cpu) == [[]] * ranks.size


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def random_bytes_as(dtype: torch.dtype, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (64,), dtype=torch.uint8, generator=generator).view(dtype)


def moves_every_dtype(rank: Rank) -> None:
    """Also those that gloo does not know: nothing but bytes is moved."""
    peer = rank.index ^ 1
    for dtype in DTYPES:
        expected = [random_bytes_as(dtype, index) for index in range(rank.size)]
        own = expected[rank.index].to(rank.device)
        gathered = torch.empty_like(own).repeat(rank.size)
        dist.all_gather_into_tensor(gathered, own)
        exchanged = torch.empty_like(own)
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, exchanged, peer), dist.P2POp(dist.isend, own, peer)]
        )
        for request in requests:
            request.wait()
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(bits(gathered), bits(torch.cat(expected))), dtype
        assert torch.equal(bits(exchanged), bits(expected[peer])), dtype
        assert torch.equal(bits(first), bits(expected[0])), dtype


def reduces_the_dtypes_that_gloo_reduces(rank: Rank) -> None:
    for dtype in DTYPES:
        own = random_bytes_as(dtype, rank.index)
        expected, found = own.clone(), own.to(rank.device)
        reduction = dist.ReduceOp.MAX if dtype is torch.bool else dist.ReduceOp.SUM
        try:
            dist.all_reduce(expected, reduction)
        except RuntimeError as refusal:
            with pytest.raises(RuntimeError, match=str(refusal)):
                dist.all_reduce(found, reduction)
            continue
        dist.all_reduce(found, reduction)
        assert torch.equal(bits(found), bits(expected)), dtype


def gathers_different_amounts(rank: Rank) -> None:
    """As NCCL does, and gloo does not; one of them is empty."""
    expected = [torch.arange(3.0 * index) + index for index in range(rank.size)]
    found = [torch.empty_like(tensor, device=rank.device) for tensor in expected]
    dist.all_gather(found, expected[rank.index].to(rank.device))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


def multiplies_before_the_sum(rank: Rank) -> None:
    """PREMUL_SUM, which gloo has not, with a number and with a tensor on the device."""
    for factor in (0.5, torch.full((1,), 0.5, device=rank.device)):
        tensor = torch.full((5,), rank.index + 1.0, device=rank.device)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        assert tensor.tolist() == [rank.size * (rank.size + 1) / 4] * 5


def moves_objects(rank: Rank) -> None:
    group = dist.new_group(backend="vccl")  # no gloo for the CPU: objects travel as device tensors
    objects: list[object] = [None] * rank.size
    dist.all_gather_object(objects, {"rank": rank.index}, group=group)
    assert objects == [{"rank": index} for index in range(rank.size)]
    sent: list[object] = [("from", 0) if rank.index == 0 else None]
    dist.broadcast_object_list(sent, 0, group=group)
    assert sent == [("from", 0)]
    dist.destroy_process_group(group)


def splits_for_a_mesh(rank: Rank) -> None:
    """With a bound device, as ``init_process_group(device_id=...)`` binds one, a mesh is split."""
    world = dist.group.WORLD
    assert world is not None
    before = world.bound_device_id
    world.bound_device_id = rank.device
    try:
        mesh = init_device_mesh(rank.device.type, (rank.size // 2, 2), mesh_dim_names=("a", "b"))
    finally:
        world.bound_device_id = before
    for name in ("a", "b"):
        group = mesh.get_group(name)
        members = dist.get_process_group_ranks(group)
        tensor = torch.full((3,), float(rank.index), device=rank.device)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(sum(members))] * 3


@BOTH_SIZES
@pytest.mark.parametrize(
    "case",
    [
        splits_for_a_mesh,
        moves_every_dtype,
        reduces_the_dtypes_that_gloo_reduces,
        gathers_different_amounts,
        multiplies_before_the_sum,
        moves_objects,
    ],
)
def test_beyond_gloo(ranks: RankPool, case: Callable[[Rank], None]) -> None:
    ranks.run(case)
