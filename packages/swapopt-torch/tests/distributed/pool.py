"""Several processes, started once, that run one case after the other together.

A case is a function of a test module, called on every rank with the rank's `Rank` first. It asserts
for itself and returns what it likes; `RankPool.run` gives the values of all ranks to the test.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

P = ParamSpec("P")
T = TypeVar("T")

# The process of which the ranks of all pools are forked imports these, once for all of them. The
# first optimizer of a process would import torch._dynamo, the largest.
IMPORTED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
# Takes long where many processes share few cores.
START_SECONDS = 300.0
CASE_SECONDS = 300.0
# How long the others may take to report after one has failed: they tell more than one traceback.
GRACE_SECONDS = 2.0

PROCESS_GROUPS = {"virtual": "cpu:gloo,virtual:vccl", "cuda": "cpu:gloo,cuda:nccl"}


class RankFailure(AssertionError):
    """A case failed on some ranks; the message has what each of them said."""


@dataclass(eq=False)
class Rank:
    """What a case knows of its process.

    Attributes:
        index: its rank.
        size: how many ranks there are.
        device: its device, which is the current one.
    """

    index: int
    size: int
    device: torch.device
    _meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = field(
        default_factory=dict, repr=False
    )

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return the mesh of this shape over all ranks; cases share it."""
        key = (shape or (self.size,), names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, key[0], mesh_dim_names=names)
        return self._meshes[key]


Join = Callable[[int, int, str, str], Rank]


def join(index: int, size: int, device_type: str, store: str) -> Rank:
    """Be a rank with a device, that of its number, and a process group for tensors on it."""
    if device_type == "virtual":
        from swapopt_torch import virtual

        virtual.enable("h200", device_count=size, races="collect", late_copies=True)
    torch.get_device_module(device_type).set_device(index)
    dist.init_process_group(
        PROCESS_GROUPS[device_type],
        store=dist.FileStore(store, size),
        rank=index,
        world_size=size,
    )
    return Rank(index, size, torch.device(device_type, index))


class RankPool:
    """So many processes with one process group between them."""

    def __init__(self, size: int, device_type: str, join: Join = join) -> None:
        """Start nothing yet; ``join`` makes a process one of the ranks."""
        self.size = size
        self._device_type = device_type
        self._join = join
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def run(
        self,
        case: Callable[Concatenate[Rank, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Run a case on every rank and return what each returned, in the order of the ranks.

        Raises:
            RankFailure: it failed on some rank. All processes are ended; the next case gets new
                ones.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((case, arguments, options))
        return cast(list[T], self._collect(CASE_SECONDS))

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        store = Path(tempfile.mkdtemp()) / "store"
        for index in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (self._join, index, self.size, self._device_type, str(store), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect(START_SECONDS)

    def _collect(self, seconds: float) -> list[object]:
        """Wait for one answer of every rank; the first failure shortens the wait."""
        results: dict[int, object] = {}
        failures: dict[int, str] = {}
        waiting = {connection: index for index, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                index = waiting.pop(cast(Connection, ready))
                succeeded, value = _receive(cast(Connection, ready))
                if succeeded:
                    results[index] = value
                else:
                    failures[index] = str(value)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not failures:
            self._show_stacks(list(waiting.values()))
        if waiting or failures:
            self.close()
            raise RankFailure(_report(failures, sorted(waiting.values()), seconds))
        return [results[index] for index in range(self.size)]

    def _show_stacks(self, indices: list[int]) -> None:
        """Let ranks that hang print where they are."""
        for index in indices:
            pid = self._ranks[index][0].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)


def _receive(connection: Connection) -> tuple[bool, object]:
    try:
        return cast(tuple[bool, object], connection.recv())
    except EOFError:
        return False, "its process ended without a word"


def _report(failures: dict[int, str], silent: list[int], seconds: float) -> str:
    parts = [f"--- rank {index}: {text}" for index, text in sorted(failures.items())]
    if silent:
        known = "ended with the others" if failures else f"no answer within {seconds:.0f} seconds"
        parts.append(f"--- ranks {silent}: {known}")
    return "\n".join(["a case failed", *parts])


def _serve(
    join: Join, index: int, size: int, device_type: str, store: str, connection: Connection
) -> None:
    """Be one rank: take cases until the pool hangs up."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    _let_others_finish()
    try:
        rank = join(index, size, device_type, store)
        connection.send((True, None))
        while True:
            case, arguments, options = connection.recv()
            connection.send(_attempt(rank, case, arguments, options))
    except EOFError:
        os._exit(0)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


def _let_others_finish() -> None:
    """Do not push a thread that sends to this process off its core in the middle of sending.

    gloo's threads spin while another one of their process, which is sending, holds a lock. Where
    ranks share cores, that was a third of all time.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes know one policy only: there, tests take longer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _attempt(
    rank: Rank, case: Callable[..., object], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[bool, object]:
    try:
        _settle(rank.device)
        # What is left are modules and caches; a case collects garbage many times.
        gc.freeze()
        torch.manual_seed(0)
        result = case(rank, *arguments, **options)
        found = _settle(rank.device)
        assert not found, "races:\n" + "\n".join(found)
        return True, result
    except BaseException:
        return False, traceback.format_exc()


def _settle(device: torch.device) -> list[str]:
    """Finish what a case left on the device and return the races that were seen."""
    gc.collect()
    torch.get_device_module(device).synchronize(device)
    if device.type != "virtual":
        return []
    from swapopt_torch import virtual

    return [str(race) for race in virtual.races()]
