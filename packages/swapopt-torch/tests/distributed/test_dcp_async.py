"""torch's async_save writes the values at save time while training goes on (C2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import Job, assert_same_job, load, make_heir, make_job, place, save
from pool import Rank, RankPool
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

STEPS = 3
SWAPPED = ("packed", "per_tensor")
SECONDS = 60.0


class GatedWriter(dcp.FileSystemWriter):
    """Writes nothing before its gate is opened."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        super().__init__(path)
        self._gate = gate

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        assert self._gate.wait(SECONDS), "nobody opened the gate"
        return super().write_data(plan, planner)


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


def _states_of(job: Job) -> dict[str, Any]:
    return {"optimizer": get_optimizer_state_dict(job.model, job.optimizer)}


def _load_states(job: Job, folder: Path) -> None:
    read = _states_of(job)
    dcp.load(read, checkpoint_id=folder)
    set_optimizer_state_dict(job.model, job.optimizer, read["optimizer"])


def _train_meanwhile(rank: Rank, optimizer: str, stager: str, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    native = make_job(where, optimizer, "native")
    native.train(range(STEPS))
    trained = {}
    for variant in SWAPPED:
        job = trained[variant] = make_job(where, optimizer, variant)
        job.train(range(STEPS))
        gate = threading.Event()
        future = dcp.async_save(
            _states_of(job),
            storage_writer=GatedWriter(folder / variant, gate),
            async_stager=STAGERS[stager](),
        )
        job.train(range(STEPS, 2 * STEPS))
        assert not future.done()
        gate.set()
        future.result(SECONDS)
        heir = make_heir(native, optimizer, variant)
        _load_states(heir, folder / variant)
        assert_same_job(heir, native)
    native.train(range(STEPS, 2 * STEPS))
    for job in trained.values():
        assert_same_job(job, native)


@pytest.mark.parametrize("stager", list(STAGERS))
@pytest.mark.parametrize("optimizer", ["loop", "hyper"])
def test_c2_training_goes_on_while_a_snapshot_is_written(
    two_ranks: RankPool, tmp_path: Path, optimizer: str, stager: str
) -> None:
    two_ranks.run(_train_meanwhile, optimizer, stager, tmp_path)


def _load_meanwhile(rank: Rank, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    group = dist.new_group(backend="cpu:gloo")  # two conversations at a time need two groups
    native = make_job(where, "loop", "native")
    native.train(range(1))
    save(native, folder / "older")
    older = make_heir(native, "loop", "native")
    _load_states(older, folder / "older")
    native.train(range(1, STEPS))
    for variant in SWAPPED:
        job = make_job(where, "loop", variant)
        job.train(range(STEPS))
        gate = threading.Event()
        future = dcp.async_save(
            _states_of(job),
            storage_writer=GatedWriter(folder / variant, gate),
            async_stager=SnapshotStager(),
            process_group=group,
        )
        load(job, folder / "older")
        assert_same_job(job, older)
        gate.set()
        future.result(SECONDS)
        heir = make_heir(native, "loop", variant)
        _load_states(heir, folder / variant)
        assert_same_job(heir, native)
    dist.destroy_process_group(group)


def test_c2_loading_goes_on_while_a_snapshot_is_written(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """A checkpoint is read in place, into a second snapshot: the first one keeps its values."""
    two_ranks.run(_load_meanwhile, tmp_path)
