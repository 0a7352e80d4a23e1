"""``torch.virtual``: what ``torch.cuda`` is to CUDA, for the virtual device."""

from __future__ import annotations

import mmap
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils import backend_registration

from ._native import native
from .memory import device_index, set_capacity
from .timeline import now_ns

Device = torch.device | str | int | None
_MAP_NORESERVE = 0x4000  # Linux; Python has no name for it before 3.13
_Function = TypeVar("_Function", bound=Callable[..., object])

module = types.ModuleType("torch.virtual", __doc__)


def _public(function: _Function) -> _Function:
    setattr(module, function.__name__, function)
    return function


class Stream(torch.Stream):
    """A new stream on `device` (default: the current one); every one is a stream of its own."""

    def __new__(cls, device: Device = None, priority: int = 0, **packed: int) -> Stream:
        """With ``stream_id``, ``device_index`` and ``device_type``: that very stream."""
        if "stream_id" in packed:
            return super().__new__(cls, **packed)
        return super().__new__(
            cls, torch.device("virtual", device_index(device)), priority=priority
        )


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventType):
    """Makes a ``torch.Event`` of the virtual device (its elapsed_time refuses subclasses)."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """A ``torch.Event``; ValueError for one between processes."""
        if interprocess:
            raise ValueError("events of the virtual device do not cross processes")
        return torch.Event("virtual", enable_timing=enable_timing, blocking=blocking)


@_public
def is_available() -> bool:
    """Whether there is a virtual device."""
    return native().device_count() > 0


@_public
def is_initialized() -> bool:
    """Whether `enable` has run: always, once this module exists."""
    return True


@_public
def init() -> None:
    """Nothing to do: enable() did it."""


@_public
def device_count() -> int:
    """How many virtual devices there are."""
    return native().device_count()


@_public
def current_device() -> int:
    """The index of this thread's current device."""
    return native().current_device()


@_public
def set_device(device: Device) -> None:
    """Make `device` the current one of this thread."""
    native().set_device(device_index(device))


@_public
@contextmanager
def device(device: Device) -> Iterator[None]:
    """Make `device` the current one inside."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        native().set_device(before)


@_public
@contextmanager
def device_of(tensor: torch.Tensor) -> Iterator[None]:
    """Make the device of `tensor` current inside; other tensors change nothing."""
    with device(tensor.device if tensor.device.type == "virtual" else None):
        yield


@_public
def current_stream(device: Device = None) -> Stream:
    """This thread's current stream on `device`."""
    return _as_stream(torch.accelerator.current_stream(device_index(device)))


@_public
def default_stream(device: Device = None) -> Stream:
    """The stream that every thread starts on."""
    return Stream(stream_id=0, device_index=device_index(device), device_type=_DEVICE_TYPE_NUMBER)


_DEVICE_TYPE_NUMBER = 20  # of c10::DeviceType::PrivateUse1


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


@_public
def set_stream(stream: torch.Stream) -> None:
    """Make `stream` and its device current."""
    torch.accelerator.set_stream(stream)


@_public
@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make `stream` and its device current inside; None changes nothing."""
    if stream is None:
        yield
        return
    device_before = current_device()
    stream_before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(stream_before)
        native().set_device(device_before)


@_public
def synchronize(device: Device = None) -> None:
    """Let the host wait for all work on `device`."""
    torch.accelerator.synchronize(device_index(device))


@_public
def now() -> float:
    """The virtual time of the host, in seconds."""
    return now_ns() * 1e-9


@_public
def memory_stats(device: Device = None) -> dict[str, Any]:
    """Every figure of the allocator, with the keys of ``torch.cuda.memory_stats``."""
    return torch.accelerator.memory_stats(device_index(device))


@_public
def memory_allocated(device: Device = None) -> int:
    """Bytes held by tensors, each rounded up to a multiple of 512."""
    return int(memory_stats(device)["allocated_bytes.all.current"])


@_public
def max_memory_allocated(device: Device = None) -> int:
    """The peak of `memory_allocated`."""
    return int(memory_stats(device)["allocated_bytes.all.peak"])


@_public
def memory_reserved(device: Device = None) -> int:
    """Bytes of all segments that the caching allocator holds."""
    return int(memory_stats(device)["reserved_bytes.all.current"])


@_public
def max_memory_reserved(device: Device = None) -> int:
    """The peak of `memory_reserved`."""
    return int(memory_stats(device)["reserved_bytes.all.peak"])


@_public
def reset_peak_memory_stats(device: Device = None) -> None:
    """Let every peak start again at its current value."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


