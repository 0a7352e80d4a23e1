"""What a user may set about swapping, and the rules that every value has to follow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from swapopt_common.errors import SwapConfigError

STATE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
"""Every optimizer state that can be swapped, in canonical order; ``step`` never is."""


@dataclass(frozen=True, slots=True)
class SwapOptimizerConfig:
    """How the states of one optimizer are swapped between its device and the host.

    Attributes:
        swap_times: what bounds the device memory of a step, at least 1: twice the states' bytes
            divided by this. They travel in that many batches, or in more and smaller ones in the
            same memory where that is faster.
        state_keys: the names of the states to swap, out of `STATE_KEYS`, as a list, tuple, set or
            frozenset; kept as a tuple in the order of `STATE_KEYS`. ``None`` swaps every one of
            them that the optimizer has. A name the optimizer lacks is refused when wrapping.
        min_numel: a state with fewer elements than this stays on its device; 0 or more. Of a
            sharded state, the elements that this process holds are counted.
        include_master_params: also swap the fp32 master parameters that the optimizer owns. Only
            MindFormers AdamW owns such parameters.
        packed_swap: True moves each batch through a staging arena, with one copy per direction,
            batch, dtype and contiguous run; False moves each state tensor by itself.
            ``None`` takes what is best for the optimizer at hand: see the backend's
            `swap_optimizer`.

    Raises:
        SwapConfigError: a value breaks its rule; the message names field, rule and value.
    """

    swap_times: int = 16
    state_keys: Collection[str] | None = None
    min_numel: int = 1024
    include_master_params: bool = False
    packed_swap: bool | None = None

    def __post_init__(self) -> None:
        _require_int("swap_times", self.swap_times, at_least=1)
        if self.state_keys is not None:
            # The dataclass is frozen for everybody but its own construction.
            object.__setattr__(self, "state_keys", _canonical_state_keys(self.state_keys))
        _require_int("min_numel", self.min_numel, at_least=0)
        _require_bool("include_master_params", self.include_master_params)
        if self.packed_swap is not None:
            _require_bool("packed_swap", self.packed_swap, or_none=True)


def _refuse(field: str, rule: str, value: object) -> SwapConfigError:
    return SwapConfigError(
        f"SwapOptimizerConfig.{field} must be {rule}; found {value!r} ({type(value).__name__})"
    )


def _require_int(field: str, value: object, *, at_least: int) -> None:
    # bool is a subclass of int, but True batches or False elements are a slip of the user's.
    if isinstance(value, bool) or not isinstance(value, int):
        rule = f"a Python int >= {at_least} (neither a bool nor an integer of another library)"
        raise _refuse(field, rule, value)
    if value < at_least:
        raise _refuse(field, f"an int >= {at_least}", value)


def _require_bool(field: str, value: object, *, or_none: bool = False) -> None:
    if not isinstance(value, bool):
        raise _refuse(field, "True, False or None" if or_none else "True or False", value)


def _canonical_state_keys(keys: object) -> tuple[str, ...]:
    if not isinstance(keys, (list, tuple, set, frozenset)):
        rule = 'None or a list, tuple, set or frozenset of names, such as ["exp_avg"]'
        raise _refuse("state_keys", rule, keys)
    if not keys:
        raise _refuse("state_keys", "None (every state there is) or at least one name", keys)
    unknown = [key for key in keys if key not in STATE_KEYS]
    if unknown:
        rule = f"made of names out of {', '.join(STATE_KEYS)} ({unknown[0]!r} is none of them)"
        raise _refuse("state_keys", rule, keys)
    if len(set(keys)) != len(keys):
        raise _refuse("state_keys", "free of duplicates", keys)
    return tuple(key for key in STATE_KEYS if key in keys)
