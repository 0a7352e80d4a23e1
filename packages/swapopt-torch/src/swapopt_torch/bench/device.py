"""What the benchmark needs of a device beside what the demo does."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import torch

from swapopt_torch.bench.floor import Link
from swapopt_torch.bench.link import MeasuredLink, link_of_profile, measure_link
from swapopt_torch.bench.settings import BenchSettings
from swapopt_torch.demo.accelerator import Accelerator, choose_accelerator
from swapopt_torch.demo.settings import DemoError

_MATRIX_SIZE = 4096
_CALIBRATION_PRODUCTS = 20


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What was issued to the device in one step.

    Attributes:
        h2d_copies, d2h_copies: copies in each direction.
        launches: operators on the device; one on a list of tensors is one.
    """

    h2d_copies: int
    d2h_copies: int
    launches: int

    @property
    def per_piece(self) -> float:
        """Copies and launches per piece, which is what one copy brings to the device."""
        return (self.h2d_copies + self.d2h_copies + self.launches) / max(1, self.h2d_copies)


class BenchDevice(ABC):
    """A device to measure on.

    Args:
        accelerator: the device, its clock and its memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    @abstractmethod
    def link(self) -> Link:
        """The link that the floor is computed for."""

    @property
    @abstractmethod
    def is_dry(self) -> bool:
        """Whether it is a virtual one without memory."""

    @abstractmethod
    def train(self, seconds: float) -> None:
        """Keep the training stream busy for so long, after the updates; stands in for a model."""

    @abstractmethod
    def begin_counting(self) -> None:
        """Count what is issued from now on."""

    @abstractmethod
    def counts(self) -> StepCounts | None:
        """Return what was issued since then; None where the device does not tell."""

    @property
    @abstractmethod
    def measures_host(self) -> bool:
        """Whether what is measured includes time of this machine: contenders then take turns."""

    def idle_nbytes(self) -> int:
        """Return the bytes in use when nothing is under way and garbage is gone."""
        gc.collect()
        self.accelerator.synchronize()
        return self.accelerator.active_nbytes()


class VirtualBenchDevice(BenchDevice):
    """The virtual accelerator: its profile is the link, its timeline counts.

    Args:
        accelerator: the device, its clock and its memory.
        measures_host: measure process time, too; it means little where the processor computes the
            updates, and much on a dry device.
    """

    def __init__(self, accelerator: Accelerator, *, measures_host: bool = False) -> None:
        super().__init__(accelerator)
        self._measures_host = measures_host

    @property
    def measures_host(self) -> bool:
        """Whether process time is wanted."""
        return self._measures_host

    @property
    def link(self) -> Link:
        """The link of the profile in use."""
        from swapopt_torch import virtual

        return link_of_profile(virtual.profile())

    @property
    def is_dry(self) -> bool:
        """Whether the virtual accelerator is enabled dry."""
        from swapopt_torch import virtual

        return virtual.is_dry()

    def train(self, seconds: float) -> None:
        """Let the host wait for the updates and be busy: as with a loss that is read each step."""
        from swapopt_torch import virtual

        self.accelerator.synchronize_updates()
        virtual.advance_host(seconds)

    def begin_counting(self) -> None:
        """Clear the timeline."""
        from swapopt_torch import virtual

        virtual.clear_timeline()

    def counts(self) -> StepCounts:
        """Count the rows of the timeline."""
        from swapopt_torch import virtual

        lanes = Counter(row.lane for row in virtual.timeline())
        return StepCounts(lanes["h2d"], lanes["d2h"], lanes["compute"])


class CardBenchDevice(BenchDevice):
    """A real card: its link is measured first, and matrix products stand in for a model."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.measured: MeasuredLink = measure_link(accelerator.device)
        self._matrix = torch.zeros(
            _MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.float16, device=accelerator.device
        )
        self._product = torch.empty_like(self._matrix)
        self._product_seconds = self._calibrate()
        accelerator.empty_cache()

    @property
    def measures_host(self) -> bool:
        """Yes: its times are this machine's."""
        return True

    @property
    def link(self) -> Link:
        """What was measured."""
        return self.measured.link

    @property
    def is_dry(self) -> bool:
        """Return False."""
        return False

    def _calibrate(self) -> float:
        accelerator = self.accelerator
        self._multiply(_CALIBRATION_PRODUCTS)
        accelerator.synchronize()
        began = accelerator.clock_seconds()
        self._multiply(_CALIBRATION_PRODUCTS)
        accelerator.synchronize()
        return (accelerator.clock_seconds() - began) / _CALIBRATION_PRODUCTS

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def train(self, seconds: float) -> None:
        """Issue matrix products of about that length."""
        self._multiply(round(seconds / self._product_seconds))

    def begin_counting(self) -> None:
        """Do nothing: a card does not count."""

    def counts(self) -> None:
        """Return None."""
        return None


def choose_device(settings: BenchSettings) -> BenchDevice:
    """Return the device that the settings ask for, ready to be measured on.

    Raises:
        DemoError: there is no such device, or the virtual one cannot be built here.
    """
    dry = settings.dry is not False

    def enable(profile: str) -> None:
        from swapopt_torch import virtual

        # Tests look for races; here the detector would only cost time of this machine.
        virtual.enable(profile, races="off", late_copies=False, timeline=True, dry=dry)

    accelerator = choose_accelerator(settings, enable)
    if accelerator.is_virtual:
        # A dry device leaves the processor to Python alone.
        return VirtualBenchDevice(accelerator, measures_host=dry)
    if settings.dry is not None:
        raise DemoError(
            f"--dry and --no-dry are about the virtual accelerator, but the bench would run on "
            f"{accelerator.device}. Leave them out, or add --device virtual."
        )
    return CardBenchDevice(accelerator)
