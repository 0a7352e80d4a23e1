"""Swapped states together with fewer activations: recomputed, or kept on the host."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import mindformers_adamw
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import adam, adamw
from training import Gradients, Run, Step, assert_same_run, collect, eager

WIDTH, ROWS, BLOCKS, STEPS = 16, 12, 3, 8


class Block(nn.Cell):
    """A matrix and a bend; counts how often its forward runs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        values = np.random.default_rng(index).normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32)
        self.weight = Parameter(Tensor(values), name=f"block{index}.weight")
        self.forwards = 0

    def construct(self, rows: Tensor) -> Tensor:
        self.forwards += 1
        return rows + ops.tanh(ops.dense(rows, self.weight))


class ToHost:
    """Keeps what a backward will need as host arrays.

    Attributes:
        kept, fetched: how many tensors were put away and taken back.
    """

    def __init__(self) -> None:
        self.kept = self.fetched = 0

    def pack(self, tensor: Tensor) -> tuple[np.ndarray, ms.Type]:
        self.kept += 1
        return tensor.asnumpy().copy(), tensor.dtype

    def unpack(self, packed: tuple[np.ndarray, ms.Type]) -> Tensor:
        self.fetched += 1
        values, dtype = packed
        return Tensor(values, dtype)


class Network:
    """Some blocks, and how their activations are dealt with.

    Attributes:
        blocks: the cells with the parameters.
        host: counts what hooks have moved.
    """

    def __init__(self) -> None:
        self.blocks = [Block(index) for index in range(BLOCKS)]
        self.host = ToHost()

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows

    def weights(self) -> list[Parameter]:
        return [block.weight for block in self.blocks]

    def forwards(self) -> int:
        return sum(block.forwards for block in self.blocks)


class RecomputedCells(Network):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.recompute()


class RecomputedCalls(Network):
    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = ms.recompute(block, rows)
        return rows


class KeptOnTheHost(Network):
    def forward(self, rows: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(self.host.pack, self.host.unpack):
            return super().forward(rows)


def train(network: Network, optimizer: nn.Optimizer, step: Step) -> Run:
    """Train for `STEPS` steps; ``step`` is called with the gradients."""
    run = Run()
    for index in range(STEPS):
        loss, gradients = _differentiated(network, list(optimizer.parameters), index)
        step(gradients)
        run.losses.append(loss.asnumpy())
    collect(run, optimizer)
    return run


def _differentiated(
    network: Network, weights: list[Parameter], step: int
) -> tuple[Tensor, Gradients]:
    random = np.random.default_rng([1, step])
    rows, targets = random.normal(size=(2, ROWS, WIDTH)).astype(np.float32)

    def loss_of(rows: Tensor, targets: Tensor) -> Tensor:
        return ops.square(network.forward(rows) - targets).mean()

    loss, gradients = ms.value_and_grad(loss_of, None, weights)(Tensor(rows), Tensor(targets))
    return loss, gradients


@pytest.mark.parametrize(
    ("kind", "forwards_per_step"),
    [(Network, 1), (RecomputedCells, 2), (RecomputedCalls, 2), (KeptOnTheHost, 1)],
    ids=["kept", "recompute_of_a_cell", "recompute_of_a_call", "hooks_to_the_host"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["per_tensor", "packed"])
def test_with_fewer_activations(kind: type[Network], forwards_per_step: int, packed: bool) -> None:
    """Equal to training without any of it: every activation kept, states on the device."""
    if packed:
        mindformers_adamw.home()  # skips where it is not installed
    make, plain = adamw if packed else adam, Network()
    native_optimizer = make(plain.weights())
    native = train(plain, native_optimizer, eager(native_optimizer))
    network, device = kind(), EmulatedDevice()
    config = SwapOptimizerConfig(swap_times=BLOCKS, min_numel=0, packed_swap=packed)
    optimizer = swap_optimizer(make(network.weights()), config, device=device)

    swapped = train(network, optimizer, optimizer)

    assert_same_run(swapped, native)
    assert network.forwards() == forwards_per_step * BLOCKS * STEPS
    moves = kind is KeptOnTheHost
    assert (network.host.kept > 0) == (network.host.fetched > 0) == moves
    assert optimizer.swap_stats().swapped_nbytes == BLOCKS * 2 * WIDTH * WIDTH * 4
