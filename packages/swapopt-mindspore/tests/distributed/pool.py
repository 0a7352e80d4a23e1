"""Several processes, started once, that run one case after the other together.

A case is a function of a test module, called on every rank with the rank's `Rank` first. It asserts
for itself and returns what it likes; `RankPool.run` gives the values of all ranks to the test.

MindSpore reads its place in a cluster from the environment, so nothing here imports it before
`join_cluster` does, in the rank's own process.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

START_SECONDS = 240.0
CASE_SECONDS = 180.0
# How long the others may take to report after one has failed: they tell more than one traceback.
GRACE_SECONDS = 2.0

SCHEDULER = -1
"""The index of the process that brings the ranks together and runs no case."""


class RankFailure(AssertionError):
    """A case failed on some ranks; the message has what each of them said."""


@dataclass(frozen=True)
class Rank:
    """What a case knows of its process: its index, and how many there are."""

    index: int
    size: int


Join = Callable[[int, int, int], None]
"""Brings a process into the cluster: its index, the number of ranks, the scheduler's port."""


def join_cluster(index: int, size: int, port: int) -> None:
    """Let this process be a rank of MindSpore's CPU target, or its scheduler.

    The scheduler's call returns when the ranks have gone.
    """
    os.environ |= {
        "MS_ROLE": "MS_SCHED" if index == SCHEDULER else "MS_WORKER",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
        "MS_WORKER_NUM": str(size),
    }
    if index != SCHEDULER:
        os.environ["MS_NODE_ID"] = str(index)
    import mindspore
    from mindspore import communication

    mindspore.set_device("CPU")
    communication.init()
    if index != SCHEDULER:
        assert (communication.get_rank(), communication.get_group_size()) == (index, size)


class RankPool:
    """So many processes that communicate with each other.

    Args:
        size: how many ranks.
        join: brings them together; it is also called for one more process, the scheduler.
    """

    def __init__(self, size: int, join: Join = join_cluster) -> None:
        self.size = size
        self._join = join
        self._ranks: list[tuple[SpawnProcess, Connection]] = []
        self._scheduler: SpawnProcess | None = None

    def run(
        self, case: Callable[Concatenate[Rank, P], T], *arguments: P.args, **options: P.kwargs
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
        processes = [process for process, _ in self._ranks]
        if self._scheduler is not None:
            processes.append(self._scheduler)
        for _, connection in self._ranks:
            connection.close()
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        self._ranks, self._scheduler = [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        arguments = (SCHEDULER, self.size, port)
        self._scheduler = context.Process(target=self._join, args=arguments, daemon=True)
        self._scheduler.start()
        for index in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(index, self.size, port, self._join, theirs), daemon=True
            )
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _receive(connection: Connection) -> tuple[bool, object]:
    try:
        return cast(tuple[bool, object], connection.recv())
    except (EOFError, ConnectionResetError):
        return False, "its process ended without a word"


def _report(failures: dict[int, str], silent: list[int], seconds: float) -> str:
    parts = [f"--- rank {index}: {text}" for index, text in sorted(failures.items())]
    if silent:
        known = "ended with the others" if failures else f"no answer within {seconds:.0f} seconds"
        parts.append(f"--- ranks {silent}: {known}")
    return "\n".join(["a case failed", *parts])


def _serve(index: int, size: int, port: int, join: Join, connection: Connection) -> None:
    """Be one rank: take cases until the pool hangs up."""
    faulthandler.register(signal.SIGUSR1)
    try:
        join(index, size, port)
        connection.send((True, None))
        while True:
            case, arguments, options = connection.recv()
            connection.send(_attempt(Rank(index, size), case, arguments, options))
    except EOFError:
        os._exit(0)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


def _attempt(
    rank: Rank, case: Callable[..., object], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[bool, object]:
    try:
        return True, case(rank, *arguments, **options)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        gc.collect()
