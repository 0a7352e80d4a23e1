"""Watching a training step on the emulated device: its memory, and what takes it time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from mindspore import Parameter, Tensor, saved_tensors_hooks
from mindspore import dtype as mstype

from swapopt_mindspore.emulated import EmulatedDevice, Profile
from swapopt_mindspore.streams import Stream

Lane: TypeAlias = Literal["h2d", "compute", "d2h"]
Phase: TypeAlias = Literal["forward", "backward", "update", "between steps"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One operation of an optimizer step.

    Attributes:
        lane: the copy direction, or compute.
        operation: its name.
        nbytes: bytes copied, or read and written by an update.
        start_seconds, end_seconds: since the step began.
    """

    lane: Lane
    operation: str
    nbytes: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Device memory in use at one moment.

    Attributes:
        seconds: the host's virtual time.
        nbytes: bytes allocated.
        phase: what the training loop was doing.
        step: which training step, from 0.
    """

    seconds: float
    nbytes: int
    phase: Phase
    step: int


class WatchedDevice(EmulatedDevice):
    """An emulated device that tells when memory was allocated or freed.

    Args:
        profile: what the device costs.

    Attributes:
        on_change: called after everything of a step that may change the allocated memory.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.profile = profile
        self.on_change: Callable[[], None] = _ignore

    def empty(self, shape: tuple[int, ...], dtype: mstype.Type) -> Tensor:
        """Allocate a tensor full of NaN."""
        tensor = super().empty(shape, dtype)
        self.on_change()
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Give the tensor's memory back."""
        super().release(tensor)
        self.on_change()

    def restore(self, tensor: Tensor) -> None:
        """Give the tensor memory again."""
        super().restore(tensor)
        self.on_change()

    def copy(
        self, stream: Stream, destination: Tensor, source: Tensor, *, blocking: bool = False
    ) -> None:
        """Issue the copy; staging arenas are allocated before their first one."""
        super().copy(stream, destination, source, blocking=blocking)
        self.on_change()

    def step_rows(self, start_ns: int) -> list[StepRow]:
        """Return what ran since `clear_timeline`, in order of start, from a virtual time on."""
        lanes: dict[str, Lane] = {"h2d": "h2d", "compute": "compute", "d2h": "d2h"}
        rows = [
            StepRow(
                lane=lanes[row.lane],
                operation=row.operation,
                nbytes=row.nbytes,
                start_seconds=(row.start_ns - start_ns) / 1e9,
                end_seconds=(row.end_ns - start_ns) / 1e9,
            )
            for row in self.timeline()
            if row.lane in lanes
        ]
        return sorted(rows, key=lambda row: row.start_seconds)


def _ignore() -> None:
    """Take no notice."""


class _Kept(NamedTuple):
    """A tensor that forward keeps for backward, and the device memory it counts for."""

    tensor: Tensor
    memory: Tensor | None


class StepObserver:
    """Lets forward and backward take device memory and virtual time, and samples memory.

    The device sees neither by itself: it emulates what swapopt moves. Here every tensor that
    forward keeps for backward (each once, without the parameters) takes device memory until
    backward lets go of it, and so does every gradient until `drop_gradients`. Each time such a
    tensor is kept or taken back, an operator is charged: its launch, and the tensor read and
    written once. Arithmetic takes no time, here as in the updates.

    Args:
        device: where memory and time are counted.
        parameters: of the model; they count where they are.

    Attributes:
        samples: of device memory, while `sampling` was on.
    """

    def __init__(self, device: WatchedDevice, parameters: Sequence[Parameter]) -> None:
        self._device = device
        self._parameters = parameters
        self._parameter_addresses: frozenset[int] = frozenset()
        self._kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._gradients: list[Tensor] = []
        self._phase: Phase = "between steps"
        self._step = 0
        self.sampling = False
        self.samples: list[MemorySample] = []
        for parameter in parameters:
            parameter.register_hook(self._take_gradient)
        device.on_change = self.sample

    @contextmanager
    def step(self, index: int, *, sampling: bool) -> Iterator[None]:
        """Observe one training step."""
        self._step, self.sampling = index, sampling
        self._parameter_addresses = frozenset(map(_address, self._parameters))
        self.enter("forward")
        with saved_tensors_hooks(self._keep, self._take_back):
            yield
        self.enter("between steps")
        self.sampling = False

    def enter(self, phase: Phase) -> None:
        """Note what comes next; the moment is sampled in the phase before and in it."""
        if phase != self._phase:
            self.sample()
            self._phase = phase
            self.sample()

    def sample(self) -> None:
        """Note the memory in use."""
        if self.sampling:
            nbytes = self._device.memory().allocated_bytes
            seconds = self._device.now_ns / 1e9
            self.samples.append(MemorySample(seconds, nbytes, self._phase, self._step))

    def drop_gradients(self) -> None:
        """Give the memory of the gradients back, as the training loop lets go of them."""
        self._gradients.clear()
        self.sample()

    def _keep(self, tensor: Tensor) -> _Kept:
        self._charge("forward", tensor)
        address = _address(tensor)
        memory = None
        if address not in self._parameter_addresses:
            memory = self._kept.get(address)
            if memory is None:
                memory = self._kept[address] = self._take_memory(tensor)
        return _Kept(tensor, memory)

    def _take_back(self, kept: _Kept) -> Tensor:
        self.enter("backward")
        self._charge("backward", kept.tensor)
        self.sample()
        return kept.tensor

    def _take_gradient(self, gradient: Tensor) -> None:
        self._gradients.append(self._take_memory(gradient))

    def _take_memory(self, tensor: Tensor) -> Tensor:
        return self._device.empty(tuple(tensor.shape), tensor.dtype)

    def _charge(self, operation: str, tensor: Tensor) -> None:
        rate = self._device.profile.memory_bytes_per_second
        self._device.compute(operation, 2 * tensor.nbytes / rate)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
