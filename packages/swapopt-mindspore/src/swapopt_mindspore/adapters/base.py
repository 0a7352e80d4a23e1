"""What all Adam optimizers of MindSpore have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from mindspore import Parameter, Tensor, nn
from mindspore.ops import operations

from swapopt_common import OptimizerSwapAdapter, SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore.adapters.gradients import checked_gradients
from swapopt_mindspore.device import Device
from swapopt_mindspore.residency import Surroundings, appeared, find_shared_storages, make_slot
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit

OptimizerT = TypeVar("OptimizerT", bound=nn.Optimizer)

_assign = operations.Assign()

NATIVE_REFUSED: Mapping[str, str] = {
    "use_lazy": "its sparse updates leave out parts of the states",
    "use_offload": "it updates on the host, where the states would stay",
}


class MindSporeAdamBaseAdapter(
    OptimizerSwapAdapter[OptimizerT, MindSporeUnit, MindSporeUnit], Generic[OptimizerT]
):
    """Adam with or without decoupled weight decay and AMSGrad: its parameters as units.

    A step updates parameter by parameter, eagerly, through the optimizer's own operators: the
    optimizer's compiled ``construct`` would keep the storages that the states had at its first
    call. The counters of a step (``global_step``, beta powers) advance right after the first
    parameter's update, so a step that fails before has advanced nothing.

    Args:
        optimizer: the optimizer to serve; its states and hyperparameters stay its own.
        config: what the user wants swapped.

    Attributes:
        units: one per parameter, in the optimizer's order.
        results: what the last step returns: for each parameter True, as the native optimizer
            documents, or None if it had no gradient.
    """

    serves: ClassVar[str]
    """How messages call the optimizer class."""
    update_methods: ClassVar[tuple[str, ...]]
    """The methods that make the native update; a subclass that overrides one is not served."""
    refused_flags: ClassVar[Mapping[str, str]] = {
        "use_parallel": "each rank would update a part of the parameters only, and broadcast it",
    }
    """Attributes of the optimizer that must not be True, and why."""
    missing_key_hints: ClassVar[Mapping[str, str]] = {
        "master_param": "; only MindFormers AdamW owns master parameters",
    }
    """What to change where a state is named that the optimizer lacks."""
    packed_by_default: ClassVar[bool] = False
    takes_views: ClassVar[bool] = False
    """Whether its operators write to views of a block, which states share when they are packed.

    The operators of `nn.Adam` and `nn.AdamWeightDecay` do not: what they write to a view is lost.
    """

    def __init__(self, optimizer: OptimizerT, config: SwapOptimizerConfig) -> None:
        self._optimizer = optimizer
        self._config = config
        self._around = Surroundings(None, config.min_numel, frozenset())
        self._active: list[MindSporeUnit] = []
        self._updated: list[MindSporeUnit] = []
        self._next_counters: list[tuple[Parameter, Tensor]] = []
        self._advancing = False
        self.units: list[MindSporeUnit] = []
        self.results: tuple[bool | None, ...] = ()

    @classmethod
    @abstractmethod
    def optimizer_class(cls) -> type[nn.Optimizer] | None:
        """Return the class this adapter serves; None where nobody has imported it."""

    @classmethod
    def matches(cls, optimizer: object) -> bool:
        """Accept the class, and subclasses that leave its update alone."""
        known = cls.optimizer_class()
        if known is None or not isinstance(optimizer, known):
            return False
        kind = type(optimizer)
        return all(
            getattr(kind, name, None) is getattr(known, name, None) for name in cls.update_methods
        )

    @abstractmethod
    def state_tuples(self) -> Mapping[str, Sequence[Parameter]]:
        """Return the states that every parameter has, by key, in the order of the update."""

    @abstractmethod
    def read_hyperparameters(self) -> list[tuple[Parameter, Tensor]]:
        """Read what this step's updates need, before any counter advances.

        Returns:
            The counters of the whole step, each with the value it has after the step.
        """

    @abstractmethod
    def update(self, unit: MindSporeUnit) -> None:
        """Update one parameter through the optimizer's own operator."""

    @property
    def launches_per_update(self) -> int:
        """About how many operators the update of one parameter issues; for virtual time only."""
        return 1

    def master_of(self, index: int) -> Parameter | None:
        """Return the fp32 master that the optimizer owns for a parameter, if it does."""
        del index
        return None

    def state_keys(self) -> tuple[str, ...]:
        """Return the states that some parameter has."""
        indices = range(len(self._optimizer.parameters))
        masters = any(self.master_of(index) is not None for index in indices)
        return (*self.state_tuples(), *(("master_param",) if masters else ()))

    def validate(self) -> None:
        """Refuse settings of the optimizer and of the configuration that cannot be served."""
        for flag, reason in self.refused_flags.items():
            if getattr(self._optimizer, flag, False):
                raise SwapConfigError(
                    f"this {self.serves} has {flag}=True; swap_optimizer needs it False: {reason}."
                )
        if self._config.packed_swap and not self.takes_views:
            raise SwapConfigError(
                f"packed_swap=True is served for MindFormers AdamW only; {self.serves} needs "
                "packed_swap=False or None."
            )
        keys = self.state_keys()
        for key in self._config.state_keys or ():
            if key not in keys:
                raise SwapConfigError(
                    f"state_keys names {key!r}, which this {self.serves} lacks. It has "
                    f"{', '.join(keys)}{self.missing_key_hints.get(key, '')}."
                )

    def unselected(self, key: str) -> str | None:
        """Return why the configuration leaves a state alone; None if it does not."""
        selected = self._config.state_keys is None or key in self._config.state_keys
        return None if selected else "not selected by state_keys"

    def register_units(self, device: Device | None) -> list[MindSporeUnit]:
        """Make a unit for every parameter, with slots for all of its states.

        Args:
            device: the device that swaps, which has adopted parameters and states; None where
                nothing can swap.
        """
        states = self.state_tuples()
        params = list(self._optimizer.parameters)
        masters = [self.master_of(index) for index in range(len(params))]
        tensors = [*params, *(master for master in masters if master is not None)]
        tensors += [state for tuple_ in states.values() for state in tuple_]
        shared = find_shared_storages(tensors)
        self._around = Surroundings(device, self._config.min_numel, shared)
        self.units = []
        for index, (param, master) in enumerate(zip(params, masters, strict=True)):
            slots = [self._slot(key, tuple_[index]) for key, tuple_ in states.items()]
            master_slot = None if master is None else self._slot("master_param", master)
            slots += [] if master_slot is None else [master_slot]
            self.units.append(
                MindSporeUnit(
                    index,
                    param,
                    slots=slots,
                    name=param.name,
                    master=master_slot,
                    launches=self.launches_per_update,
                )
            )
        return self.units

    def _slot(self, key: str, parameter: Parameter) -> MindSporeSlot:
        return make_slot(key, parameter, self.unselected(key), self._around)

    def refresh_swappable_slots(self, units: Sequence[MindSporeUnit]) -> list[MindSporeSlot]:
        """Let states swap whose device storage appeared with their first update; return them."""
        return [slot for unit in units for slot in unit.slots if appeared(slot, self._around)]

    def prepare_step(self, gradients: object = None) -> None:
        """Check the gradients and read this step's hyperparameters; nothing has advanced.

        Args:
            gradients: a tuple or list with one entry per parameter, in the optimizer's order: a
                tensor of the parameter's shape, or None, which leaves the parameter and its
                states alone. (The native optimizers refuse None.)

        Raises:
            ValueError: the gradients are not that.
        """
        checked = checked_gradients(gradients, self.units, self.serves)
        self._updated, self._advancing = [], False
        self._next_counters = self.read_hyperparameters()
        for unit, gradient in zip(self.units, checked, strict=True):
            unit.grad = gradient
        self._active = [unit for unit in self.units if unit.grad is not None]
        self.results = tuple(None if gradient is None else True for gradient in checked)

    def iter_update_units(self) -> Sequence[MindSporeUnit]:
        """Return the units with a gradient."""
        return self._active

    def step_batch(self, batch: Sequence[MindSporeUnit]) -> None:
        """Update a batch, parameter by parameter."""
        for unit in batch:
            self.update(unit)
            self._updated.append(unit)
            self._advance()

    def is_updated(self, unit: MindSporeUnit) -> bool:
        """Say whether this step has updated a parameter completely."""
        return unit in self._updated

    def finish_step(self) -> None:
        """Advance the counters of a step in which no parameter had a gradient."""
        self._advance()

    def abandon_step(self) -> None:
        """Make whole what a failed step has updated; a step that updated nothing is undone."""
        if self._updated or self._advancing:
            self._advance()

    def drop_gradients(self) -> None:
        """Forget this step's gradients, so that their memory is free when the user drops them."""
        for unit in self._active:
            unit.grad = None
        self._active, self._updated, self._next_counters = [], [], []

    def _advance(self) -> None:
        # After an interruption this runs again; assigning a value twice does no harm.
        self._advancing = True
        for counter, value in self._next_counters:
            _assign(counter, value)
        self._next_counters = []
