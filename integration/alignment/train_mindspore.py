"""Train the problem with MindSpore, natively and swapped, and write what came of it.

    train_mindspore.py train PROBLEM FOLDER            curves.npz, order.json, plain-WAY.npz
    train_mindspore.py resume PROBLEM FOLDER PLAIN     resumed.npz, returned-WAY.npz

PLAIN is the other backend's checkpoint, in the plain format of docs/checkpoints.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # read when mindspore is imported

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from guide import plain_functions
from problem import (
    CROSSING,
    HALF,
    LAYERS,
    MINDSPORE_OPTIMIZERS,
    OPTIMIZERS,
    STEPS,
    SWAP_TIMES,
    WIDTHS,
    Array,
    Problem,
    load_problem,
    save_arrays,
)
from swapopt_mindspore import MindSporeSwapOptimizer, SwapOptimizerConfig, swap_optimizer
from swapopt_mindspore.demo.mindformers_adamw import load_adamw
from swapopt_mindspore.emulated import EmulatedDevice

STATES = {
    "exp_avg": ("moment1", "moments1", "exp_avg"),
    "exp_avg_sq": ("moment2", "moments2", "exp_avg_sq"),
}
write_plain, read_plain = plain_functions("mindspore")


class Regressor(nn.Cell):
    """Three dense layers, tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        for layer, inner, outer in zip(LAYERS, WIDTHS, WIDTHS[1:], strict=False):
            setattr(self, layer, nn.Dense(inner, outer))  # which names its parameters

    def construct(self, rows: Tensor) -> Tensor:
        """Return (rows, out)."""
        first, second, third = self.cells()
        return third(ops.tanh(second(ops.tanh(first(rows)))))


def ways_of(name: str) -> tuple[str, ...]:
    """Return how an optimizer can be stepped: packed movement is for MindFormers' AdamW."""
    return ("native", "per_tensor", "packed") if name == CROSSING else ("native", "per_tensor")


def make_optimizer(name: str, params: list[Parameter], rates: list[float]) -> nn.Optimizer:
    """Return the native optimizer; the learning rate is a list of all steps'."""
    given = OPTIMIZERS[name]
    if name == CROSSING:
        return load_adamw()(
            params, rates, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
        )
    beta1, beta2 = given.betas
    if name == "adam_weight_decay":
        return nn.AdamWeightDecay(params, rates, beta1, beta2, given.eps, given.weight_decay)
    return nn.Adam(params, rates, beta1, beta2, given.eps)


class Training:
    """A model from the problem's weights, and one optimizer, native or swapped."""

    def __init__(self, problem: Problem, name: str, way: str) -> None:
        self._problem = problem
        self.device = EmulatedDevice(races="raise", late_copies=True)
        model = Regressor()
        params: list[Parameter] = list(model.trainable_params())
        assert [param.name for param in params] == list(problem.weights)
        for param in params:
            param.set_data(Tensor(problem.weights[param.name]))
        # One rate more than steps: the last step of all is the one whose order is recorded.
        rates = [float(rate) for rate in (*problem.rates, problem.rates[-1])]
        self.optimizer = make_optimizer(name, params, rates)
        if way != "native":
            config = SwapOptimizerConfig(SWAP_TIMES, min_numel=1, packed_swap=way == "packed")
            self.optimizer = swap_optimizer(self.optimizer, config, device=self.device)

        def loss_of(rows: Tensor, targets: Tensor) -> Tensor:
            return ops.square(model(rows) - targets).mean()

        self._differentiate = ms.value_and_grad(loss_of, None, self.optimizer.parameters)

    def step(self, step: int) -> Tensor:
        """Take one step; return its loss."""
        data = (self._problem.rows[step], self._problem.targets[step])
        loss, gradients = self._differentiate(*map(Tensor, data))
        self.optimizer(gradients)
        return loss

    def train(self, steps: Iterable[int]) -> Array:
        """Return the losses of these steps."""
        return np.array([self.step(step).asnumpy() for step in steps])

    def results(self) -> dict[str, Array]:
        """Return parameters and states by name."""
        params = self.optimizer.parameters
        found = {param.name: param.asnumpy().copy() for param in params}
        for key, attributes in STATES.items():
            tuples = (getattr(self.optimizer, attribute, ()) for attribute in attributes)
            for param, state in zip(params, chain(*tuples), strict=True):
                found[f"{key}.{param.name}"] = state.asnumpy().copy()
        return found

    def order(self) -> list[list[str | int]]:
        """Return what one more step issues: copies with their bytes, and updates between them."""
        assert isinstance(self.optimizer, MindSporeSwapOptimizer)
        self.optimizer.synchronize()
        self.device.clear_timeline()
        self.step(STEPS - 1)
        self.optimizer.synchronize()
        rows: list[list[str | int]] = []
        for row in self.device.timeline():
            if row.lane in ("h2d", "d2h"):
                rows.append([row.lane, row.nbytes])
            elif row.lane == "compute" and rows[-1:] != [["update", 0]]:
                rows.append(["update", 0])
        return rows


def train_all(problem: Problem, folder: Path) -> None:
    """Train with every optimizer in every way."""
    curves, orders = {}, {}
    for name in MINDSPORE_OPTIMIZERS:
        for way in ways_of(name):
            training = Training(problem, name, way)
            losses = training.train(range(HALF))
            if name == CROSSING:
                write_plain(folder / f"plain-{way}.npz", training.optimizer)
            curves[f"{name}/{way}/losses"] = np.concatenate(
                [losses, training.train(range(HALF, STEPS))]
            )
            for key, array in training.results().items():
                curves[f"{name}/{way}/{key}"] = array
            if name == CROSSING and way != "native":
                orders[way] = training.order()
    save_arrays(folder / "curves.npz", curves)
    (folder / "order.json").write_text(json.dumps(orders))


def resume_all(problem: Problem, folder: Path, plain: Path) -> None:
    """Read the other backend's checkpoint, write it back, and train to the end."""
    curves = {}
    for way in ways_of(CROSSING):
        training = Training(problem, CROSSING, way)
        read_plain(plain, training.optimizer)
        write_plain(folder / f"returned-{way}.npz", training.optimizer)
        curves[f"{way}/losses"] = training.train(range(HALF, STEPS))
        for key, array in training.results().items():
            curves[f"{way}/{key}"] = array
    save_arrays(folder / "resumed.npz", curves)


def main(command: str, problem: str, folder: str, *plain: str) -> None:
    """Run one of the two commands."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if command == "train":
        train_all(load_problem(Path(problem)), Path(folder))
    else:
        resume_all(load_problem(Path(problem)), Path(folder), Path(*plain))


if __name__ == "__main__":
    main(*sys.argv[1:])
