"""How MindSpore's checkpoint functions see a swapped optimizer: save, load, snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, nn

from swapopt_common import SwapConfigError
from swapopt_mindspore.adapters.base import MindSporeAdamBaseAdapter
from swapopt_mindspore.delegation import DelegatingOptimizer
from swapopt_mindspore.engine import SwapEngine
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.mirrors import LoadedValue
from swapopt_mindspore.slots import MindSporeSlot

Array = npt.NDArray[np.generic]
StateDict = Mapping[str, object]


class StateDictError(SwapConfigError, RuntimeError):
    """A state dict does not fit; a RuntimeError, too, since that is what MindSpore raises."""


@dataclass
class _Faults:
    """What is wrong with a state dict, by name: three kinds, as MindSpore sorts it.

    Attributes:
        missing, unexpected: names.
        misfits: what is wrong with the value of a name.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)

    def forbid(self, *, strict: bool) -> bool:
        """Say whether loading has to fail."""
        return bool(self.misfits or (strict and (self.missing or self.unexpected)))


Values = list[tuple[Parameter, Array]]
"""Parameters, and the values they are to have: arrays of their (local) shape and dtype."""


@dataclass
class _Load:
    """One call of `CheckpointedOptimizer.load_state_dict`.

    Attributes:
        strict: the caller's.
        refused: whether it is about to fail.
        postponed: the values that were not taken over for this reason.
    """

    strict: bool
    refused: bool = False
    postponed: Values = field(default_factory=list)


