"""Who is measured: the optimizer natively, swapped in two ways, and what else there is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from swapopt_torch.bench.rfc_order import HyperUpdate, RfcOrder, TorchUpdate, Update
from swapopt_torch.optim import AdamW

NATIVE = "native"
MIN_NUMEL = 1024  # the default of SwapOptimizerConfig


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer that can be measured.

    Attributes:
        title: how it is made, for people.
        make: makes one.
        make_update: makes the same arithmetic for the reference.
        make_least: makes an optimizer that does the same updates and as little else as can be: the
            least that they cost. torch's fused AdamW counts steps in launches of its own.
    """

    title: str
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    make_update: Callable[[Sequence[torch.Tensor]], Update]
    make_least: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _loop(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=False, fused=False)


OPTIMIZERS = {
    "adamw-fused": OptimizerKind(
        title="torch.optim.AdamW(fused=True)",
        make=lambda params: torch.optim.AdamW(params, fused=True),
        make_update=lambda params: TorchUpdate(params, fused=True),
        make_least=AdamW,
    ),
    "hyper-adamw": OptimizerKind(
        title="swapopt_torch.optim.AdamW",
        make=AdamW,
        make_update=lambda params: HyperUpdate(),
        make_least=AdamW,
    ),
    "adamw": OptimizerKind(
        title="torch.optim.AdamW(foreach=False)",
        make=_loop,
        make_update=lambda params: TorchUpdate(params, fused=False),
        make_least=_loop,
    ),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """What every contender works on; they take turns, and the gradients are always the same.

    Attributes:
        params: the parameters.
        grads: a gradient for each of them.
        kind: the optimizer.
        swap_times: batches of those that swap.
    """

    params: list[torch.nn.Parameter]
    grads: list[torch.Tensor]
    kind: OptimizerKind
    swap_times: int


class Contender(ABC):
    """An optimizer over the parameters of a scene.

    Args:
        scene: what it works on.
    """

    note = ""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def give_gradients(self, active: Sequence[int]) -> None:
        """Let the parameters of these indices have their gradients, and no others."""
        chosen = set(active)
        pairs = zip(self._scene.params, self._scene.grads, strict=True)
        for index, (param, grad) in enumerate(pairs):
            param.grad = grad if index in chosen else None

    @abstractmethod
    def step(self) -> None:
        """Update the parameters."""

    @abstractmethod
    def host_nbytes(self) -> int:
        """Return the bytes of host memory that it holds."""


class Native(Contender):
    """The optimizer as it is.

    Args:
        scene: what it works on.
        least: do as little beside the updates as can be.
    """

    def __init__(self, scene: Scene, *, least: bool = False) -> None:
        super().__init__(scene)
        make = scene.kind.make_least if least else scene.kind.make
        self._optimizer = make(scene.params)

    def step(self) -> None:
        """Step it."""
        self._optimizer.step()

    def host_nbytes(self) -> int:
        """Return 0."""
        return 0


class Swapped(Contender):
    """The optimizer with its states swapped.

    Args:
        scene: what it works on.
        packed: through arenas, or tensor by tensor.
    """

    def __init__(self, scene: Scene, *, packed: bool) -> None:
        super().__init__(scene)
        self._optimizer = swap_optimizer(
            scene.kind.make(scene.params),
            SwapOptimizerConfig(scene.swap_times, min_numel=MIN_NUMEL, packed_swap=packed),
        )

    def step(self) -> None:
        """Step it; the last copies may be under way when this returns."""
        self._optimizer.step()

    def host_nbytes(self) -> int:
        """Return the pinned bytes."""
        return self._optimizer.swap_stats().pinned_nbytes


class Reference(Contender):
    """The RFC's order."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._order = RfcOrder(scene.params, scene.kind.make_update(scene.params), scene.swap_times)

    def step(self) -> None:
        """Step it."""
        self._order.step()

    def host_nbytes(self) -> int:
        """Return the pinned bytes."""
        return self._order.pinned_nbytes()


class PlainMove(Contender):
    """All states are moved with ``.to()`` before the native step, and back after it."""

    note = "all states with .to() before a native step, and back after it"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._optimizer = scene.kind.make(scene.params)

    def step(self) -> None:
        """Move, step, move."""
        self._move(self._scene.params[0].device)
        self._optimizer.step()
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if value.dim() > 0:  # step counts stay where torch keeps them
                    state[key] = value.to(device)

    def host_nbytes(self) -> int:
        """Return the bytes of the states, which are not pinned."""
        states = self._optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.dim() > 0)


class TorchaoOffload(Contender):
    """torchao's CPUOffloadOptimizer: gradients go to the CPU, which updates parameters there."""

    note = "updates on the CPU; gradients are copied while backward runs, which counts as training"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        from torchao.optim import CPUOffloadOptimizer

        self._optimizer = CPUOffloadOptimizer(scene.params, torch.optim.AdamW, fused=True)

    def give_gradients(self, active: Sequence[int]) -> None:
        """Run a backward that does nothing but hand the gradients over: its hooks copy them."""
        scene = self._scene
        super().give_gradients(())
        torch.autograd.backward(
            [scene.params[index] for index in active], [scene.grads[index] for index in active]
        )

    def step(self) -> None:
        """Step it."""
        self._optimizer.step()

    def host_nbytes(self) -> int:
        """Return the bytes of parameters, gradients and two moments on the host."""
        return 4 * sum(param.nbytes for param in self._scene.params)


class PagedAdamW(Contender):
    """bitsandbytes' PagedAdamW: states in memory that the driver moves page by page."""

    note = "states in managed memory, moved by the driver where the card is full"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        from bitsandbytes.optim import PagedAdamW as Paged

        self._optimizer = Paged(scene.params)

    def step(self) -> None:
        """Step it."""
        self._optimizer.step()

    def host_nbytes(self) -> int:
        """Return 0: how much of it is on the host is up to the driver."""
        return 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender before it is made."""

    name: str
    make: Callable[[Scene], Contender]


PLAIN = Entry("plain .to()", PlainMove)
LEAST = Entry("updates alone", lambda scene: Native(scene, least=True))
OWN = (
    Entry(NATIVE, Native),
    Entry("per-tensor", lambda scene: Swapped(scene, packed=False)),
    Entry("packed", lambda scene: Swapped(scene, packed=True)),
    Entry("RFC's order", Reference),
    PLAIN,
)
# A dry device writes zeros to ordinary host memory, which then takes what it says.
_MOST_ORDINARY_NBYTES = 2 * 2**30
# Only where their package is installed: (package, device types it runs on, entry).
PEERS = (
    ("torchao", ("cuda", "xpu"), Entry("torchao offload", TorchaoOffload)),
    ("bitsandbytes", ("cuda",), Entry("bnb paged", PagedAdamW)),
)


def choose_contenders(
    device_type: str, *, state_nbytes: int, dry: bool
) -> tuple[list[Entry], list[str]]:
    """Return whom to measure on a device, and a line for each one that is left out.

    Args:
        device_type: of the device.
        state_nbytes: bytes of states.
        dry: whether the device is a virtual one without memory.
    """
    chosen, absent = list(OWN), []
    if dry and state_nbytes > _MOST_ORDINARY_NBYTES:
        chosen.remove(PLAIN)
        absent.append(f"{PLAIN.name}: not measured dry, its host memory is ordinary and large")
    for package, device_types, entry in PEERS:
        if device_type not in device_types:
            continue
        if find_spec(package) is None:
            absent.append(f"{entry.name}: not measured, {package} is not installed")
        else:
            chosen.append(entry)
    return chosen, absent
