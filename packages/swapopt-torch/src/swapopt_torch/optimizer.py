"""The optimizer that `swap_optimizer` returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo

from swapopt_common import DeviceRoom, SwapConfigError, SwapOptimizerConfig
from swapopt_torch import announce, checkpoint, guard
from swapopt_torch.adapters import make_adapter
from swapopt_torch.adapters.registration import ParamGroup
from swapopt_torch.checkpoint import StateDict
from swapopt_torch.delegation import DelegatingOptimizer
from swapopt_torch.engine import SwapEngine
from swapopt_torch.room import arrange
from swapopt_torch.stats import SwapStats, collect_stats


class TorchSwapOptimizer(DelegatingOptimizer):
    """An optimizer whose states live in pinned host memory between steps.

    Made by `swap_optimizer`. ``param_groups``, ``defaults`` and ``state`` are the wrapped
    optimizer's own objects. A function that torch.compile compiles may call it: as with torch's
    own optimizers, the graph breaks there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: SwapOptimizerConfig,
        room: DeviceRoom | None = None,
        *,
        synchronous: bool = False,
        pageable_fallback: bool = False,
    ) -> None:
        guard.refuse_swapped(optimizer)
        self._config = config
        self._room = room or DeviceRoom()
        self._room.check_with(config)
        self._options = {"synchronous": synchronous, "pageable_fallback": pageable_fallback}
        self._adapter = make_adapter(optimizer, config)
        super().__init__(optimizer)
        self._engine = SwapEngine(
            config, packed_by_default=self._adapter.packed_by_default, **self._options
        )
        self._register()
        # Warnings come before anything changes: they may be errors.
        announce.warn_of_no_effect(config, self._adapter.units)
        self._unswapped = False
        # What an interruption may leave to be done: mirrors that moved away from a snapshot and
        # are not in the state yet, and loaded values that are not in their mirrors yet.
        self._unexposed = False
        self._fills: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._base_step = vars(optimizer).get("step")
        try:
            self._attach()
            guard.take_step_away(optimizer)
            guard.mark_swapped(self)
        except BaseException:
            self._engine.settle()
            self._adapter.restore_states()
            guard.give_step_back(optimizer, self._base_step)
            raise

    @_disable_dynamo
    def unswap(self) -> torch.optim.Optimizer:
        """Undo the swapping: return the wrapped optimizer, its states on their devices.

        The copies run on the caller's current stream, and the host memory is given back. This
        object refuses afterwards what would move states: step, load_state_dict, add_param_group.

        Raises:
            torch.OutOfMemoryError: the states do not fit; they stay swapped.
        """
        self._check_not_unswapped()
        self.synchronize()
        self._adapter.restore_states()
        guard.give_step_back(self._base, self._base_step)
        self._unswapped = True
        # A scheduler made on this object cannot see the steps to come, and is not to warn of it.
        self._opt_called = True
        self._adapter.units = []
        self._engine.release()
        return self._base

    def _check_not_unswapped(self) -> None:
        if self._unswapped:
            raise RuntimeError(
                "unswap() gave this optimizer's states back to the one it wrapped: step that one, "
                "or wrap it again."
            )

    @property
    @_disable_dynamo
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The wrapped optimizer's state, complete: swapped states are their host mirrors.

        Blocks the host until the last step's offloads are done, and not at all if they are.
        Tensors taken from it stay in place; the next step writes to them.
        """
        self.synchronize()
        return self._base.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._check_not_unswapped()
        self.synchronize()
        self._base.state = state
        self._attach()

    @_disable_dynamo
    def synchronize(self) -> None:
        """Block the host until the last step's offloads are done.

        Afterwards the wrapped optimizer's own ``state`` holds the new values, and so do tensors
        taken from ``state`` before the step, unless a snapshot was alive in it: then the new
        values are in new tensors.
        """
        self._engine.settle()
        self._finish()

    def _finish(self) -> None:
        """Do what an interruption may have left undone; each part can be done again."""
        if self._unexposed:
            for unit in self._adapter.units:
                self._adapter.expose_mirrors(unit)
            self._unexposed = False
        while self._fills:
            mirror, value = self._fills[-1]
            mirror.copy_(value)
            self._fills.pop()

    @_disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Updates run on the caller's current stream of each device; work issued there afterwards
        sees the new parameters. Copies run on streams of their own; the last offload may still
        be under way when this returns.

        Args:
            closure: must be None.

        Raises:
            ValueError: a closure was given, a group was edited into something refused, or a
                gradient is sparse; nothing has moved.
            SwapStepError: something failed after some parameters had been updated.
        """
        self._check_not_unswapped()
        if closure is not None:
            raise SwapConfigError(
                f"step() of a swapped optimizer takes no closure, but got {closure!r}: the states "
                "are on the host while it would run. Compute the loss before, then call step()."
            )
        self._engine.check_not_capturing()
        with _ordinary_tensors():
            self._step()
        # What torch's schedulers look at to warn of a step() that was never called; one that was
        # made before wrapping looks at the wrapped optimizer.
        self._base._opt_called = True  # type: ignore[attr-defined]

    def _step(self) -> None:
        adapter, engine = self._adapter, self._engine
        if self._unexposed or self._fills:
            self.synchronize()
        # torch's GradScaler sets these on the optimizer it steps, and deletes them afterwards.
        adapter.grad_scale = getattr(self, "grad_scale", None)
        adapter.found_inf = getattr(self, "found_inf", None)
        try:
            adapter.prepare_step()
            if adapter.registration_is_stale():
                self._attach()
                adapter.prepare_step()
            newcomers = adapter.newcomers()
            if self._room.names_given and not engine.has_planned(newcomers):
                # They change how much room there is.
                self._attach()
                adapter.prepare_step()
                newcomers = adapter.newcomers()
            if newcomers:
                engine.welcome(newcomers, adapter.units)
                for unit in newcomers:
                    adapter.create_state(unit)
            self._unexposed = engine.lending.has_lent
            engine.run(adapter.iter_update_units(), adapter.step_batch)
            adapter.finish_step()
            self._finish()
        except BaseException:
            # The next step starts from what the state holds, which is complete at any point.
            adapter.invalidate()
            raise
        finally:
            adapter.drop_gradients()

    @_disable_dynamo
    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; see torch.optim.Optimizer.add_param_group.

        Raises:
            ValueError: the group has a setting that cannot be swapped; nothing has changed.
        """
        self._check_not_unswapped()
        if isinstance(param_group, dict):  # torch itself refuses anything else
            self._adapter.refuse_group({**self.defaults, **param_group}, "the added param group")
        self.synchronize()
        self._base.add_param_group(param_group)
        try:
            self._attach()
        except BaseException:
            self._base.param_groups.pop()
            self._attach()
            raise

    @_disable_dynamo
    def state_dict(self) -> StateDict:
        """Return a snapshot in torch's format that the wrapped optimizer's class loads, too.

        All states are in host memory; nothing moves to a device. Later steps and loads change
        nothing in it: it shares the host mirrors' memory, and as long as it lives, steps offload
        to fresh pinned memory instead. Where an earlier snapshot shares that memory still, the
        states are copied, to pageable memory: a checkpoint may be read into what this returns. A
        forked process shares that memory, too: what it is to keep longer than this process does,
        deepcopy. Blocks the host until the last offloads are done.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self.state
        lending = self._engine.lending
        mirrors, lent = self._adapter.mirrors(), lending.lent_regions()

        def lend(tensor: torch.Tensor) -> torch.Tensor | None:
            slot = mirrors.get(id(tensor))
            return None if slot is None or slot.region in lent else lending.lend(slot)

        state_dict = checkpoint.save(self.param_groups, state, lend)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    @_disable_dynamo
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this optimizer or of the wrapped one's class.

        Swapped states go straight to host memory, in place where they fit.

        Raises:
            ValueError: the checkpoint does not fit, or has a setting that cannot be swapped;
                nothing has changed.
        """
        self._check_not_unswapped()
        if not isinstance(state_dict, dict):
            checkpoint.check_is_one(state_dict)
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        checkpoint.check_is_one(state_dict)
        self.synchronize()
        if self._adapter.registration_is_stale():
            self._attach()
        loaded = checkpoint.load(self._adapter, self.param_groups, state_dict)
        before = {"state": self._base.state, "param_groups": self._base.param_groups}
        try:
            self._base.__setstate__({"state": loaded.state, "param_groups": loaded.groups})
            self._attach()
            # From here on the checkpoint is taken over; an interrupted fill is finished later.
            self._fills = loaded.fills
        except BaseException:
            self._fills = []
            self._base.__setstate__(before)
            raise
        self._finish()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __reduce__(self) -> tuple[Callable[..., TorchSwapOptimizer], tuple[object, ...]]:
        """Copy and pickle as the wrapped optimizer, wrapped again: the copy is pinned anew."""
        self.synchronize()
        return _wrap_again, (self._base, self._config, self._room, self._options)

    def swap_stats(self) -> SwapStats:
        """Return what swaps, what stays and why, and what the last step moved."""
        return collect_stats(self._adapter.units, self._engine)

    def _attach(self) -> None:
        """Bring units, layout and host mirrors in line with the groups and the state."""
        try:
            with _ordinary_tensors():
                swap_times = self._register()
                self._engine.attach(self._adapter.units, swap_times)
                for unit in self._adapter.units:
                    self._adapter.expose_mirrors(unit)
        except BaseException:
            self._adapter.invalidate()
            raise

    def _register(self) -> int:
        """Make units of the groups and the state, and return what bounds a step's memory."""
        adapter = self._adapter
        found = arrange(
            self._room,
            self._config,
            adapter.register_units(),
            self._base.state,
            self._engine.bound_of,
        )
        adapter.units = found.units
        return found.swap_times


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make tensors that last: without a history, and of use outside of inference mode, too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _wrap_again(
    optimizer: torch.optim.Optimizer,
    config: SwapOptimizerConfig,
    room: DeviceRoom,
    options: dict[str, bool],
) -> TorchSwapOptimizer:
    return TorchSwapOptimizer(optimizer, config, room, **options)
