"""Models in many layouts, saved with torch.distributed.checkpoint and resumed in other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel import local
from pool import Rank
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual
from swapopt_torch.optim import AdamW as HyperAdamW
from training import allocated, assert_same_bits

Parameters = list[dict[str, Any]]

STEPS = 3
SWAPPED = ("packed", "per_tensor")
# Shards of [8, 128] on three ranks swap, the last of them included.
MIN_NUMEL = 256
WIDTH, HIDDEN = 40, 132

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "loop": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=False),
    "fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True, amsgrad=True),
    "hyper": lambda groups: HyperAdamW(groups, lr=1e-2),
}
CONFIGS: dict[str, SwapOptimizerConfig | None] = {
    "native": None,
    # Everything swaps here, so that whatever moves is a swapped state.
    "packed": SwapOptimizerConfig(swap_times=3, packed_swap=True, min_numel=1),
    "per_tensor": SwapOptimizerConfig(swap_times=3, packed_swap=False, min_numel=MIN_NUMEL),
}


class Model(nn.Module):
    """Its shards are even, uneven, and (the last of four, of nine rows) empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.eight = nn.Parameter(torch.randn(8, 128) / 8)
        self.nine = nn.Parameter(torch.randn(9, 100) / 9)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.down(nn.functional.gelu(self.up(inputs))) * self.frozen
        eight, nine = hidden[:, :8] @ self.eight, hidden[:, :9] @ self.nine
        return hidden.square().mean() + eight.square().mean() + nine.square().mean()


@dataclass
class Place:
    """Where a model is on one rank, and how it is laid out over ranks.

    Attributes:
        device: this rank's device.
        mesh: over the ranks that take part; None for a single process.
        layout: a key of `MESH_SHAPES`, "three of four" or "alone".
    """

    device: torch.device
    mesh: DeviceMesh | None
    layout: str

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that save and load together; None for all there are."""
        return self.mesh.get_group() if self.mesh and self.layout == "three of four" else None

    @property
    def data_index(self) -> int:
        """Which part of the data this rank trains on."""
        if self.mesh is None:
            return 0
        tensor_parallel = self.layout == "tensor parallel"
        return self.mesh["data"].get_local_rank() if tensor_parallel else self.mesh.get_rank()

    def lay_out(self, model: Model) -> nn.Module:
        """Return a model that is on the device as it is trained."""
        if self.mesh is None:
            return model
        if self.layout == "replicated":
            return DDP(model)
        mesh = self.mesh
        if self.layout == "tensor parallel":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            mesh = mesh["data"]
        fully_shard(model, mesh=mesh)
        return model


MESH_SHAPES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "sharded": ((), None),
    "replicated": ((), None),
    "sharded in replicas": ((2, 2), ("replica", "shard")),
    "tensor parallel": ((2, 2), ("data", "tensor")),
}


def place(rank: Rank, layout: str) -> Place | None:
    """Return where a model is on a rank in a layout; None on a rank that takes no part in it."""
    if layout == "alone":
        return Place(rank.device, None, layout)
    if layout == "three of four":
        mesh = DeviceMesh(rank.device.type, [0, 1, 2])
        return Place(rank.device, mesh, layout) if rank.index < 3 else None
    shape, names = MESH_SHAPES[layout]
    return Place(rank.device, rank.mesh(*shape, names=names), layout)


@dataclass
class Job:
    """A model, an optimizer, and the place they are at."""

    place: Place
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step * 10 + self.place.data_index)
            inputs = torch.randn(8, WIDTH, generator=generator).to(self.place.device)
            self.model(inputs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's parts of parameters and states, by name."""
        return {name: local(value).cpu().clone() for name, value in self._named()}

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and states as a single process has them; every rank must ask."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()
            for name, value in self._named()
        }

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        module = self.model.module if isinstance(self.model, DDP) else self.model
        for name, parameter in module.named_parameters():
            yield name, parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value

    def settings(self) -> list[dict[str, Any]]:
        """Return the parameter groups without their parameters."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]


def make_job(where: Place, optimizer: str, variant: str, seed: int = 0) -> Job:
    """Build a job; the seed says what the parameters are before anything is loaded."""
    torch.manual_seed(seed)
    model = where.lay_out(Model().to(where.device))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    made = OPTIMIZERS[optimizer](
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
    )
    config = CONFIGS[variant]
    return Job(where, model, made if config is None else swap_optimizer(made, config))


def make_heir(job: Job, optimizer: str, variant: str) -> Job:
    """Build a job with another one's parameters and an optimizer that has not stepped."""
    heir = make_job(job.place, optimizer, variant, seed=1)
    heir.model.load_state_dict(job.model.state_dict())
    return heir


def assert_same_job(found: Job, expected: Job) -> None:
    """Parameters, states and settings on this rank are equal bit for bit."""
    assert_same_tensors(found, expected)
    assert found.settings() == expected.settings()


def assert_same_tensors(found: Job, expected: Job) -> None:
    """Parameters and states on this rank are equal bit for bit, and finite."""
    ours, theirs = found.tensors(), expected.tensors()
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, value in ours.items():
        assert value.isfinite().all(), f"{name} is not finite"
        assert_same_bits(value, theirs[name], name)


def states_of(job: Job) -> dict[str, Any]:
    """Return the optimizer's part of a checkpoint, by the names of the parameters."""
    return {"optimizer": get_optimizer_state_dict(job.model, job.optimizer)}


def save(job: Job, folder: Path) -> None:
    """Save model and optimizer; a single process does so without a process group."""
    alone, group = job.place.mesh is None, job.place.group
    state = {"model": get_model_state_dict(job.model), **states_of(job)}
    dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=alone)


def load(job: Job, folder: Path) -> None:
    """Load what `save` saved in whatever layout."""
    read = {"model": get_model_state_dict(job.model), **states_of(job)}
    _read(job, read, folder)
    set_model_state_dict(job.model, read["model"])
    set_optimizer_state_dict(job.model, job.optimizer, read["optimizer"])


def load_states(job: Job, folder: Path) -> None:
    """Load the optimizer's part of a checkpoint only."""
    read = states_of(job)
    _read(job, read, folder)
    set_optimizer_state_dict(job.model, job.optimizer, read["optimizer"])


def _read(job: Job, into: dict[str, Any], folder: Path) -> None:
    alone, group = job.place.mesh is None, job.place.group
    dcp.load(into, checkpoint_id=folder, process_group=group, no_dist=alone)


@dataclass
class Moves:
    """What happened on a device meanwhile.

    Attributes:
        peak_nbytes: most device memory beyond what was allocated before.
        h2d_nbytes, d2h_nbytes: bytes copied; zero where the device is no virtual one.
    """

    peak_nbytes: int = 0
    h2d_nbytes: int = 0
    d2h_nbytes: int = 0


@contextmanager
def moves_on(device: torch.device) -> Iterator[Moves]:
    """Watch a device; what is yielded is filled in at the end."""
    module = torch.get_device_module(device)
    before = allocated(device)
    module.reset_peak_memory_stats(device)
    if device.type == "virtual":
        virtual.clear_timeline()
    moves = Moves()
    yield moves
    module.synchronize(device)
    moves.peak_nbytes = module.max_memory_allocated(device) - before
    if device.type == "virtual":
        rows = virtual.timeline()
        moves.h2d_nbytes = sum(row.nbytes for row in rows if row.lane == "h2d")
        moves.d2h_nbytes = sum(row.nbytes for row in rows if row.lane == "d2h")
