"""A model of experts on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from collectives import Group, SharedByParts, SumOfParts, all_gather
from mindspore import Parameter, Tensor, ops
from models import ROWS, WIDTH, data, differentiate, tensor_of
from pool import Rank

from training import Gradients


class ExpertParallel:
    """Two experts on each rank behind a matrix that every rank has.

    All ranks' tokens are gathered, each rank computes what its experts get, and the results are
    added up. In every step one expert of all, another each time, gets nothing.
    Its gradient is None in even steps and zero in odd ones.

    Attributes:
        idle_steps: the steps in which an expert of this rank got nothing.
    """

    EXPERTS_PER_RANK = 2

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        everybody: Group = tuple(range(rank.size))
        first = rank.index * self.EXPERTS_PER_RANK
        self._experts = range(first, first + self.EXPERTS_PER_RANK)
        self.idle_steps: list[int] = []
        shapes = {"shared": (WIDTH, WIDTH)}
        for expert in self._experts:
            shapes |= {f"expert{expert}.up": (128, WIDTH), f"expert{expert}.down": (WIDTH, 128)}
        self.parameters = [
            Parameter(tensor_of(self._values(name, shape)), name=name)
            for name, shape in shapes.items()
        ]
        self._to_experts, self._from_experts = SharedByParts(everybody), SumOfParts(everybody)

    @staticmethod
    def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(list(name.encode())).normal(0, 0.3, shape)

    def give_gradients(self, step: int) -> tuple[np.ndarray, Gradients]:
        tokens, targets = (
            all_gather(tensor_of(np.split(part.asnumpy(), self._rank.size)[self._rank.index]))
            for part in data(step)
        )
        chosen = self._tokens_of_experts(step)

        def loss_of(shared: Tensor, *experts: Tensor) -> Tensor:
            hidden = self._to_experts(ops.tanh(ops.dense(tokens, shared)))
            mixed = hidden * 0.0
            for place, rows in enumerate(chosen):
                up, down = experts[2 * place : 2 * place + 2]
                mixed = mixed + rows * ops.dense(ops.tanh(ops.dense(hidden, up)), down)
            return ops.square(self._from_experts(mixed) - targets).mean()

        loss, (shared, *experts) = differentiate(loss_of, self.parameters)
        return loss.asnumpy(), (shared, *self._without_idle(step, experts, chosen))

    def _tokens_of_experts(self, step: int) -> list[Tensor]:
        """Return, for each expert of this rank, a column with 1 for the tokens it gets."""
        count = self._rank.size * self.EXPERTS_PER_RANK
        idle = step % count
        busy = [expert for expert in range(count) if expert != idle]
        chosen = [busy[(token * 3 + step) % len(busy)] for token in range(ROWS)]
        return [
            tensor_of(np.array([[float(choice == expert)] for choice in chosen]))
            for expert in self._experts
        ]

    def _without_idle(
        self, step: int, experts: Sequence[Tensor], chosen: Sequence[Tensor]
    ) -> Gradients:
        gradients: list[Tensor | None] = list(experts)
        for place, rows in enumerate(chosen):
            if not rows.asnumpy().any():
                self.idle_steps.append(step)
                its = slice(2 * place, 2 * place + 2)
                assert not any(gradient.asnumpy().any() for gradient in experts[its])
                if step % 2 == 0:
                    gradients[its] = [None, None]
        return tuple(gradients)
