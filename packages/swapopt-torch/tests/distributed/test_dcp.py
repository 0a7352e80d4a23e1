"""Checkpoints of torch.distributed.checkpoint: saved in one layout, resumed in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import (
    OPTIMIZERS,
    STEPS,
    SWAPPED,
    Job,
    Moves,
    assert_same_job,
    load,
    load_states,
    make_heir,
    make_job,
    moves_on,
    place,
    save,
    states_of,
)
from parallel import local
from pool import Rank, RankPool
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from swapopt_torch import TorchSwapOptimizer
from training import assert_same_bits

GUIDE = Path(__file__).parents[4] / "docs" / "checkpoints.md"
# Into native, from native, and from one kind of movement into the other.
ORIGINS = {"packed": "native", "per_tensor": "packed", "native": "per_tensor"}

# How many ranks each layout takes.
LAYOUTS = {
    "sharded on 4": 4,
    "sharded on 2": 2,
    "sharded in replicas": 4,
    "tensor parallel": 4,
    "three of four": 4,
    "replicated on 2": 2,
    "alone": 1,
}
RELAYS = {
    "loop": ["sharded on 4", "sharded on 2", "sharded on 4", "alone"],
    "fused": ["sharded in replicas", "alone", "replicated on 2", "tensor parallel"],
    "hyper": ["tensor parallel", "sharded on 2", "alone", "sharded in replicas"],
    "C5": ["three of four", "sharded on 2", "three of four"],
}

Whole = dict[str, torch.Tensor]


def _leg(
    rank: Rank, layout: str, optimizer: str, source: Path | None, target: Path, steps: range
) -> tuple[Whole, Whole] | None:
    """Resume natively and swapped from each other's checkpoints, train alike, and save all.

    Returns:
        Parameters and states of the native one as they were loaded and as they were saved; None
        on a rank that takes no part.
    """
    where = place(rank, layout.partition(" on ")[0])
    if where is None:
        return None
    native = make_job(where, optimizer, "native")
    resumed = {variant: make_heir(native, optimizer, variant) for variant in ORIGINS}
    if source is not None:
        load(native, source / "native")
        for variant, job in resumed.items():
            load(job, source / ORIGINS[variant])
            assert_same_job(job, native)
    loaded = native.whole_tensors()
    native.train(steps)
    save(native, target / "native")
    for variant, job in resumed.items():
        job.train(steps)
        assert_same_job(job, native)
        if variant != "native":
            save(job, target / variant)
    return loaded, native.whole_tensors()


@pytest.mark.parametrize("relay", list(RELAYS))
def test_a_checkpoint_is_resumed_in_other_layouts(
    two_ranks: RankPool,
    four_ranks: RankPool,
    device: torch.device,
    tmp_path: Path,
    relay: str,
) -> None:
    """What one layout saved, the next one resumes, natively or not, and all go on alike."""
    source, saved = None, None
    optimizer = relay if relay in OPTIMIZERS else "loop"
    for number, layout in enumerate(RELAYS[relay]):
        target = tmp_path / str(number)
        steps = range(number * STEPS, (number + 1) * STEPS)
        arguments = (layout, optimizer, source, target, steps)
        if layout == "alone":
            # torch's writer waits for copies of the current device only.
            with torch.get_device_module(device).device(device):
                outcome = _leg(Rank(0, 1, device), *arguments)
        else:
            pool = {2: two_ranks, 4: four_ranks}[LAYOUTS[layout]]
            outcome = pool.run(_leg, *arguments)[0]
        assert outcome is not None
        if saved is not None:
            assert set(outcome[0]) == set(saved)
            for name, value in outcome[0].items():
                assert_same_bits(value, saved[name], name)
        source, saved = target, outcome[1]


def _uneven(rank: Rank) -> tuple[int, ...] | None:
    """Return this rank's part of [8, 128] over three ranks, once it is known to swap."""
    where = place(rank, "three of four")
    if where is None:
        return None
    job = make_job(where, "loop", "per_tensor")
    job.train(range(1))
    assert isinstance(job.optimizer, TorchSwapOptimizer)
    moment = job.optimizer.state[job.model.get_parameter("eight")]["exp_avg"]
    assert moment.shape == (8, 128)
    assert moment.device.type == "cpu"
    return tuple(moment.to_local().shape)


def test_c5_shards_of_three_ranks_are_uneven(four_ranks: RankPool) -> None:
    """Without this the relay of that name would say nothing about uneven shards."""
    assert four_ranks.run(_uneven) == [(3, 128), (3, 128), (2, 128), None]


