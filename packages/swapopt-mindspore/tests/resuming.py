"""One interrupted training run; as a program, it resumes from a file and takes the next step."""

from __future__ import annotations

import sys

import mindspore as ms
from mindspore import nn

import mindformers_adamw
from cases import MINDFORMERS, NATIVE, Case
from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from training import Regressor, eager, towards_targets

STEPS = 58
RATES = [0.02 / (1 + step) for step in range(2 * STEPS)]

CASES = {
    "adam": Case(lambda params: nn.Adam(params, learning_rate=RATES, use_amsgrad=True)),
    "adam_weight_decay": NATIVE["adam_weight_decay_groups_rising_decay"],
    "mindformers": Case(
        lambda params: mindformers_adamw.home().AdamW(
            params, learning_rate=RATES, weight_decay=0.1
        ),
        MINDFORMERS["mindformers_masters"].dtypes,
    ),
}


class Training:
    """A model and its optimizer, native or swapped.

    Args:
        name: one of `CASES`.
        swapped: whether the optimizer's states are swapped, masters included.
    """

    def __init__(self, name: str, *, swapped: bool) -> None:
        self.model = Regressor(CASES[name].dtypes)
        self.optimizer = CASES[name].make(list(self.model.trainable_params()))
        if swapped:
            config = SwapOptimizerConfig(
                swap_times=3, min_numel=20, include_master_params=name == "mindformers"
            )
            self.optimizer = swap_optimizer(self.optimizer, config, device=EmulatedDevice())

    def proceed(self, steps: range) -> None:
        """Take the given steps."""
        is_swapped = isinstance(self.optimizer, MindSporeSwapOptimizer)
        step_with = self.optimizer if is_swapped else eager(self.optimizer)
        for step in steps:
            _, gradients = towards_targets(self.model, self.optimizer, step, 1.0)
            step_with(gradients)

    def save(self, path: str) -> None:
        """Write model, states and counters: the optimizer has all of them by name."""
        ms.save_checkpoint(self.optimizer, path)


def main(folder: str) -> None:
    """Resume every case from its file at step 58, take the next step and save that."""
    for name in CASES:
        training = Training(name, swapped=True)
        ms.load_checkpoint(f"{folder}/{name}-{STEPS}.ckpt", net=training.optimizer)
        training.proceed(range(STEPS, STEPS + 1))
        training.save(f"{folder}/{name}-{STEPS + 1}.ckpt")


if __name__ == "__main__":
    main(sys.argv[1])
