"""Steps that an adapter takes without any swapping: its slots hold the optimizer's own states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspore import nn

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.adapters import make_adapter
from swapopt_mindspore.slots import MindSporeUnit
from training import Gradients

Batches = list[list[MindSporeUnit]]


class Adapted:
    """Called like an optimizer; updates batch by batch as a pipeline would.

    Args:
        optimizer: the native optimizer.
        config: the configuration to hand to the adapter.
        arrange: reorders the batches of a step.
    """

    def __init__(
        self,
        optimizer: nn.Optimizer,
        config: SwapOptimizerConfig | None = None,
        arrange: Callable[[Batches], Sequence[list[MindSporeUnit]]] = list,
    ) -> None:
        self.adapter = make_adapter(optimizer, config or SwapOptimizerConfig())
        self.adapter.register_units(None)
        self._arrange = arrange

    def __call__(self, gradients: Gradients) -> tuple[bool | None, ...]:
        adapter = self.adapter
        adapter.prepare_step(gradients)
        # Nothing swaps, so all units are of size 0: cut by count.
        units = list(adapter.iter_update_units())
        batches = [units[start : start + 2] for start in range(0, len(units), 2)]
        for batch in self._arrange(batches):
            adapter.step_batch(batch)
        adapter.finish_step()
        adapter.drop_gradients()
        return adapter.results
