"""Ways to hold fewer activations: compute them again, or keep them in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SMALL_NUMEL = 1024

OnHost = tuple[torch.device, torch.Tensor]


class Recomputed(nn.Module):
    """Computes a module again in its backward pass."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self._use_reentrant = use_reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=self._use_reentrant)


class SavedOnHost(nn.Module):
    """Keeps what a module saves for its backward pass in pinned memory, copied in line."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with save_on_cpu(pin_memory=True, device_type=hidden.device.type):
            return self.inner(hidden)


class Offloaded(nn.Module):
    """The same, copied on a stream beside the computation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(_offload, _bring_back):
            return self.inner(hidden)


def _offload(tensor: torch.Tensor) -> torch.Tensor | OnHost:
    if tensor.numel() < SMALL_NUMEL:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    side = _side_stream(tensor.device)
    side.wait_stream(_current_stream(tensor.device))
    with side:
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    return tensor.device, host


def _bring_back(saved: torch.Tensor | OnHost) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, host = saved
    tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
    side, current = _side_stream(device), _current_stream(device)
    side.wait_stream(current)
    with side:
        tensor.copy_(host, non_blocking=True)
    current.wait_stream(side)
    return tensor


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def _current_stream(device: torch.device) -> torch.Stream:
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


TECHNIQUES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recomputed": partial(Recomputed, use_reentrant=False),
    "recomputed, reentrant": partial(Recomputed, use_reentrant=True),
    "saved on the host": SavedOnHost,
    "offloaded": Offloaded,
}
