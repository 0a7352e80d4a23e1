"""The swapped states of one optimizer: their layout, their movement, their pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from swapopt_common import SlotState, SwapConfigError, SwapOptimizerConfig, move_slots
from swapopt_torch import announce
from swapopt_torch.device_traits import is_capturing
from swapopt_torch.layout import SwapLayout
from swapopt_torch.lending import Lending
from swapopt_torch.movement import (
    STAY,
    Movement,
)
from swapopt_torch.packed import PackedMovement
from swapopt_torch.per_tensor import PerTensorMovement
from swapopt_torch.pipeline import PipelineSwapRuntime, offload_states
from swapopt_torch.step_plans import StepPlans
from swapopt_torch.streams import CallersStreams, copy_streams
from swapopt_torch.units import Share, TorchSlot, TorchUnit


class SwapEngine:
    """Decides once how states move, and keeps what was built for that.

    Args:
        config: the user's configuration.
        packed_by_default: what ``packed_swap=None`` means for this optimizer.
        synchronous: make every copy block the host.
        pageable_fallback: go on in pageable host memory where pinning fails.
    """

    def __init__(
        self,
        config: SwapOptimizerConfig,
        *,
        packed_by_default: bool,
        synchronous: bool,
        pageable_fallback: bool,
    ) -> None:
        self._config = config
        self._swap_times = config.swap_times
        self._packed = self._packed_on_one_device = (
            packed_by_default if config.packed_swap is None else config.packed_swap
        )
        self._synchronous = synchronous
        self._pageable_fallback = pageable_fallback
        self._movement: Movement | None = None
        self.lending = Lending()
        self.layout = self._new_layout()
        self._plans = StepPlans(self.layout)
        self.runtime: PipelineSwapRuntime | None = None

    def _check_devices(self, devices: set[torch.device]) -> None:
        if self._config.packed_swap and len(devices) > 1:
            raise SwapConfigError(
                "packed_swap=True moves states through staging arenas on one device, but these "
                f"states are on {', '.join(sorted(map(str, devices)))}. Use packed_swap=None or "
                "False (each device then has its own streams), or one optimizer per device."
            )

    def bound_of(self, units: Sequence[TorchUnit], swap_times: int) -> int:
        """Return the most bytes that a step over units, not planned yet, would have in flight."""
        taking_part = [unit for unit in units if unit.takes_part]
        packed = self._packed_on_one_device and len(_devices_of(taking_part)) < 2
        layout = SwapLayout(swap_times, packed=packed, pageable_fallback=False)
        layout.plan(taking_part)
        bound_nbytes = layout.bound_nbytes
        layout.forget()
        return bound_nbytes

    def attach(self, units: Sequence[TorchUnit], swap_times: int) -> None:
        """Make a new layout over the units that train or have states, and move the states home.

        Slots that have host memory keep it; nothing is copied twice.

        Args:
            units: all units.
            swap_times: what bounds the memory of a step from now on.

        Raises:
            SwapConfigError: packed_swap=True and states on several devices; nothing has changed.
            HostMemoryError: no state has moved.
        """
        self._swap_times = swap_times
        self._plan_anew([unit for unit in units if unit.takes_part])
        self._admit([unit for unit in units if unit.has_state])

    def has_planned(self, units: Iterable[TorchUnit]) -> bool:
        """Say whether the layout has a place for all of these units."""
        return all(unit in self.layout.places for unit in units)

    def welcome(self, newcomers: Sequence[TorchUnit], units: Sequence[TorchUnit]) -> None:
        """Take in units that have their first gradient: their states are born as host zeros.

        They join the batch they were planned for. If one of them did not train when the layout was
        made, or nothing has been materialised yet and planned ones train no more, all ``units``
        are planned again: a step updates in the optimizer's order, whatever was planned when, and
        updates that communicate rely on that (see `operands_of`).

        Raises:
            SwapConfigError, HostMemoryError: as `attach`.
        """
        if not self.has_planned(newcomers) or (not self._has_mirrors() and self._any_frozen(units)):
            fresh = set(newcomers)
            self._plan_anew([unit for unit in units if unit.takes_part or unit in fresh])
        self._admit(newcomers)

    def _plan_anew(self, units: Sequence[TorchUnit]) -> None:
        self._check_devices(_devices_of(units))
        self.settle()
        self._forget_plans()
        self._plan(units)

    def _any_frozen(self, units: Sequence[TorchUnit]) -> bool:
        return any(unit in self.layout.places and not unit.takes_part for unit in units)

    def _has_mirrors(self) -> bool:
        return any(batch.materialised for batch in self.layout.batches)

    def release(self) -> None:
        """Let go of all host memory; it goes with the last mirror over it."""
        self._forget_plans()

    def _forget_plans(self) -> None:
        self.layout.forget()
        self._packed = self._packed_on_one_device
        self.layout = self._new_layout()
        self._movement = self.runtime = None
        self._plans = StepPlans(self.layout)

    def _new_layout(self) -> SwapLayout:
        return SwapLayout(
            self._swap_times,
            packed=self._packed,
            pageable_fallback=self._pageable_fallback,
        )

    def check_not_capturing(self) -> None:
        """Raise RuntimeError while a graph is captured: a replay would not move the states."""
        for device in self.layout.devices:
            if is_capturing(device):
                raise RuntimeError(
                    f"step() of a swapped optimizer cannot be captured in a graph ({device}): its "
                    "copies and memory change from step to step. Capture forward and backward, and "
                    "call step() outside."
                )

    def _plan(self, units: Sequence[TorchUnit]) -> None:
        devices = _devices_of(units)
        if self._packed and len(devices) > 1:
            announce.warn_of_many_devices(devices)
            self._packed = self.layout.packed = False
        self.layout.plan(units)
        if devices:
            self._movement = PackedMovement(self.layout) if self._packed else PerTensorMovement()
            self.runtime = PipelineSwapRuntime(
                self._movement, window=self.layout.window, synchronous=self._synchronous
            )
        announce.warn_if_host_is_small(units)
        announce.log_layout(self.layout)

    def _admit(self, units: Sequence[TorchUnit]) -> None:
        self.layout.materialise(units)
        # Not in their mirrors yet: states just given one, and states put in place of ours.
        slots = [s for u in units for s in u.swapped() if s.tensor is not s.cpu_tensor]
        existing = [(slot, slot.tensor) for slot in slots if slot.tensor is not None]
        for slot in slots:
            slot.tensor = slot.cpu_tensor
        move_slots([s for s in slots if s.state is SlotState.PENDING], SlotState.HOST)
        by_device: dict[torch.device, list[tuple[TorchSlot, torch.Tensor]]] = {}
        for slot, tensor in existing:
            by_device.setdefault(tensor.device, []).append((slot, tensor))
        for device, states in by_device.items():
            self._offload(device, states)

    def run(
        self,
        units: Sequence[TorchUnit],
        step_batch: Callable[[Sequence[Share]], None],
    ) -> None:
        """Update ``units`` batch by batch; see `PipelineSwapRuntime.run_pipeline`."""
        if not units:
            return
        if self.runtime is None:
            step_batch([share for unit in units for _, share in self.layout.places[unit]])
        else:
            moved = STAY
            if self.lending.has_lent:
                moved = self.lending.regions_to_spare(
                    units,
                    next(iter(self.layout.devices)),
                    pageable_fallback=self._pageable_fallback,
                )
            self.runtime.run_pipeline(self._plans.batches_of(units), step_batch, moved)

    def settle(self) -> None:
        """Block the host until all offloads are complete: the mirrors can be read."""
        if self.runtime is not None:
            self.runtime.recover()
        for device in self.layout.devices:
            copy_streams(device).settle()

    def _offload(
        self, device: torch.device, states: Sequence[tuple[TorchSlot, torch.Tensor]]
    ) -> None:
        slots = [slot for slot, _ in states]
        move_slots(slots, SlotState.D2H)
        if device.type == "cpu":
            # They may be mirrors of a wrapper that is gone, with its offloads still under way.
            for updated_on in {slot.device for slot in slots}:
                copy_streams(updated_on).settle()
            for slot, tensor in states:
                assert slot.cpu_tensor is not None, "materialised before it is filled"
                slot.cpu_tensor.copy_(tensor)
            move_slots(slots, SlotState.HOST)
            return
        callers = CallersStreams([device])
        try:
            event = offload_states(states, copy_streams(device), synchronous=self._synchronous)
        except BaseException:
            callers.restore()
            raise
        move_slots(slots, SlotState.HOST, event)
        if device not in self.layout.devices:
            # Its states were somewhere else than its parameters: nobody would wait for it later.
            copy_streams(device).settle()


def _devices_of(units: Iterable[TorchUnit]) -> set[torch.device]:
    return {slot.device for unit in units for slot in unit.swapped()}
