"""The optimizers of the demo: how they are made, how they can move, what to compare of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mindspore import Parameter, nn

from swapopt_mindspore import SwapOptimizerConfig, swap_optimizer
from swapopt_mindspore.demo import mindformers_adamw
from swapopt_mindspore.demo.observe import WatchedDevice
from swapopt_mindspore.demo.results import RunKind
from swapopt_mindspore.demo.settings import MINDFORMERS_ADAMW, OPTIMIZERS

LEARNING_RATE = 1e-3

_MOMENTS = {
    MINDFORMERS_ADAMW: ("exp_avg", "exp_avg_sq"),
    "adam": ("moment1", "moment2"),
    "adam-weight-decay": ("moments1", "moments2"),
}
_COUNTERS = ("global_step", "beta1_power", "beta2_power")
assert _MOMENTS.keys() == OPTIMIZERS.keys()


def choose_optimizer(asked: str | None) -> str:
    """Return a key of `OPTIMIZERS`: what was asked for, else MindFormers' where it is installed.

    Raises:
        DemoError: it was asked for and is not installed.
    """
    name = asked or (MINDFORMERS_ADAMW if mindformers_adamw.is_installed() else "adam")
    if name == MINDFORMERS_ADAMW:
        mindformers_adamw.load_adamw()
    return name


def kinds_of(name: str) -> tuple[RunKind, ...]:
    """Return the runs to compare: packed movement is for MindFormers' AdamW."""
    kinds = (RunKind.NATIVE, RunKind.PER_TENSOR)
    return (*kinds, RunKind.PACKED) if name == MINDFORMERS_ADAMW else kinds


def make_native(name: str, params: Sequence[Parameter]) -> nn.Optimizer:
    """Return the optimizer as it is without swapping."""
    optimizer: nn.Optimizer
    if name == MINDFORMERS_ADAMW:
        optimizer = mindformers_adamw.load_adamw()(list(params), LEARNING_RATE)
    elif name == "adam":
        optimizer = nn.Adam(list(params), learning_rate=LEARNING_RATE)
    else:
        optimizer = nn.AdamWeightDecay(list(params), learning_rate=LEARNING_RATE)
    return optimizer


def swap(
    optimizer: nn.Optimizer, kind: RunKind, swap_times: int, device: WatchedDevice
) -> nn.Optimizer:
    """Return the optimizer with its states swapped, moving as ``kind`` says."""
    packed = kind is RunKind.PACKED
    config = SwapOptimizerConfig(swap_times=swap_times, packed_swap=packed)
    return swap_optimizer(optimizer, config, device=device)


def moments_of(name: str, optimizer: nn.Optimizer) -> list[Parameter]:
    """Return the states; of a swapped optimizer what its host mirrors hold."""
    return [state for attribute in _MOMENTS[name] for state in getattr(optimizer, attribute)]


def take_fingerprints(name: str, optimizer: nn.Optimizer) -> dict[str, str]:
    """Return a digest of the bytes, dtype and shape of parameters, states and counters."""
    prints = {param.name: _fingerprint(param) for param in optimizer.parameters}
    prints |= {state.name: _fingerprint(state) for state in moments_of(name, optimizer)}
    counters = [counter for counter in _COUNTERS if hasattr(optimizer, counter)]
    return prints | {counter: _fingerprint(getattr(optimizer, counter)) for counter in counters}


def _fingerprint(tensor: Parameter) -> str:
    values = tensor.asnumpy()
    digest = hashlib.blake2b(f"{values.dtype} {values.shape}".encode(), digest_size=16)
    digest.update(values.tobytes())
    return digest.hexdigest()
