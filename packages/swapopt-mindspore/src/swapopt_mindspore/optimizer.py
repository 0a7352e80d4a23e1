"""`swap_optimizer` and the optimizer it returns."""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore.graph.api import _run_in_jit

from swapopt_common import DeviceRoom, SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import announce, guard
from swapopt_mindspore.adapters import MindFormersAdamWAdapter, make_adapter
from swapopt_mindspore.checkpoint import CheckpointedOptimizer
from swapopt_mindspore.choice import resolve_device
from swapopt_mindspore.device import Device
from swapopt_mindspore.engine import SwapEngine
from swapopt_mindspore.hooks import share_hooks
from swapopt_mindspore.room import make_room
from swapopt_mindspore.slots import MindSporeSlot
from swapopt_mindspore.stats import SwapStats, TransferCounts, collect_stats


def swap_optimizer(
    optimizer: nn.Optimizer,
    config: SwapOptimizerConfig | None = None,
    *,
    device_memory_budget: int | None = None,
    resident_bytes: int = 0,
    resident_fraction: float = 0.0,
    synchronous: bool = False,
    device: Device | None = None,
) -> MindSporeSwapOptimizer:
    """Wrap an Adam or AdamW optimizer so that its states live in pinned host memory.

    The states are copied to the host at once, and their device memory is given back. During a
    step they visit the device batch by batch. Results equal the wrapped optimizer's bit for bit.
    Wrap it before its first step: its compiled step would go on holding the device memory that
    the states had then.

    Args:
        optimizer: a mindspore.nn.Adam, a mindspore.nn.AdamWeightDecay, or MindFormers' PyNative
            AdamW. It keeps its parameters and its states, but must not be called any more.
        config: what to swap and how; the defaults suit most models. ``packed_swap=None`` means
            packed for MindFormers' AdamW, and per tensor for the other two.
        device_memory_budget: bytes of device memory that states which could swap may take at any
            time: instead of ``swap_times``. A step gets what it needs to be fast; states stay on
            the device as far as the rest goes.
        resident_bytes: keep states of so many bytes on the device: whole parameters, the largest
            first, as they fit. The others swap with the config's ``swap_times``.
        resident_fraction: the same as a share of the bytes of all that could swap, 0 to 1.
        synchronous: make every copy block the host. Slow; for finding faults, or where
            asynchronous copies must be ruled out.
        device: where the updates run; None takes Ascend where it is MindSpore's target, or the
            `emulated.EmulatedDevice` whose ``with`` block this call is in. Where there is
            neither, nothing swaps, and a warning says so.

    Returns:
        An optimizer to use in place of ``optimizer``, in PyNative mode.

    Raises:
        ValueError: the optimizer or its settings cannot be served, a step does not fit into the
            budget, or more than one of budget, bytes and fraction is given; nothing has changed.
        HostMemoryError: pinned host memory ran out; nothing has changed.
    """
    if config is not None and not isinstance(config, SwapOptimizerConfig):
        raise SwapConfigError(
            f"config must be a SwapOptimizerConfig or None, found {config!r}. Write for example "
            "swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=16))."
        )
    if device is not None and not isinstance(device, Device):
        raise SwapConfigError(
            f"device must be a device object or None, found {device!r}. None takes Ascend where it "
            "is MindSpore's target; to try swapping without hardware, pass "
            "swapopt_mindspore.emulated.EmulatedDevice()."
        )
    return MindSporeSwapOptimizer(
        optimizer,
        config or SwapOptimizerConfig(),
        DeviceRoom(
            device_memory_budget=device_memory_budget,
            resident_bytes=resident_bytes,
            resident_fraction=resident_fraction,
        ),
        synchronous=synchronous,
        device=device,
    )


def is_swap_optimizer(optimizer: object) -> bool:
    """Say whether ``optimizer`` came from `swap_optimizer`."""
    return isinstance(optimizer, MindSporeSwapOptimizer)