@_public
def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Let every total start again at zero."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


@_public
def empty_cache() -> None:
    """Return empty segments, after waiting for blocks that streams still use."""
    torch.accelerator.empty_cache()


@_public
def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return torch.accelerator.get_memory_info(device_index(device))


@_public
def host_register(ptr: int, nbytes: int) -> None:
    """Pin existing host memory: tensors inside it count as pinned until `host_unregister`.

    Raises:
        RuntimeError: part of it is already pinned, or the pinned limit is reached.
    """
    native().host_register(ptr, nbytes)


@_public
def host_unregister(ptr: int) -> None:
    """Undo `host_register` of the region that starts at `ptr`; a copy in flight is a race."""
    native().host_unregister(ptr)


@_public
def host_mapping_flags() -> int:
    """How to map memory for `host_register`: a dry device's need not exist, however large it is."""
    return mmap.MAP_SHARED | (_MAP_NORESERVE if native().is_dry() else 0)


@_public
def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    native().default_generator(current_device()).manual_seed(seed)


@_public
def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in generators():
        generator.manual_seed(seed)


@_public
def seed() -> int:
    """Seed the generator of the current device with a random number; returns it."""
    return native().default_generator(current_device()).seed()


@_public
def initial_seed() -> int:
    """The seed of the current device's generator."""
    return native().default_generator(current_device()).initial_seed()


@_public
def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state of the generator of `device`, a CPU byte tensor."""
    return native().default_generator(device_index(device)).get_state()


@_public
def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Restore what `get_rng_state` returned."""
    native().default_generator(device_index(device)).set_state(new_state)


@_public
def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [generator.get_state() for generator in generators()]


@_public
def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    for generator, state in zip(generators(), new_states, strict=True):
        generator.set_state(state)


def generators() -> list[torch.Generator]:
    """The default generators, one per device."""
    return [native().default_generator(index) for index in range(device_count())]


@_public
def get_device_name(device: Device = None) -> str:
    """How the device is called."""
    return "virtual accelerator"


@_public
def get_device_properties(device: Device = None) -> types.SimpleNamespace:
    """Name and total_memory (bytes) of `device`."""
    return types.SimpleNamespace(
        name=get_device_name(device), total_memory=mem_get_info(device)[1], multi_processor_count=1
    )


@_public
def get_device_capability(device: Device = None) -> tuple[int, int]:
    """(0, 0): the device has no compute capability."""
    return (0, 0)


@_public
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """The CPU's kernels compute in bfloat16: True."""
    return True


@_public
def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may be asked for."""
    return [torch.float16, torch.bfloat16]


@_public
def _is_in_bad_fork() -> bool:
    return False


@_public
def _lazy_init() -> None:
    """Nothing to do: enable() did it."""


def install() -> None:
    """Make ``torch.virtual`` of this module. The extension must be started."""
    module.__dict__.update(
        Stream=Stream,
        Event=Event,
        set_capacity=set_capacity,
        default_generators=generators(),
        _DeviceGuard=device,
        _initialized=True,  # checkpointing stashes the RNG of initialised devices only
    )
    torch._register_device_module("virtual", module)  # type: ignore[no-untyped-call]
    sys.modules["torch.virtual"] = module
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
