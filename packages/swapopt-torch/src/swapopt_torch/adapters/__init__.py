"""One adapter per supported optimizer, and the choice among them."""

from __future__ import annotations

import torch

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_torch.adapters.adam import TorchNativeAdamAdapter, TorchNativeAdamWAdapter
from swapopt_torch.adapters.base import TorchAdamBaseAdapter
from swapopt_torch.adapters.hyper_adamw import TorchHyperAdamWAdapter

__all__ = ["TorchAdamBaseAdapter", "make_adapter"]

_ADAPTERS: tuple[type[TorchAdamBaseAdapter], ...] = (
    TorchNativeAdamWAdapter,
    TorchNativeAdamAdapter,
    TorchHyperAdamWAdapter,
)


def make_adapter(
    optimizer: torch.optim.Optimizer, config: SwapOptimizerConfig
) -> TorchAdamBaseAdapter:
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
    supported = ", ".join(sorted(adapter_class.serves for adapter_class in _ADAPTERS))
    raise SwapConfigError(
        f"swap_optimizer got {type(optimizer).__module__}.{type(optimizer).__qualname__}; it "
        f"supports {supported}, and subclasses of them that override neither step nor _init_group."
    )
