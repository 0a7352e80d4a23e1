"""Pinned memory at the end of a process, and in a forked one."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import resource
import subprocess
import sys

import pytest
import torch

from swapopt_torch import HostMemoryError, pinning, swap_optimizer
from swapopt_torch.device_traits import HostRegistrar
from swapopt_torch.host_memory import allocate_region

PROGRAM = """
import atexit, gc, os, sys
import torch
from swapopt_torch import device_traits, swap_optimizer, virtual

virtual.enable("h200", device_count=2, races="raise", late_copies=True)
module = torch.get_device_module("virtual")
device_calls = []
wanted = sys.argv[1] == "registered"
if not wanted:
    traits = device_traits.DeviceTraits(find_registrar=lambda device: None)
    device_traits.TRAITS["virtual"] = traits


def shut_down():
    print("calls:", *device_calls, "registered:", virtual.host_memory().registered_bytes)
    print("mirror is read:", round(float(mirror.max()), 6))
    module.synchronize = refuse


def refuse(*_):
    os.write(2, b"the device was asked for something after it had shut down\\n")


def record(name):
    function = getattr(module, name)
    def recorded(*arguments):
        device_calls.append(name)
        return function(*arguments)
    setattr(module, name, recorded)


atexit.register(shut_down)
for name in ("synchronize", "host_unregister"):
    record(name)
parameter = torch.nn.Parameter(torch.zeros(1 << 14, device="virtual:1"))
parameter.grad = torch.ones_like(parameter)
optimizer = swap_optimizer(torch.optim.AdamW([parameter], fused=True))
optimizer.step()
mirror = optimizer.state[parameter]["exp_avg"]
optimizer.step()
device_calls.clear()
child = os.fork()
if child == 0:
    del optimizer, mirror
    gc.collect()
    os.write(1, f"child: {device_calls}\\n".encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(params=["registered", "allocated"])
def kind(request: pytest.FixtureRequest, device_type: str) -> str:
    if device_type != "virtual":
        pytest.skip("the program runs on the virtual accelerator")
    return str(request.param)


def test_memory_is_given_back_before_the_device_shuts_down(kind: str) -> None:
    """What is asked of the device comes before its own hook, where mirrors can still be read.

    A forked process, which cannot use the device, asks nothing of it.
    """
    command = [sys.executable, "-c", PROGRAM, kind]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    given_back = " host_unregister" if kind == "registered" else ""
    assert run.stdout.splitlines() == [
        "child: []",
        f"calls: synchronize{given_back} registered: 0",
        f"mirror is read: {1 - 0.9**2:.2f}",
    ]


MIB = 2**20


@pytest.fixture
def chunks_of_a_mib(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    monkeypatch.setattr(pinning, "_CHUNK_NBYTES", MIB)


@pytest.mark.usefixtures("chunks_of_a_mib")
def test_large_memory_is_made_once_and_the_log_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When it is registered its pages are there, and hold zeros: writing to them makes none."""
    faults = []
    mappings: list[tuple[int, int]] = []

    def register(address: int, nbytes: int) -> None:
        mappings.append((address, nbytes))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        assert not memory[:: mmap.PAGESIZE].any()
        memory[:: mmap.PAGESIZE] = 1
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    registrar = HostRegistrar(register, lambda address: None)
    nbytes = 7 * MIB // 2
    with caplog.at_level(logging.INFO, "swapopt_torch"):
        pinning.registered_buffer(nbytes, registrar, torch.device("virtual"))
    assert [size for _, size in mappings] == [nbytes]
    assert faults[0] < nbytes // mmap.PAGESIZE // 10
    first, *steps, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("swapopt: making ")
    assert len(steps) == 4
    assert all(" made" in step for step in steps)
    assert "of host memory pinned in" in last


@pytest.mark.usefixtures("chunks_of_a_mib")
def test_an_older_kernel_makes_pages_when_they_are_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_POPULATE", 9999)
    registrar = HostRegistrar(lambda address, nbytes: None, lambda address: None)
    with caplog.at_level(logging.INFO, "swapopt_torch"):
        pinning.registered_buffer(2 * MIB, registrar, torch.device("virtual"))
    assert not any(" made" in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("chunks_of_a_mib")
def test_memory_that_cannot_be_made_is_an_error_before_anything_has_changed(
    device: torch.device, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, advice: int, start: int, length: int) -> None:
        if start >= MIB:
            raise OSError(errno.ENOMEM, "no memory")

    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts registered bytes")
    from swapopt_torch import virtual

    monkeypatch.setattr(pinning._RegisteredMapping, "madvise", refuse, raising=False)
    before_bytes = virtual.host_memory().registered_bytes
    parameter = torch.nn.Parameter(torch.zeros(MIB, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    before = dict(optimizer.state[parameter])
    with pytest.raises(HostMemoryError, match="ran out: 8,388,608 bytes"):
        swap_optimizer(optimizer)
    assert virtual.host_memory().registered_bytes == before_bytes
    assert all(optimizer.state[parameter][key] is value for key, value in before.items())
    optimizer.step()


def test_memory_that_is_filled_soon_is_not_zeroed_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device cannot register memory: states that exist, and others that do not."""
    from swapopt_torch import device_traits

    traits = device_traits.DeviceTraits(find_registrar=lambda device: None)
    monkeypatch.setitem(device_traits.TRAITS, device.type, traits)
    zeroed = []
    allocated = pinning.allocated_buffer

    def record(nbytes: int, device: torch.device, *, zeroed_: bool) -> pinning.Buffer:
        zeroed.append(zeroed_)
        return allocated(nbytes, device, zeroed=zeroed_)

    monkeypatch.setattr(
        "swapopt_torch.host_memory.allocated_buffer",
        lambda nbytes, device, zeroed: record(nbytes, device, zeroed_=zeroed),
    )
    region = allocate_region(torch.float32, 4096, device, pageable_fallback=False)
    region.flat.fill_(1)  # what the allocator hands out next
    del region
    parameters = [torch.nn.Parameter(torch.ones(2048, device=device)) for _ in range(2)]
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    optimizer.step()
    optimizer = swap_optimizer(optimizer)
    parameters[1].grad = torch.ones_like(parameters[1])
    optimizer.step()
    assert zeroed == [True, False, True]
    exp_avg = optimizer.state[parameters[1]]["exp_avg"]
    torch.testing.assert_close(exp_avg, torch.full_like(exp_avg, 0.1))