def _check_moves(rank: Rank, optimizer: str, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    native, job = make_job(where, optimizer, "native"), make_job(where, optimizer, "packed")
    native.train(range(STEPS))
    job.train(range(STEPS))
    with moves_on(rank.device) as natively:
        dcp.save(states_of(native), checkpoint_id=folder / "native")
    with moves_on(rank.device) as saving:
        dcp.save(states_of(job), checkpoint_id=folder / "packed")
    job.train(range(STEPS, 2 * STEPS))
    addresses = _addresses(job)
    with moves_on(rank.device) as loading:
        load_states(job, folder / "packed")
    assert saving == loading == Moves()
    assert _addresses(job) == addresses, "the states were copied on the host"
    if rank.device.type == "virtual":
        assert natively.d2h_nbytes > 0, "the timeline would not show a state that moves"
    job.model.load_state_dict(native.model.state_dict())
    assert_same_job(job, native)


def _addresses(job: Job) -> list[int]:
    states = job.optimizer.state.values()
    return [local(state["exp_avg"]).data_ptr() for state in states]


@pytest.mark.parametrize("optimizer", ["loop", "hyper"])
def test_c6_m3_saving_and_loading_move_nothing(
    two_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    two_ranks.run(_check_moves, optimizer, tmp_path)


def _make_ready(rank: Rank) -> None:
    """torch makes states exist with a step of zero gradients: batch by batch, as every step."""
    where = place(rank, "sharded")
    assert where is not None
    peaks = {}
    for variant in ("native", *SWAPPED):
        job = make_job(where, "loop", variant)
        before = job.tensors()
        with moves_on(rank.device) as moves:
            get_optimizer_state_dict(job.model, job.optimizer)
        peaks[variant] = moves.peak_nbytes
        after = job.tensors()
        assert len(after) > len(before)
        for name, value in before.items():
            assert_same_bits(after[name], value, name)
        if isinstance(job.optimizer, TorchSwapOptimizer):
            stats = job.optimizer.swap_stats()
            most = peaks["native"] - stats.swapped_nbytes + stats.bound_nbytes
            assert peaks[variant] <= most, f"{variant}: {peaks[variant]:,}, at most {most:,}"
            assert peaks[variant] < peaks["native"]


def test_m3_making_states_exist_stays_within_the_bound(two_ranks: RankPool) -> None:
    two_ranks.run(_make_ready)


def _save_itself(rank: Rank, optimizer: str, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    for variant in ("native", *SWAPPED):
        job = make_job(where, optimizer, variant)
        job.train(range(STEPS))
        save(job, folder / f"{variant} by name")
        dcp.save({"optimizer": job.optimizer}, checkpoint_id=folder / variant)


def _load_itself(rank: Rank, optimizer: str, folder: Path) -> None:
    where = place(rank, "sharded")
    assert where is not None
    native = make_job(where, optimizer, "native")
    load(native, folder / "native by name")
    for variant, origin in ORIGINS.items():
        job = make_heir(native, optimizer, variant)
        job.train(range(1))  # states to read into; by name, torch would make them
        job.model.load_state_dict(native.model.state_dict())
        with moves_on(rank.device) as moves:
            dcp.load({"optimizer": job.optimizer}, checkpoint_id=folder / origin)
        if variant == "packed" and optimizer != "fused":
            assert moves == Moves()
        assert_same_job(job, native)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_optimizers_own_state_dict(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """The optimizer itself is handed to torch, which calls state_dict and load_state_dict."""
    four_ranks.run(_save_itself, optimizer, tmp_path)
    two_ranks.run(_load_itself, optimizer, tmp_path)


def _save_per_rank(rank: Rank, optimizer: str, folder: Path) -> None:
    where = place(rank, "sharded in replicas" if rank.size == 4 else "sharded")
    assert where is not None
    native = make_job(where, optimizer, "native")
    native.train(range(STEPS))
    jobs = {variant: make_heir(native, optimizer, variant) for variant in ORIGINS}
    for variant in ("native", *SWAPPED):
        job = native
        if variant != "native":
            job = make_job(where, optimizer, variant)
            job.train(range(STEPS))
        torch.save(job.optimizer.state_dict(), folder / f"{variant} {rank.index}.pt")
    for variant, job in jobs.items():
        file = folder / f"{ORIGINS[variant]} {rank.index}.pt"
        job.optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        assert_same_job(job, native)
    for job in (native, *jobs.values()):
        job.train(range(STEPS, 2 * STEPS))
        assert_same_job(job, native)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_c4_a_file_for_every_rank(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    """torch.load(weights_only=True) takes DTensors: torch lists them among what is safe."""
    ranks.run(_save_per_rank, optimizer, tmp_path)


def _follow_the_guide(rank: Rank, folder: Path) -> None:
    guide: dict[str, Any] = {}
    section = GUIDE.read_text(encoding="utf-8").partition("\n## Distributed checkpoints\n")[2]
    for block in section.partition("\n## ")[0].split("```python\n")[1:]:
        exec(block.partition("```")[0], guide)
    where = place(rank, "sharded")
    assert where is not None
    job = make_job(where, "loop", "packed")
    job.train(range(STEPS))
    saved = job.tensors()
    guide["save"](job.model, job.optimizer, folder / "saved")
    background = guide["save_in_background"](job.model, job.optimizer, folder / "background")
    job.train(range(STEPS, 2 * STEPS))
    background.result()
    for name in ("saved", "background"):
        heir = make_job(where, "loop", "per_tensor", seed=1)
        guide["load"](heir.model, heir.optimizer, folder / name)
        for key, value in heir.tensors().items():
            assert_same_bits(value, saved[key], f"{key}, {name}")


def test_the_guide_does_what_it_says(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_follow_the_guide, tmp_path)
