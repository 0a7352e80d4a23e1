"""One device type per process: `pytest --device cuda` runs the same tests on a card."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from sharding import lone_rank, mesh_of
from swapopt_torch.engine import SwapEngine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="virtual", help="device type to run on (default: virtual)")
    parser.addoption(
        "--synchronous", action="store_true", help="make every copy of every optimizer block (R5)"
    )


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, with --synchronous, the tests that are about copies being asynchronous."""
    if config.getoption("--synchronous"):
        dropped = [item for item in items if item.get_closest_marker("asynchronous")]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    # Every test starts with a collection; modules stay anyway. The first optimizer of a process
    # imports torch._dynamo, the largest of them.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def enable_virtual() -> None:
    """Switch both oracles on: the race detector, collecting, and late copies."""
    from swapopt_torch import virtual

    try:
        virtual.enable("h200", device_count=2, races="collect", late_copies=True)
    except virtual.VirtualUnavailableError:
        if os.environ.get("SWAPOPT_REQUIRE_VIRTUAL") == "1":
            raise
        pytest.skip("the virtual accelerator needs a C++ compiler")


@pytest.fixture(scope="session")
def device_type(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture
def device(device_type: str) -> torch.device:
    """The last device of the type, while the first one is current, where there are two."""
    if device_type == "virtual":
        enable_virtual()
    module = torch.get_device_module(device_type)
    module.set_device(0)
    return torch.device(device_type, module.device_count() - 1)


@pytest.fixture(scope="module")
def lone_group(device_type: str) -> Iterator[None]:
    """Make this process a rank whose other ranks do not exist, for the tests of a module."""
    if device_type == "virtual":
        enable_virtual()
    with lone_rank(device_type):
        yield


@pytest.fixture(scope="module")
def mesh(lone_group: None, device_type: str) -> DeviceMesh:
    """Three ranks, of which this process is the last and holds the uneven and the empty shards."""
    return mesh_of(torch.device(device_type), [1, 2, 3])


@pytest.fixture(autouse=True)
def both_oracles(request: pytest.FixtureRequest, device_type: str) -> Iterator[None]:
    """Detector and late copies on, every test starts and ends without a race."""
    if device_type != "virtual":
        yield
        return
    from swapopt_torch import virtual

    enable_virtual()
    # Garbage of earlier tests would synchronise the device when its pinned memory goes, and that
    # orders what should not be ordered.
    gc.collect()
    virtual.races()
    yield
    torch.virtual.synchronize(0)
    torch.virtual.synchronize(1)
    found = virtual.races()
    assert not found, "\n".join(map(str, found))


@pytest.fixture(params=[True, False], ids=["packed", "per_tensor"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def copies_as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --synchronous every optimizer is wrapped as with synchronous=True."""
    if request.config.getoption("--synchronous"):
        original = SwapEngine.__init__

        def synchronous(self: SwapEngine, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **{**options, "synchronous": True})

        monkeypatch.setattr(SwapEngine, "__init__", synchronous)
