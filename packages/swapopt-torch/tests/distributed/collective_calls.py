"""Every collective as a function of the device: run on the CPU (gloo) and on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from pool import Rank

Call: TypeAlias = Callable[[Rank, torch.device], list[torch.Tensor]]
CALLS: dict[str, Call] = {}

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
BITWISE = {
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def call(function: Call) -> Call:
    CALLS[function.__name__] = function
    return function


def values(rank: Rank, device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return values whose sum depends on the order of summing; others on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank.index)
    return torch.randn(*shape, generator=generator).to(device)


def nothing(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.full(shape, -7.0, device=device)


def integers(rank: Rank, device: torch.device, numel: int) -> torch.Tensor:
    return (torch.arange(numel, dtype=torch.int32) * 37 + 11 * rank.index).to(device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes: NaN equals NaN, and 0.0 is not -0.0."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


@call
def broadcast(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    tensors = [values(rank, device, 3, 5, seed=root) for root in range(rank.size)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root)
    return tensors


@call
def all_reduce(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for reduction in REDUCTIONS.values():
        tensor = values(rank, device, 1001)
        dist.all_reduce(tensor, reduction)
        results.append(tensor)
    for reduction in BITWISE.values():
        tensor = integers(rank, device, 9)
        dist.all_reduce(tensor, reduction)
        results.append(tensor)
    return results


@call
def reduce(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for root in range(rank.size):
        for reduction in REDUCTIONS.values():
            tensor = values(rank, device, 101, seed=root)
            dist.reduce(tensor, root, reduction)
            if root == rank.index:  # elsewhere the result is not defined
                results.append(tensor)
    return results


@call
def reduce_scatter(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for reduction in REDUCTIONS.values():
        output = nothing(device, 7, 3)
        parts = [values(rank, device, 7, 3, seed=seed) for seed in range(rank.size)]
        dist.reduce_scatter(output, parts, reduction)
        results.append(output)
    return results


@call
def reduce_scatter_tensor(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for reduction in REDUCTIONS.values():
        output = nothing(device, 5, 3)
        dist.reduce_scatter_tensor(output, values(rank, device, 5 * rank.size, 3), reduction)
        results.append(output)
    return results


@call
def all_gather(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    outputs = [nothing(device, 2, 3) for _ in range(rank.size)]
    dist.all_gather(outputs, values(rank, device, 2, 3))
    return outputs


@call
def all_gather_into_tensor(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    output = nothing(device, rank.size * 4, 3)
    dist.all_gather_into_tensor(output, values(rank, device, 4, 3))
    in_place = nothing(device, rank.size * 6)
    own = in_place[6 * rank.index : 6 * rank.index + 6]
    own.copy_(values(rank, device, 6, seed=1))
    dist.all_gather_into_tensor(in_place, own)
    return [output, in_place]


@call
def gather(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for root in range(rank.size):
        here = root == rank.index
        outputs = [nothing(device, 3) for _ in range(rank.size)] if here else None
        dist.gather(values(rank, device, 3, seed=root), outputs, dst=root)
        results += outputs or []
    return results


@call
def scatter(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    for root in range(rank.size):
        here = root == rank.index
        parts = [values(rank, device, 3, seed=seed) for seed in range(rank.size)] if here else None
        results.append(nothing(device, 3))
        dist.scatter(results[-1], parts, src=root)
    return results


@call
def all_to_all(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    outputs = [nothing(device, 2) for _ in range(rank.size)]
    dist.all_to_all(outputs, [values(rank, device, 2, seed=seed) for seed in range(rank.size)])
    return outputs


@call
def all_to_all_single(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    even = nothing(device, rank.size * 2, 3)
    dist.all_to_all_single(even, values(rank, device, rank.size * 2, 3))
    # To the member i go i rows, from all alike; so the first gets none.
    sent = list(range(rank.size))
    received = [rank.index] * rank.size
    uneven = nothing(device, sum(received), 3)
    dist.all_to_all_single(uneven, values(rank, device, sum(sent), 3), received, sent)
    return [even, uneven]


@call
def coalesced(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    sizes = (5, 1, 64)
    reduced = [values(rank, device, size) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in reduced:
            dist.all_reduce(tensor)
    manager.wait()
    gathered = [nothing(device, rank.size * size) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor, size in zip(gathered, sizes, strict=True):
            dist.all_gather_into_tensor(tensor, values(rank, device, size))
    manager.wait()
    scattered = [nothing(device, size) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor, size in zip(scattered, sizes, strict=True):
            dist.reduce_scatter_tensor(tensor, values(rank, device, rank.size * size))
    manager.wait()
    return [*reduced, *gathered, *scattered]


@call
def all_gather_coalesced(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    inputs = [values(rank, device, 3), values(rank, device, 2, 2)]
    outputs = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(rank.size)]
    dist.all_gather_coalesced(outputs, inputs)
    return [tensor for tensors in outputs for tensor in tensors]


@call
def messages(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """A ring of blocking messages, the even ranks sending first."""
    received = nothing(device, 4)
    right, left = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    if rank.index % 2 == 0:
        dist.send(values(rank, device, 4), right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(values(rank, device, 4), right)
    return [received]


@call
def asynchronous_messages(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """Messages to everyone, of two tags, received in the other order than they were sent."""
    others = [index for index in range(rank.size) if index != rank.index]
    received = {(peer, tag): nothing(device, 4) for peer in others for tag in (0, 3)}
    works = [dist.irecv(tensor, peer, tag=tag) for (peer, tag), tensor in received.items()]
    for peer in reversed(others):
        for tag in (3, 0):
            sent = values(rank, device, 4, seed=10 * tag + peer)
            works.append(dist.isend(sent, peer, tag=tag))
    for work in reversed(works):
        work.wait()
    return list(received.values())


@call
def batched_messages(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    others = [index for index in range(rank.size) if index != rank.index]
    received = [nothing(device, 4) for _ in others]
    operations = [
        dist.P2POp(dist.irecv, to, peer) for peer, to in zip(others, received, strict=True)
    ]
    operations += [dist.P2POp(dist.isend, values(rank, device, 4, seed=p), p) for p in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@call
def message_from_anyone(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    if rank.index > 0:
        dist.send(values(rank, device, 4), 0)
        return []
    received: dict[int, torch.Tensor] = {}
    for _ in range(rank.size - 1):
        tensor = nothing(device, 4)
        received[dist.recv(tensor)] = tensor
    assert sorted(received) == list(range(1, rank.size))
    return [tensor for _, tensor in sorted(received.items())]


@call
def functional_collectives(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    group = dist.group.WORLD
    rows = values(rank, device, rank.size * 2, 3)
    return [
        functional.all_reduce(rows, "sum", group),
        functional.all_reduce(rows, "avg", group),
        functional.all_gather_tensor(rows, 1, group),
        functional.reduce_scatter_tensor(rows, "avg", 0, group),
        functional.broadcast(rows, rank.size - 1, group),
        functional.all_to_all_single(rows, None, None, group),
        *functional.all_reduce_coalesced([rows, 2 * rows], "sum", group),
        *functional.all_gather_into_tensor_coalesced([rows, 2 * rows], group),
        *functional.reduce_scatter_tensor_coalesced(
            [rows, 2 * rows], "sum", scatter_dim=[0, 0], group=group
        ),
    ]


@call
def differentiable_collectives(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """Results and gradients of collectives that autograd goes through."""
    results = []
    for apply in _differentiable(rank):
        leaf = values(rank, device, rank.size * 2, 3).requires_grad_()
        result = apply(leaf)
        (result * values(rank, device, *result.shape, seed=1)).sum().backward()
        assert leaf.grad is not None
        results += [result, leaf.grad]
    return results


def _differentiable(rank: Rank) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    yield differentiable.all_reduce
    yield lambda leaf: torch.cat(differentiable.all_gather(leaf))
    yield lambda leaf: differentiable.broadcast(leaf, 0)
    yield lambda leaf: differentiable.reduce_scatter(
        torch.empty_like(leaf[:2]), [*leaf.contiguous().chunk(rank.size)]
    )
    yield lambda leaf: differentiable.all_to_all_single(torch.empty_like(leaf), leaf)
    yield lambda leaf: functional.all_to_all_single_autograd(leaf, None, None, dist.group.WORLD)
    yield lambda leaf: functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    yield lambda leaf: functional.reduce_scatter_tensor_autograd(leaf, "sum", 0, dist.group.WORLD)


@call
def subgroups(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    results = []
    lonely, groups = dist.new_subgroups(group_size=1)
    for group in (lonely, dist.new_group(list(range(rank.size - 1)))):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        tensor = values(rank, device, 9)
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    for group in groups:
        if group is not lonely and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return results
