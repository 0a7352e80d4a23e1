"""A model of two blocks, whole and divided among ranks.

Every class hands out the loss over all ranks and the gradients of the parameters of its rank. The
data of a step are the same however the model is divided, so that losses can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mindspore as ms
import numpy as np
from collectives import Group, SharedByParts, SumOfParts, all_gather, all_reduce
from mindspore import Parameter, Tensor, ops
from parallel import STEPS
from pool import Rank

from dtensor import DTensor
from training import Gradients, MakeOptimizer, eager

BLOCKS, WIDTH, HIDDEN = 2, 16, 256
ROWS = 16
SHAPES = {
    "block0.up": (HIDDEN, WIDTH),
    "block0.down": (WIDTH, HIDDEN),
    "block1.up": (HIDDEN, WIDTH),
    "block1.down": (WIDTH, HIDDEN),
    "bias": (WIDTH,),
}


def initial_values() -> dict[str, np.ndarray]:
    """Return the values of the whole parameters."""
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.3, shape) for name, shape in SHAPES.items()}


def data(step: int) -> tuple[Tensor, Tensor]:
    """Return all rows and targets of a step."""
    random = np.random.default_rng([1, step])
    rows, targets = random.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return Tensor(rows), Tensor(targets)


def tensor_of(values: np.ndarray, dtype: ms.Type = ms.float32) -> Tensor:
    """Return a tensor with memory of its own."""
    return Tensor(np.ascontiguousarray(values, np.float32)).astype(dtype)


def differentiate(
    loss_of: Callable[..., Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss and its gradients for all weights."""
    loss, gradients = ms.value_and_grad(loss_of, tuple(range(len(weights))))(*weights)
    return loss, gradients


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def apply(
    weights: Sequence[Tensor],
    rows: Tensor,
    *,
    shared: Callable[[Tensor], Tensor] = _as_it_is,
    added_up: Callable[[Tensor], Tensor] = _as_it_is,
) -> Tensor:
    """Apply all blocks in fp32; weights in the order of `SHAPES`.

    Args:
        weights: whole, or a rank's parts.
        rows: the input.
        shared: hands a block's input to the parts.
        added_up: makes of a rank's part of a block's result the whole.
    """
    weights = [weight.astype(ms.float32) for weight in weights]
    for block in range(BLOCKS):
        up, down = weights[2 * block : 2 * block + 2]
        rows = rows + added_up(ops.dense(ops.tanh(ops.dense(shared(rows), up)), down))
    return rows + weights[-1]


class Whole:
    """The model in one process, without communication."""

    def __init__(self) -> None:
        self.parameters = [
            Parameter(tensor_of(values), name=name) for name, values in initial_values().items()
        ]

    def give_gradients(self, step: int) -> tuple[np.ndarray, Gradients]:
        rows, targets = data(step)

        def loss_of(*weights: Tensor) -> Tensor:
            return ops.square(apply(weights, rows) - targets).mean()

        loss, gradients = differentiate(loss_of, self.parameters)
        return loss.asnumpy(), gradients


@cache
def losses_of_the_whole(make: MakeOptimizer) -> list[float]:
    """Return the losses of training the undivided model natively, in this process; made once."""
    model = Whole()
    optimizer = make(model.parameters)
    step, losses = eager(optimizer), []
    for index in range(STEPS):
        loss, gradients = model.give_gradients(index)
        step(gradients)
        losses.append(float(loss))
    return losses


class FullySharded:
    """Parameters divided by rows over pairs of ranks, and the same in every pair: 2 x 2 ranks.

    A forward gathers them, each rank has its own rows of the data, and a gradient is summed over
    all ranks before each keeps its part. Every other parameter and its gradient are DTensors.

    Args:
        rank: this rank.
        dtypes: of the parameters, two in turn for each of both kinds.
    """

    def __init__(self, rank: Rank, dtypes: Sequence[ms.Type] = (ms.float32, ms.float32)) -> None:
        self._all = tuple(range(rank.size))
        self._index = rank.index
        self._shard, self._shards = rank.index % 2, 2
        self.parameters = [
            Parameter(_wrapped(tensor_of(self._part(values), dtypes[index // 2 % 2]), index), name)
            for index, (name, values) in enumerate(initial_values().items())
        ]
        assert [2 * parameter.size for parameter in self.parameters] == [
            np.prod(shape) for shape in SHAPES.values()
        ]

    def give_gradients(self, step: int) -> tuple[np.ndarray, Gradients]:
        rows, targets = (part[self._index :: len(self._all)] for part in data(step))

        def loss_of(*weights: Tensor) -> Tensor:
            return ops.square(apply(weights, rows) - targets).mean()

        weights = [self._gathered(parameter) for parameter in self.parameters]
        loss, gradients = differentiate(loss_of, weights)
        mean = all_reduce(loss, self._all) / len(self._all)
        return mean.asnumpy(), tuple(
            _wrapped(self._reduced_and_scattered(gradient), index)
            for index, gradient in enumerate(gradients)
        )

    def _part(self, values: np.ndarray) -> np.ndarray:
        part: np.ndarray = np.split(values, self._shards)[self._shard]
        return part

    def _gathered(self, parameter: Parameter) -> Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole_rows = local.shape[0] * self._shards
        # All ranks' parts: as many whole parameters as there are pairs of ranks.
        first = self._index // self._shards * whole_rows
        gathered = all_gather(local.astype(ms.float32)).astype(local.dtype)
        return gathered[first : first + whole_rows]

    def _reduced_and_scattered(self, gradient: Tensor) -> Tensor:
        mean = all_reduce(gradient.astype(ms.float32), self._all) / len(self._all)
        return tensor_of(self._part(mean.asnumpy()), gradient.dtype)


def _wrapped(shard: Tensor, index: int) -> Tensor:
    return DTensor(shard) if index % 2 == 0 else shard


class TensorParallel:
    """The first matrix divided by rows, the second by columns, over pairs of ranks.

    Both pairs have the same parameters and rows of the data of their own: 2 x 2 ranks.
    """

    def __init__(self, rank: Rank) -> None:
        pair = rank.index // 2
        self._pairs = rank.size // 2
        self._pair = pair
        self._parts: Group = (2 * pair, 2 * pair + 1)
        self._replicas: Group = tuple(range(rank.index % 2, rank.size, 2))
        mine = rank.index % 2
        self.parameters = [
            Parameter(tensor_of(self._part(name, values, mine)), name=name)
            for name, values in initial_values().items()
        ]
        self._shared, self._sum = SharedByParts(self._parts), SumOfParts(self._parts)

    @staticmethod
    def _part(name: str, values: np.ndarray, mine: int) -> np.ndarray:
        if name == "bias":
            return values
        part: np.ndarray = np.split(values, 2, axis=1 if name.endswith("down") else 0)[mine]
        return part

    def give_gradients(self, step: int) -> tuple[np.ndarray, Gradients]:
        rows, targets = (part[self._pair :: self._pairs] for part in data(step))

        def loss_of(*weights: Tensor) -> Tensor:
            found = apply(weights, rows, shared=self._shared, added_up=self._sum)
            return ops.square(found - targets).mean()

        loss, gradients = differentiate(loss_of, self.parameters)
        return self._mean(loss).asnumpy(), tuple(self._mean(grad) for grad in gradients)

    def _mean(self, tensor: Tensor) -> Tensor:
        return all_reduce(tensor, self._replicas) / len(self._replicas)
