"""FSDP2 on four ranks: a checkpoint is restored into a fresh model, and training goes on equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from fully_sharded import Setting, sharded
from parallel import MIN_NUMEL, Outcome, Training, compare, copied, local
from pool import Rank, RankPool
from torch.distributed.tensor import DTensor

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from training import assert_same_bits

SAVED_AFTER, STEPS = 3, 6
SETTING = Setting("AdamW", computed=torch.bfloat16)


@dataclass
class Swapped:
    """A training whose optimizer is swapped."""

    training: Training
    optimizer: TorchSwapOptimizer

    @classmethod
    def build(cls, rank: Rank, packed: bool, seed: int) -> Swapped:
        torch.manual_seed(seed)
        training = sharded(rank, SETTING)
        config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
        return cls(training, swap_optimizer(training.optimizers[0], config))

    def train(self, first: int, end: int) -> list[torch.Tensor]:
        losses = []
        for step in range(first, end):
            losses.append(copied(self.training.give_gradients(step)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's parts of the parameters and of their states."""
        values = {}
        for name, parameter in self.training.module.named_parameters():
            values[name] = copied(parameter)
            for key, state in self.optimizer.state[parameter].items():
                values[f"{name}.{key}"] = copied(state)
        return values

    def check_storage(self, packed: bool) -> None:
        """Large states lie pinned on the host, each in a storage of its own, and small ones not."""
        stats = self.optimizer.swap_stats()
        assert stats.packed is packed
        assert (stats.arena_nbytes > 0) is packed
        assert set(stats.resident_states) <= {f"smaller than min_numel={MIN_NUMEL}", "empty"}
        for parameter, state in self.optimizer.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                part = local(state[key])
                assert isinstance(state[key], DTensor)
                assert (state[key].device.type == "cpu") is (part.numel() >= MIN_NUMEL)
                assert state[key].placements == parameter.placements
                if part.device.type == "cpu":
                    assert part.is_pinned()
                    assert part.untyped_storage().nbytes() == part.nbytes


def restore(rank: Rank, packed: bool, native: Outcome) -> None:
    """Save a training in the middle, restore it into another, and go on with both."""
    first, second = (Swapped.build(rank, packed, seed) for seed in (0, 1))
    first.train(0, SAVED_AFTER)
    model = {name: value.clone() for name, value in first.training.module.state_dict().items()}
    states = first.optimizer.state_dict()
    # The first goes on before the second is loaded: what was saved must not change with it.
    losses = [first.train(SAVED_AFTER, STEPS)]
    second.training.module.load_state_dict(model)
    second.optimizer.load_state_dict(states)
    second.check_storage(packed)
    losses.append(second.train(SAVED_AFTER, STEPS))
    for found in losses:
        for step, loss in enumerate(found, SAVED_AFTER):
            assert_same_bits(loss, native.losses[step], f"loss of step {step}")
    expected = native.parameters | native.states
    for values in (first.values(), second.values()):
        assert set(values) == set(expected)
        for name, value in values.items():
            assert_same_bits(value, expected[name], name)
    first.check_storage(packed)


def align_and_restore(rank: Rank) -> None:
    native = compare(rank, partial(sharded, setting=SETTING), steps=STEPS)["native"]
    for packed in (True, False):
        restore(rank, packed, native)


def test_fully_shard_optimizer_swap_adamw_4card_parameter_align(four_ranks: RankPool) -> None:
    """As native on every rank, with less memory; restored, training goes on as if uninterrupted."""
    four_ranks.run(align_and_restore)
