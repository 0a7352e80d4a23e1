"""The Ascend device, where there is none.

Each name it uses is looked up in the installed MindSpore, and its own logic runs with stand-ins
for what only an Ascend has: streams, pinned memory, and memory that runs out. The tensors and
storages are MindSpore's own, on the CPU.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor, mint, runtime
from mindspore import dtype as mstype

from swapopt_common import HostMemoryError
from swapopt_mindspore import ascend, choice
from swapopt_mindspore.ascend import AscendDevice
from swapopt_mindspore.device import DeviceMemory, DeviceMemoryError
from swapopt_mindspore.host_buffer import HostBuffer

SOURCE = ast.parse(Path(ascend.__file__).read_text())
MODULES = {"runtime": runtime, "mint": mint, "mstype": mstype}
OF_TENSORS = {
    "asnumpy", "copy_", "data_ptr", "device", "dtype", "narrow", "shape", "untyped_storage", "view"
}  # fmt: skip
OF_STORAGES = {"nbytes", "resize_"}
ELSEWHERE = {"cache", "startswith", "ctypes", "data", "fill"}  # functools, str and numpy


# ---------------------------------------------------------------------- names and signatures
def uses_of_modules() -> list[ast.Attribute]:
    return [
        node
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in MODULES
    ]


def test_every_name_of_a_module_exists() -> None:
    uses = uses_of_modules()
    assert len(uses) >= 10
    for use in uses:
        assert isinstance(use.value, ast.Name)
        assert hasattr(MODULES[use.value.id], use.attr), f"{use.value.id}.{use.attr}"


def test_every_call_fits_the_signature_of_what_it_calls() -> None:
    fitted = []
    for node in ast.walk(SOURCE):
        if not isinstance(node, ast.Call) or node.func not in uses_of_modules():
            continue
        assert isinstance(node.func, ast.Attribute)
        assert isinstance(node.func.value, ast.Name)
        if node.func.value.id == "runtime":
            signature = inspect.signature(getattr(runtime, node.func.attr))
            signature.bind(*node.args, **{str(keyword.arg): None for keyword in node.keywords})
            fitted.append(node.func.attr)
    assert {"Stream", "Event", "StreamCtx", "current_stream", "synchronize"} <= set(fitted)


def test_every_name_of_a_tensor_or_storage_exists() -> None:
    tensor = mint.zeros((2,))
    own = set(dir(AscendDevice) + dir(HostBuffer) + dir(ascend._AscendArena))
    own |= {"_bytes", "_device", "nbytes", "alive_nbytes", "h2d", "d2h"}
    of_modules = {id(use) for use in uses_of_modules()}
    used = {
        node.attr
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.Attribute) and id(node) not in of_modules
    }
    assert used - own <= OF_TENSORS | OF_STORAGES | ELSEWHERE
    for name in OF_TENSORS:
        assert name in used
        assert hasattr(Tensor, name)
    for name in OF_STORAGES:
        assert name in used
        assert hasattr(tensor.untyped_storage(), name)


def test_streams_and_events_have_what_their_protocols_ask() -> None:
    inspect.signature(runtime.Stream.wait_event).bind(None, None)
    inspect.signature(runtime.Stream.synchronize).bind(None)
    inspect.signature(runtime.Event.record).bind(None, None)
    inspect.signature(runtime.Event.synchronize).bind(None)
    inspect.signature(runtime.Event.query).bind(None)
    inspect.signature(runtime.Event.elapsed_time).bind(None, None)


@pytest.mark.parametrize(
    ("function", "described"),
    [
        (mint.empty, "empty(*size, *, dtype=None, device=None, pin_memory=False) -> Tensor"),
        (Tensor.copy_, "copy_(src, non_blocking=False) -> Tensor"),
    ],
)
def test_functions_without_a_signature_are_as_described(
    function: Callable[..., Tensor], described: str
) -> None:
    assert function.__doc__ is not None
    assert described in function.__doc__


# ---------------------------------------------------------------------- logic, with stand-ins
class Machine:
    """Stands for the Ascend: a trace of what reached it, and what it answers."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.current = "caller's stream"
        self.is_full = False
        self.has_pinned = True
        self.pinned_is_copied = False
        self.names = iter(["h2d", "d2h", "more"])

    def runtime(self) -> SimpleNamespace:
        return SimpleNamespace(
            Stream=lambda: next(self.names),
            Event=lambda enable_timing: f"event, timing {enable_timing}",
            StreamCtx=lambda stream: StreamContext(self, stream),
            current_stream=lambda: self.current,
            synchronize=lambda: self.trace.append("synchronize"),
            memory_allocated=lambda: 11,
            max_memory_allocated=lambda: 22,
            reset_max_memory_allocated=lambda: self.trace.append("reset peak"),
        )

    def empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: mstype.Type,
        device: str,
        pin_memory: bool = False,
    ) -> Tensor:
        self.trace.append(f"empty on {device}, pinned {pin_memory}")
        if self.is_full and device == "Ascend":
            raise RuntimeError("Allocate memory failed")
        if pin_memory and not self.has_pinned:
            raise RuntimeError("no pinned memory")
        tensor = mint.ones(shape, dtype=dtype)
        return Copying(tensor) if pin_memory and self.pinned_is_copied else tensor