class MindSporeSwapOptimizer(CheckpointedOptimizer):
    """An optimizer whose states live in pinned host memory between steps.

    Made by `swap_optimizer`. Seen as a cell it is the wrapped optimizer: it has the same
    parameters under the same names. Attributes that it does not have itself are the wrapped
    optimizer's, to read and to set.
    """

    def __init__(
        self,
        optimizer: nn.Optimizer,
        config: SwapOptimizerConfig,
        room: DeviceRoom | None = None,
        *,
        synchronous: bool = False,
        device: Device | None = None,
    ) -> None:
        guard.refuse_graph_mode()
        guard.refuse_swapped(optimizer)
        room = room or DeviceRoom()
        room.check_with(config)
        adapter = make_adapter(optimizer, config)
        super().__init__(optimizer)
        share_hooks(self, optimizer)
        self._adapter = adapter
        self._unswapped = False
        self._engine = None
        swaps_on = resolve_device() if device is None else device
        units = adapter.register_units(swaps_on)
        self._state_ids = frozenset(id(slot.parameter) for unit in units for slot in unit.slots)
        # Warnings come before anything changes: they may be errors.
        if config.include_master_params and "master_param" not in adapter.state_keys():
            announce.warn_of_no_masters(adapter.serves)
        swap_times = config.swap_times
        if swaps_on is None:
            announce.warn_of_no_device()
        else:
            self._engine = SwapEngine(
                swaps_on,
                config,
                packed_by_default=adapter.packed_by_default,
                takes_views=adapter.takes_views,
                synchronous=synchronous,
            )
            swap_times = make_room(room, swap_times, units, self._engine.layout)
            announce.warn_of_no_effect(units)
        self._attach(swap_times)

    def _attach(self, swap_times: int) -> None:
        try:
            if self._engine is not None:
                self._engine.attach(self._adapter.units, swap_times)
            guard.take_step_away(self._base)
            guard.mark_swapped(self)
        except BaseException:
            if self._engine is not None:
                self._engine.restore()
            guard.give_step_back(self._base)
            raise

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[bool | None, ...]:
        """Take a step; see `construct`."""
        guard.refuse_graph_mode()
        results: tuple[bool | None, ...] = super().__call__(gradients)  # type: ignore[no-untyped-call]
        return results

    def construct(self, gradients: tuple[Tensor | None, ...]) -> tuple[bool | None, ...]:
        """Update every parameter that has a gradient.

        Updates run on the caller's current stream; work issued there afterwards sees the new
        parameters. Copies run on streams of their own; the last offload may still be under way
        when this returns.

        Args:
            gradients: one per parameter, in the order of ``parameters``; None for a parameter
                that took no part in the loss, which leaves it and its states alone. (The native
                optimizers raise for None.)

        Returns:
            For every parameter True, or None if it had no gradient.

        Raises:
            ValueError: the gradients are not that, or the call is inside a function that
                MindSpore compiles; nothing has moved.
            SwapStepError: something failed after some parameters had been updated.
        """
        # What a compiler sees of this method is the raise alone: it takes this branch.
        if _run_in_jit():  # @jit.cond: True
            raise ValueError(
                "a swapped optimizer cannot be part of a compiled graph, which would keep the "
                "memory its states had when it was compiled. Call it in PyNative mode, outside of "
                "functions decorated with jit; forward and backward may be compiled."
            )
        return self._step(gradients)

    def _step(self, gradients: tuple[Tensor | None, ...]) -> tuple[bool | None, ...]:
        self._check_not_unswapped()
        adapter, engine = self._adapter, self._engine
        if engine is not None:
            engine.take_in_moved()
        try:
            adapter.prepare_step(gradients)
            units = adapter.iter_update_units()
            if engine is not None:
                engine.run(units, adapter)
            else:
                adapter.step_batch(units)
            adapter.finish_step()
        except BaseException:
            adapter.abandon_step()
            raise
        finally:
            adapter.drop_gradients()
        if engine is not None:
            late = adapter.refresh_swappable_slots(adapter.units)
            if late:
                engine.welcome(late, adapter.units)
        return adapter.results

    def swap_stats(self) -> SwapStats:
        """Return what swaps, what stays and why, and what the last step moved.

        Moves nothing. Blocks the host until the last step's copies are done, whose times it reads.
        """
        self.synchronize()
        if self._engine is None:
            return collect_stats(self._adapter.units, None, TransferCounts(), None)
        runtime = self._engine.runtime
        return collect_stats(
            self._adapter.units, self._engine.layout, runtime.counts, runtime.last_times()
        )

    def unswap(self) -> nn.Optimizer:
        """Undo the swapping: return the wrapped optimizer, its states on the device.

        It steps eagerly from then on: a step that it compiled before it was wrapped would go on
        with the memory its states had then. Results are the same. This object refuses to step.

        Raises:
            DeviceMemoryError: the states do not fit; they stay swapped.
        """
        self._check_not_unswapped()
        self.synchronize()
        if self._engine is not None:
            self._engine.restore()
        guard.give_step_back(self._base)
        guard.step_eagerly(self._base)
        self._unswapped = True
        self._engine = None
        self._adapter.units = []
        base: nn.Optimizer = self._base
        return base

    def reload_main_params_from_model(self) -> None:
        """Let the fp32 masters have the model parameters' values, wherever the masters are.

        For weights that were loaded into the model behind the optimizer's back, as MindFormers'
        own method. Blocks the host until it is done.

        Raises:
            ValueError: the optimizer has no masters.
        """
        self._check_not_unswapped()
        if not isinstance(self._adapter, MindFormersAdamWAdapter):
            raise SwapConfigError(
                f"{self._adapter.serves} owns no master parameters; MindFormers AdamW does."
            )
        self.synchronize()
        self._adapter.reload_masters(self._store)

    def _store(self, slot: MindSporeSlot, value: Tensor) -> None:
        if self._engine is not None and slot.swappable:
            self._engine.store([(slot, value)])
        else:
            slot.operand().copy_(value)

    def _check_not_unswapped(self) -> None:
        if self._unswapped:
            raise RuntimeError(
                "unswap() gave this optimizer's states back to the one it wrapped: call that one, "
                "or wrap it again."
            )
