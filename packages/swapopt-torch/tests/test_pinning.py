"""Pinned memory at the end of a process, and in a forked one."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