class StreamContext:
    def __init__(self, machine: Machine, stream: str) -> None:
        self.machine = machine
        self.stream = stream

    def __enter__(self) -> None:
        self.outer, self.machine.current = self.machine.current, self.stream

    def __exit__(self, *error: object) -> None:
        self.machine.current = self.outer


class Copying:
    """A pinned tensor whose array is not its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def asnumpy(self) -> np.ndarray:
        return self.tensor.asnumpy().copy()

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(ascend, "runtime", machine.runtime())
    monkeypatch.setattr(ascend, "mint", SimpleNamespace(empty=machine.empty))
    return machine


@pytest.fixture
def device(machine: Machine) -> AscendDevice:
    return AscendDevice()


def test_streams_and_events_come_from_the_runtime(machine: Machine, device: AscendDevice) -> None:
    assert (device.h2d, device.d2h) == ("h2d", "d2h")
    assert device.compute_stream() == "caller's stream"
    assert device.new_event() == "event, timing False"
    assert device.new_event(timing=True) == "event, timing True"
    device.synchronize()
    device.reset_peak()
    assert machine.trace == ["synchronize", "reset peak"]


def test_copies_run_on_their_stream(machine: Machine, device: AscendDevice) -> None:
    class Recording:
        def copy_(self, source: str, non_blocking: bool) -> None:
            machine.trace.append(f"{source} on {machine.current}, non_blocking {non_blocking}")

    device.copy(device.h2d, Recording(), "mirror")
    device.copy(device.d2h, Recording(), "state", blocking=True)
    assert machine.trace == ["mirror on h2d, non_blocking True", "state on d2h, non_blocking False"]
    assert machine.current == "caller's stream"


def test_a_copy_that_fails_leaves_the_caller_on_his_stream(
    machine: Machine, device: AscendDevice
) -> None:
    class Failing:
        def copy_(self, source: str, non_blocking: bool) -> None:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        device.copy(device.h2d, Failing(), "mirror")
    assert machine.current == "caller's stream"


def test_updates_run_where_the_caller_is(machine: Machine, device: AscendDevice) -> None:
    with device.updating("Adam", reads=[], writes=[], launches=1):
        assert machine.current == "caller's stream"
    assert machine.trace == []


def test_a_state_is_released_and_restored(machine: Machine, device: AscendDevice) -> None:
    state = device.empty((3, 5), mstype.float16)
    assert machine.trace == ["empty on Ascend, pinned False"]
    device.release(state)
    assert state.untyped_storage().nbytes() == 0
    assert (state.shape, state.dtype) == ((3, 5), mstype.float16)
    device.release(state)
    device.restore(state)
    assert state.untyped_storage().nbytes() == 30
    state.copy_(Tensor(np.full((3, 5), 2.0, np.float16)))
    assert (state.asnumpy() == 2.0).all()


@pytest.mark.parametrize("how", ["empty", "restore", "arena"])
def test_memory_that_is_not_there_is_asked_for_by_size(
    machine: Machine, device: AscendDevice, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = device.empty((300,), mstype.float32)
    arena = device.new_arena(1200)
    device.release(state)
    machine.is_full = True
    # MindSpore's resize_ returns without memory, and without a word.
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 0)
    act = {
        "empty": lambda: device.empty((300,), mstype.float32),
        "restore": lambda: device.restore(state),
        "arena": arena.allocate,
    }[how]
    with pytest.raises(DeviceMemoryError, match="1,200 bytes of Ascend memory could not be had"):
        act()
    assert arena.is_empty


def test_an_arena_comes_and_goes_under_its_views(machine: Machine, device: AscendDevice) -> None:
    arena = device.new_arena(4096)
    assert arena.is_empty
    arena.free()
    arena.allocate()
    view = arena.view(mstype.float32, 512, (2, 8))
    assert (view.shape, view.dtype, view.is_contiguous()) == ((2, 8), mstype.float32, True)
    whole = arena.view(mstype.uint8, 0, (4096,))
    assert view.data_ptr() - whole.data_ptr() == 512
    arena.free()
    assert arena.is_empty
    assert view.untyped_storage().nbytes() == 0
    arena.allocate()
    whole.copy_(Tensor(np.arange(4096).astype(np.uint8)))
    assert view.asnumpy().tobytes() == bytes(np.arange(512, 576).astype(np.uint8))
    assert machine.trace == ["empty on Ascend, pinned False"]


def test_host_memory_is_pinned_zeros_of_exact_size(machine: Machine, device: AscendDevice) -> None:
    before = HostBuffer.alive_nbytes
    buffer = device.allocate_host(100, mstype.float16)
    assert machine.trace == ["empty on cpu, pinned True"]
    assert (buffer.numel, buffer.nbytes) == (100, 200)
    mirror = buffer.tensor(10, (2, 5))
    assert not np.any(mirror.asnumpy())
    assert mirror.storage_offset() == 0
    assert device.memory() == DeviceMemory(
        allocated_bytes=11, peak_allocated_bytes=22, pinned_bytes=before + 200
    )


def test_pinned_memory_that_is_not_there(machine: Machine, device: AscendDevice) -> None:
    machine.has_pinned = False
    with pytest.raises(HostMemoryError, match="Pinned host memory ran out: 4,000 bytes"):
        device.allocate_host(1000, mstype.float32)


def test_pinned_memory_that_cannot_be_reached(machine: Machine, device: AscendDevice) -> None:
    machine.pinned_is_copied = True
    with pytest.raises(HostMemoryError, match="a copy of its pinned memory"):
        device.allocate_host(1000, mstype.float32)


def test_host_memory_is_kept_until_its_copies_are_done(
    machine: Machine, device: AscendDevice
) -> None:
    before = HostBuffer.alive_nbytes
    alive_nbytes: list[int] = []
    reached = SimpleNamespace(
        synchronize=lambda: alive_nbytes.append(HostBuffer.alive_nbytes - before)
    )
    device.keep_until(reached, {device.allocate_host(8, mstype.float32)})
    assert alive_nbytes == [32]
    assert HostBuffer.alive_nbytes == before


@pytest.mark.parametrize(("where", "held"), [("Ascend:0", True), ("CPU", False)])
def test_what_is_on_an_ascend(device: AscendDevice, where: str, held: bool) -> None:
    assert device.holds(SimpleNamespace(device=where)) is held


def test_adopting_needs_nothing(machine: Machine, device: AscendDevice) -> None:
    device.adopt([mint.zeros((2,))])
    assert machine.trace == []


def test_ascend_is_used_where_it_is_the_target(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend.ascend_device.cache_clear()
    monkeypatch.setattr(choice, "get_context", {"device_target": "Ascend"}.get)
    try:
        device = choice.resolve_device()
        assert isinstance(device, AscendDevice)
        assert choice.resolve_device() is device
    finally:
        ascend.ascend_device.cache_clear()
