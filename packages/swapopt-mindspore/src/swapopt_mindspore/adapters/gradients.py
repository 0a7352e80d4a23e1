"""What a step is given: one gradient per parameter, or None."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor

from swapopt_common import SwapConfigError
from swapopt_mindspore.slots import MindSporeUnit


def checked_gradients(
    gradients: object, units: Sequence[MindSporeUnit], serves: str
) -> list[Tensor | None]:
    """Return the gradients as a list with one entry per unit.

    Raises:
        SwapConfigError: they are no tuple or list, not one for each parameter, or one is neither
            None nor a dense tensor of its parameter's shape.
    """
    if not isinstance(gradients, (tuple, list)):
        raise SwapConfigError(
            f"a swapped {serves} is called with a tuple or list of gradients, one for each of its "
            f"{len(units)} parameters; found {type(gradients).__name__}."
        )
    if len(gradients) != len(units):
        raise SwapConfigError(
            f"a swapped {serves} expected {len(units)} gradients, one for each of its parameters, "
            f"and found {len(gradients)}. Differentiate with respect to optimizer.parameters, and "
            "pass None for a parameter that took no part."
        )
    return [_checked(gradient, unit) for gradient, unit in zip(gradients, units, strict=True)]


def _checked(gradient: object, unit: MindSporeUnit) -> Tensor | None:
    if gradient is None:
        return None
    if not isinstance(gradient, Tensor):
        raise SwapConfigError(
            f"the gradient of {unit.name} must be a dense Tensor or None; found "
            f"{type(gradient).__name__}."
        )
    if tuple(gradient.shape) != tuple(unit.param.shape):
        raise SwapConfigError(
            f"the gradient of {unit.name} must have its shape {tuple(unit.param.shape)}; found "
            f"{tuple(gradient.shape)}. Gradients come in the order of optimizer.parameters."
        )
    return gradient
