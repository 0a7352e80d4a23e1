"""What a process group refuses, and what it does when members are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Rank, RankFailure, RankPool


def on(rank: Rank, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=rank.device)


def released(rank: Rank) -> torch.Tensor:
    tensor = on(rank, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: list[tuple[Callable[[Rank], object], type[Exception], str]] = [
    (lambda r: dist.all_reduce(on(r, 4, 6).t()), ValueError, "contiguous"),
    (lambda r: dist.all_reduce(on(r, 4, 6)[:, :3]), ValueError, "contiguous"),
    (lambda r: dist.all_reduce(released(r)), RuntimeError, "was released"),
    (
        lambda r: dist.all_gather_into_tensor(on(r, 4 * r.size + 1), on(r, 4)),
        ValueError,
        r"expected \d times 4 elements, found",
    ),
    (
        lambda r: dist.all_gather_into_tensor(on(r, 4 * r.size, dtype=torch.int32), on(r, 4)),
        ValueError,
        "one dtype",
    ),
    (lambda r: dist.all_gather([on(r, 4)], on(r, 4)), ValueError, "found 1"),
    (
        lambda r: dist.all_gather([torch.zeros(4)] * r.size, on(r, 4)),
        ValueError,
        "found one on cpu",
    ),
    (
        lambda r: dist.reduce_scatter_tensor(on(r, 3), on(r, 3 * r.size + 1)),
        ValueError,
        r"expected \d times 3 elements",
    ),
    (
        lambda r: dist.all_to_all_single(on(r, r.size + 1), on(r, r.size + 1)),
        ValueError,
        "divides by the",
    ),
    (
        lambda r: dist.all_to_all_single(on(r, 4), on(r, 4), [1] * r.size, [2] * r.size),
        ValueError,
        "add up to the first dimension",
    ),
]


def refuses_and_goes_on(rank: Rank) -> None:
    """Nothing is sent by what is refused: the next collective is in step on all ranks."""
    for function, error, message in REFUSED:
        with pytest.raises(error, match=message):
            function(rank)
    tensor = torch.ones(4, device=rank.device)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rank.size] * 4


def test_wrong_arguments_are_refused_before_anything_is_sent(two_ranks: RankPool) -> None:
    two_ranks.run(refuses_and_goes_on)


# A collective is two messages of gloo's. The first to time out closes the connection of the other.
TIMED_OUT = r"(?i)timed out|application timeout"


def times_out(rank: Rank) -> None:
    # Long enough for the members to meet on a busy machine: that is under the same timeout.
    group = dist.new_group(timeout=timedelta(seconds=5))
    if rank.index == 0:
        work = dist.all_reduce(torch.ones(4, device=rank.device), group=group, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match=TIMED_OUT):
            work.wait()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match=TIMED_OUT):
            work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_member_that_does_not_come_is_a_timeout(two_ranks: RankPool) -> None:
    two_ranks.run(times_out)


def forgets(rank: Rank) -> None:
    """Works that nobody waited for go with their group."""
    group = dist.new_group()
    works = [dist.all_reduce(torch.ones(4, device=rank.device), group=group, async_op=True)]
    if rank.index == 0:  # a message that nobody receives
        works.append(dist.isend(torch.ones(4, device=rank.device), 1, group=group))
    dist.destroy_process_group(group)
    del group
    for work in works:
        assert work is not None
        with pytest.raises(RuntimeError, match="was destroyed before anyone waited"):
            work.wait()
    torch.virtual.synchronize()


def test_works_of_a_destroyed_group_are_errors(two_ranks: RankPool) -> None:
    two_ranks.run(forgets)


def dies(rank: Rank, report: str) -> None:
    tensor = torch.ones(4, device=rank.device)
    if rank.index == 1:
        os._exit(3)
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        Path(report).write_text(str(error))
    time.sleep(10)


def test_a_member_that_dies_fails_the_others(two_ranks: RankPool, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankFailure, match="rank 1: its process ended"):
        two_ranks.run(dies, str(report))
    assert re.search("Connection (closed|reset) by peer", report.read_text())


LEAVES = """
import sys
import torch
import torch.distributed as dist
from swapopt_torch import virtual

rank, store = int(sys.argv[1]), sys.argv[2]
virtual.enable(device_count=2)
torch.virtual.set_device(rank)
dist.init_process_group(store=dist.FileStore(store, 2), rank=rank, world_size=2,
                        device_id=torch.device("virtual", rank))
dist.new_group([0])  # only one of them is in it
dist.barrier()
tensor = torch.ones(4, device="virtual")
work = dist.all_reduce(tensor, async_op=True)
future = dist.all_reduce(tensor, async_op=True).get_future()
work.wait()
future.wait()
unwaited = dist.all_reduce(torch.ones(4, device="virtual"), async_op=True)
print(tensor.tolist())
"""


def test_a_program_names_no_backend_and_ends_without_destroying_its_group(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        printed, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert printed == "[4.0, 4.0, 4.0, 4.0]\n"
