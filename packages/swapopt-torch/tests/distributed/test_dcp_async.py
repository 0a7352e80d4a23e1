"""torch's async_save writes the values at save time while training goes on (C2)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import (
    STEPS,
    SWAPPED,
    assert_same_job,
    load,
    load_states,
    make_heir,
    make_job,
    place,
    save,
    states_of,
)
from pool import Rank, RankPool
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

SECONDS = 60.0


class GatedWriter(dcp.FileSystemWriter):
    """Writes nothing before its gate, a named pipe, is opened from the other side."""

    def __init__(self, path: Path, gate: Path) -> None:
        super().__init__(path)
        self._gate = gate

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        with self._gate.open("rb"):
            return super().write_data(plan, planner)


def _gate(rank: Rank, folder: Path) -> Path:
    gate = folder / f"gate {rank.index}"
    gate.unlink(missing_ok=True)
    os.mkfifo(gate)
    return gate


def _finish(future: Future[Any], gate: Path) -> None:
    """Let a save that has written nothing so far write, and wait for it."""
    assert not future.done()
    opened = os.open(gate, os.O_RDWR)  # does not wait for the other side, which may have failed
    try:
        future.result(SECONDS)
    finally:
        os.close(opened)


class SnapshotStager(AsyncStager):
    """Copies nothing: what state_dict() of a swapped optimizer returned is a snapshot already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


STAGERS: dict[str, Callable[[], AsyncStager]] = {
    "none": SnapshotStager,
    "torch's default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "blocking": BlockingAsyncStager,
}


@contextmanager
def _checkpoint_process() -> Iterator[None]:
    """Let a rank have a process of its own for checkpoints, and end that at the end."""
    rank_process = multiprocessing.current_process()
    rank_process.daemon = False  # those that are must not have children
    try:
        yield
    finally:
        _async_process_executor._CHECKPOINT_PROCESS = None  # it ends its process when it goes
        rank_process.daemon = True


def _train_meanwhile(
    rank: Rank, optimizer: str, stager: str, checkpointer: AsyncCheckpointerType, folder: Path
) -> None:
    where = place(rank, "sharded")
    assert where is not None
    native = make_job(where, optimizer, "native")
    native.train(range(STEPS))
    trained = {variant: make_job(where, optimizer, variant) for variant in SWAPPED}
    in_process = checkpointer is AsyncCheckpointerType.PROCESS
    with _checkpoint_process() if in_process else nullcontext():
        for variant, job in trained.items():
            job.train(range(STEPS))
            gate = _gate(rank, folder)
            future = dcp.async_save(
                states_of(job),
                storage_writer=GatedWriter(folder / variant, gate),
                async_stager=STAGERS[stager](),
                async_checkpointer_type=checkpointer,
            )
            job.train(range(STEPS, 2 * STEPS))
            _finish(future, gate)
            heir = make_heir(native, optimizer, variant)
            load_states(heir, folder / variant)
            assert_same_job(heir, native)
    native.train(range(STEPS, 2 * STEPS))
    for job in trained.values():
        assert_same_job(job, native)


@pytest.mark.parametrize(
    ("optimizer", "stager", "checkpointer"),
    [
        ("loop", "none", AsyncCheckpointerType.THREAD),
        ("hyper", "none", AsyncCheckpointerType.THREAD),
        ("loop", "torch's default", AsyncCheckpointerType.THREAD),
        ("loop", "blocking", AsyncCheckpointerType.THREAD),
        ("loop", "none", AsyncCheckpointerType.PROCESS),
    ],
)
def test_c2_training_goes_on_while_a_snapshot_is_written(
    two_ranks: RankPool,
    tmp_path: Path,
    optimizer: str,
    stager: str,
    checkpointer: AsyncCheckpointerType,
) -> None:
    two_ranks.run(_train_meanwhile, optimizer, stager, checkpointer, tmp_path)


def _load_meanwhile(rank: Rank, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    group = dist.new_group(backend="cpu:gloo")  # two conversations at a time need two groups
    native = make_job(where, "loop", "native")
    native.train(range(1))
    save(native, folder / "older")
    older = make_heir(native, "loop", "native")
    load_states(older, folder / "older")
    native.train(range(1, STEPS))
    for variant in SWAPPED:
        job = make_job(where, "loop", variant)
        job.train(range(STEPS))
        gate = _gate(rank, folder)
        future = dcp.async_save(
            states_of(job),
            storage_writer=GatedWriter(folder / variant, gate),
            async_stager=SnapshotStager(),
            process_group=group,
        )
        load(job, folder / "older")
        assert_same_job(job, older)
        _finish(future, gate)
        heir = make_heir(native, "loop", variant)
        load_states(heir, folder / variant)
        assert_same_job(heir, native)
    dist.destroy_process_group(group)


def test_c2_loading_goes_on_while_a_snapshot_is_written(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """A checkpoint is read in place, into a second snapshot: the first one keeps its values."""
    two_ranks.run(_load_meanwhile, tmp_path)
