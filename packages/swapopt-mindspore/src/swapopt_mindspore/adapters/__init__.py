"""One adapter per supported optimizer, and the choice among them."""

from __future__ import annotations

from typing import TypeAlias

from mindspore import nn

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore.adapters.adam import MindSporeNativeAdamAdapter
from swapopt_mindspore.adapters.adam_weight_decay import MindSporeNativeAdamWAdapter
from swapopt_mindspore.adapters.base import MindSporeAdamBaseAdapter
from swapopt_mindspore.adapters.mindformers_adamw import MindFormersAdamWAdapter

__all__ = [
    "AnyAdapter",
    "MindFormersAdamWAdapter",
    "MindSporeAdamBaseAdapter",
    "MindSporeNativeAdamAdapter",
    "MindSporeNativeAdamWAdapter",
    "make_adapter",
]

AnyAdapter: TypeAlias = (
    MindSporeNativeAdamAdapter | MindSporeNativeAdamWAdapter | MindFormersAdamWAdapter
)

_ADAPTERS: tuple[type[AnyAdapter], ...] = (
    MindSporeNativeAdamAdapter,
    MindSporeNativeAdamWAdapter,
    MindFormersAdamWAdapter,
)


def make_adapter(optimizer: nn.Optimizer, config: SwapOptimizerConfig) -> AnyAdapter:
    """Return the adapter that serves ``optimizer``.

    Raises:
        SwapConfigError: no adapter does, or the one that does refuses its settings; nothing has
            changed.
    """
    for adapter_class in _ADAPTERS:
        if adapter_class.matches(optimizer):
            adapter = adapter_class(optimizer, config)
            adapter.validate()
            return adapter
    supported = ", ".join(adapter_class.serves for adapter_class in _ADAPTERS)
    raise SwapConfigError(
        f"swap_optimizer got {type(optimizer).__module__}.{type(optimizer).__qualname__}; it "
        f"supports {supported}, and subclasses of them that leave construct and what it calls "
        "as they are."
    )
