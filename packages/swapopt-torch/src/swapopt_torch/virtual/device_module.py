"""``torch.virtual``: what ``torch.cuda`` is to CUDA, for the virtual device."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ._native import native
from .memory import device_index, set_capacity
from .timeline import now_ns

Device = torch.device | str | int | None
_Function = TypeVar("_Function", bound=Callable[..., object])

module = types.ModuleType("torch.virtual", __doc__)


def _public(function: _Function) -> _Function:
    setattr(module, function.__name__, function)
    return function


class Stream(torch.Stream):
    """A new stream on `device` (default: the current one); every one is a stream of its own."""

    def __new__(cls, device: Device = None, priority: int = 0, **packed: int) -> Stream:
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
        if interprocess:
            raise ValueError("events of the virtual device do not cross processes")
        return torch.Event("virtual", enable_timing=enable_timing, blocking=blocking)


@_public
def is_available() -> bool:
    return native().device_count() > 0


@_public
def is_initialized() -> bool:
    return True


@_public
def init() -> None:
    """Nothing to do: enable() did it."""


@_public
def device_count() -> int:
    return native().device_count()


@_public
def current_device() -> int:
    return native().current_device()


@_public
def set_device(device: Device) -> None:
    native().set_device(device_index(device))


@_public
@contextmanager
def device(device: Device) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        native().set_device(before)


@_public
@contextmanager
def device_of(tensor: torch.Tensor) -> Iterator[None]:
    with device(tensor.device if tensor.device.type == "virtual" else None):
        yield


@_public
def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(device_index(device))


@_public
def default_stream(device: Device = None) -> torch.Stream:
    return torch.Stream(
        stream_id=0, device_index=device_index(device), device_type=_DEVICE_TYPE_NUMBER
    )


_DEVICE_TYPE_NUMBER = 20  # of c10::DeviceType::PrivateUse1


@_public
def set_stream(stream: torch.Stream) -> None:
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
    return int(memory_stats(device)["allocated_bytes.all.current"])


@_public
def max_memory_allocated(device: Device = None) -> int:
    return int(memory_stats(device)["allocated_bytes.all.peak"])


@_public
def memory_reserved(device: Device = None) -> int:
    return int(memory_stats(device)["reserved_bytes.all.current"])


@_public
def max_memory_reserved(device: Device = None) -> int:
    return int(memory_stats(device)["reserved_bytes.all.peak"])


@_public
def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(device_index(device))


@_public
def reset_accumulated_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


@_public
def empty_cache() -> None:
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
def manual_seed(seed: int) -> None:
    native().default_generator(current_device()).manual_seed(seed)


@_public
def manual_seed_all(seed: int) -> None:
    for generator in generators():
        generator.manual_seed(seed)


@_public
def seed() -> int:
    return native().default_generator(current_device()).seed()


@_public
def initial_seed() -> int:
    return native().default_generator(current_device()).initial_seed()


@_public
def get_rng_state(device: Device = None) -> torch.Tensor:
    return native().default_generator(device_index(device)).get_state()


@_public
def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    native().default_generator(device_index(device)).set_state(new_state)


@_public
def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators()]


@_public
def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators(), new_states, strict=True):
        generator.set_state(state)


def generators() -> list[torch.Generator]:
    return [native().default_generator(index) for index in range(device_count())]


@_public
def get_device_name(device: Device = None) -> str:
    return "virtual accelerator"


@_public
def get_device_properties(device: Device = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=get_device_name(device), total_memory=mem_get_info(device)[1], multi_processor_count=1
    )


@_public
def get_device_capability(device: Device = None) -> tuple[int, int]:
    return (0, 0)


@_public
def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


@_public
def get_amp_supported_dtype() -> list[torch.dtype]:
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
    torch._register_device_module("virtual", module)
    sys.modules["torch.virtual"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