class CheckpointedOptimizer(DelegatingOptimizer):
    """The part of a swapped optimizer that is there between steps.

    Seen as a cell it has the wrapped optimizer's parameters under the same names, so MindSpore's
    own functions save and load it: whoever walks its parameters first joins the last step's
    offloads (docs/design.md invariant 3) and then finds swapped states in their host mirrors.
    ``load_param_into_net`` gives states other tensors; the next step takes their values over.
    """

    _adapter: MindSporeAdamBaseAdapter[nn.Optimizer]
    _engine: SwapEngine | None
    _loading: _Load | None = None

    def synchronize(self) -> None:
        """Block the host until the last step's offloads are done.

        Afterwards the wrapped optimizer's own state parameters hold the new values.
        """
        if self._engine is not None:
            self._engine.settle()
            self._engine.take_in_moved()

    # ------------------------------------------------------------------ MindSpore's functions
    def cells_and_names(
        self, cells: set[nn.Cell] | None = None, name_prefix: str = ""
    ) -> Iterator[tuple[str, nn.Cell]]:
        """Return this cell and those inside it; their parameters can be read at once."""
        self.synchronize()
        found: Iterator[tuple[str, nn.Cell]]
        found = super().cells_and_names(cells, name_prefix)  # type: ignore[no-untyped-call]
        return found

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Return the optimizer's own parameters, not copies; they can be read at once."""
        self.synchronize()
        found: Iterator[tuple[str, Parameter]]
        found = super().parameters_and_names(name_prefix, expand)  # type: ignore[no-untyped-call]
        return found

    def load_state_dict(self, state_dict: StateDict, strict: bool = True) -> Any:
        """Take values over by name, as MindSpore does, or nothing at all where it would fail.

        Swapped states go from host to host. dtypes follow this optimizer, as natively. Unlike
        MindSpore's own, a strict call knows the names that its `state_dict` gives.

        Args:
            state_dict: parameters by name, from this class's or the wrapped one's ``state_dict``
                or from ``mindspore.load_checkpoint``.
            strict: whether missing and unexpected names are errors.

        Returns:
            The missing and the unexpected names.

        Raises:
            ValueError: shapes disagree, an entry is no tensor, or names disagree and ``strict``;
                nothing has changed. It is a RuntimeError, too, as MindSpore's.
            HostMemoryError: see `SwapEngine.store`.
        """
        self._loading = load = _Load(strict)
        try:
            incompatible = super().load_state_dict(state_dict, strict)
        except RuntimeError as error:
            if not load.refused:
                raise
            raise StateDictError(f"{error}\nNothing has been loaded.") from error
        finally:
            self._loading = None
        # A hook has taken the faults away.
        self._take_over(load.postponed)
        return incompatible

    # ------------------------------------------------------------------ where a cell may differ
    def _save_to_state_dict(
        self, destination: MutableMapping[str, object], prefix: str, keep_vars: bool
    ) -> None:
        """Enter a snapshot of everything: no later step, load or assignment by us changes it."""
        self.synchronize()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        swapped = self._swapped_slots()
        for name, param in self._params.items():
            if param is not None:
                destination[prefix + name] = self._snapshot(param, swapped.get(id(param)))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take over what is this cell's own, unless something does not fit."""
        faults_lists = missing_keys, unexpected_keys, error_msgs
        for hook in self._load_state_dict_pre_hooks.values():
            hook(self, state_dict, prefix, local_metadata, strict, *faults_lists)
        inner = tuple(f"{prefix}{name}." for name in self._cells)
        values, faults = self._match(state_dict, prefix)
        load = self._loading
        # A cell around this one loads other cells, too, and does not tell whether strictly.
        if not faults.forbid(strict=load is not None and load.strict):
            self._take_over(values)
        elif load is not None:
            load.refused, load.postponed = True, values
        missing_keys += [key for key in faults.missing if not key.startswith(inner)]
        unexpected_keys += [key for key in faults.unexpected if not key.startswith(inner)]
        error_msgs += [text for key, text in faults.misfits.items() if not key.startswith(inner)]

    # ------------------------------------------------------------------ how
    def _swapped_slots(self) -> dict[int, MindSporeSlot]:
        """Return the slots of states that live on the host, by the identity of the state."""
        units = [] if self._engine is None else self._adapter.units
        slots = (slot for unit in units for slot in unit.slots)
        return {id(slot.parameter): slot for slot in slots if slot.buffer is not None}

    def _snapshot(self, param: Parameter, slot: MindSporeSlot | None) -> Parameter:
        if local_part(param) is not param:
            return param  # a DTensor's frame is its package's own; it is handed out as natively
        if slot is None:
            return _named_like(param, Tensor(param.asnumpy(), param.dtype))
        assert self._engine is not None, "without one nothing is swapped"
        return _named_like(param, self._engine.lend(slot))

    def _match(self, state_dict: StateDict, prefix: str) -> tuple[Values, _Faults]:
        """Find what to load into this cell's own parameters, and what is wrong.

        What is wrong with the cells inside it, which load after it, is found, too.
        """
        own = {prefix + name: param for name, param in self._params.items() if param is not None}
        inside = {
            f"{prefix}{name}.{inner}": param
            for name, cell in self._cells.items()
            for inner, param in cell.parameters_and_names()
        }
        values: Values = []
        faults = _Faults()
        for key, param in {**own, **inside}.items():
            value = state_dict.get(key)
            misfit = _misfit(key, value, param)
            if key not in state_dict:
                faults.missing.append(key)
            elif misfit is not None:
                faults.misfits[key] = misfit
            elif key in own:
                assert isinstance(value, Tensor), "it fits"
                values.append((param, _as_array(local_part(value), param)))
        ours = (key for key in state_dict if key.startswith(prefix))
        faults.unexpected = [key for key in ours if key not in own and key not in inside]
        return values, faults

    def _take_over(self, values: Values) -> None:
        self.synchronize()
        swapped = self._swapped_slots()
        to_host: list[LoadedValue] = []
        elsewhere: Values = []
        for param, array in values:
            slot = swapped.get(id(param))
            if slot is None:
                elsewhere.append((param, array))
            else:
                to_host.append((slot, array))
        if self._engine is not None:
            self._engine.load(to_host)
        for param, array in elsewhere:
            local_part(param).copy_(Tensor(array, param.dtype))


def _misfit(key: str, value: object, param: Parameter) -> str | None:
    if not isinstance(value, Tensor):
        return f"{key} is no tensor in the state dict but {type(value).__name__}."
    found, expected = tuple(local_part(value).shape), tuple(local_part(param).shape)
    if found != expected:
        return f"{key} has shape {found} in the state dict; the optimizer's has shape {expected}."
    return None


def _as_array(value: Tensor, param: Parameter) -> Array:
    """Return a tensor's values, of the parameter's dtype; converted as MindSpore does."""
    array: Array = value.asnumpy()
    if value.dtype != param.dtype:
        array = Tensor(array, dtype=param.dtype).asnumpy()
    return array


def _named_like(param: Parameter, tensor: Tensor) -> Parameter:
    """Return a parameter that is this tensor: made from it directly, it would be a copy."""
    named = Parameter(Tensor([0], tensor.dtype), name=param.name, requires_grad=param.requires_grad)
    named.data = tensor
    # MindSpore lets a parameter's description point back at it. Without that circle a snapshot's
    # memory is free as soon as the snapshot is dropped, and not when garbage is next collected.
    named.param_info.obj = None
    return named
