"""Values that an optimizer keeps once, or once per parameter."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

ValueT = TypeVar("ValueT")

PerParameter: TypeAlias = ValueT | tuple[ValueT, ...]
"""One value for all parameters, or one for each."""


def value_of(values: PerParameter[ValueT], index: int) -> ValueT:
    """Return the value for one parameter."""
    return values[index] if isinstance(values, tuple) else values
