"""Train the problem with torch, natively and swapped, and write what came of it.

    train_torch.py train PROBLEM FOLDER            curves.npz, order.json, plain-WAY.npz
    train_torch.py resume PROBLEM FOLDER PLAIN     resumed.npz, returned-WAY.npz

PLAIN is the other backend's checkpoint, in the plain format of docs/checkpoints.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from guide import plain_functions
from problem import (
    CROSSING,
    HALF,
    LAYERS,
    OPTIMIZERS,
    STEPS,
    SWAP_TIMES,
    TORCH_OPTIMIZERS,
    WIDTHS,
    Array,
    Problem,
    load_problem,
    save_arrays,
)
from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual

WAYS = ("native", "per_tensor", "packed")
write_plain, read_plain = plain_functions("torch")


class Regressor(torch.nn.Module):
    """Three dense layers, tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        for layer, inner, outer in zip(LAYERS, WIDTHS, WIDTHS[1:], strict=False):
            self.add_module(layer, torch.nn.Linear(inner, outer))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (rows, out)."""
        for layer in LAYERS[:-1]:
            rows = torch.tanh(self.get_submodule(layer)(rows))
        outputs: torch.Tensor = self.get_submodule(LAYERS[-1])(rows)
        return outputs


class Training:
    """A model from the problem's weights, and one optimizer, native or swapped."""

    def __init__(self, problem: Problem, name: str, way: str) -> None:
        self._problem = problem
        self.model = Regressor()
        weights = {key: torch.from_numpy(array) for key, array in problem.weights.items()}
        self.model.load_state_dict(weights)
        self.model.to("virtual")
        given = OPTIMIZERS[name]
        kind = torch.optim.AdamW if name == CROSSING else torch.optim.Adam
        self.optimizer: torch.optim.Optimizer = kind(
            self.model.parameters(),
            betas=given.betas,
            eps=given.eps,
            weight_decay=given.weight_decay,
            foreach=False,
        )
        if way != "native":
            config = SwapOptimizerConfig(SWAP_TIMES, min_numel=1, packed_swap=way == "packed")
            self.optimizer = swap_optimizer(self.optimizer, config)

    def train(self, steps: Iterable[int]) -> Array:
        """Return the losses of these steps."""
        losses = []
        for step in steps:
            data = (self._problem.rows[step], self._problem.targets[step])
            rows, targets = (torch.from_numpy(array).to("virtual") for array in data)
            self.optimizer.param_groups[0]["lr"] = float(self._problem.rates[step])
            self.optimizer.zero_grad()
            loss = torch.square(self.model(rows) - targets).mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach().cpu().numpy())
        return np.array(losses)

    def results(self) -> dict[str, Array]:
        """Return parameters, states and step counts by name."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().cpu().numpy().copy()
            for key, value in self.optimizer.state[parameter].items():
                # A copy, since the state is a host mirror, which the next step writes to.
                found[f"{key}.{name}"] = value.detach().cpu().numpy().copy()
        return found

    def order(self) -> list[list[str | int]]:
        """Return what one more step issues: copies with their bytes, and updates between them."""
        torch.virtual.synchronize()
        virtual.clear_timeline()
        self.optimizer.step()
        torch.virtual.synchronize()
        rows: list[list[str | int]] = []
        for row in virtual.timeline():
            if row.lane in ("h2d", "d2h"):
                rows.append([row.lane, row.nbytes])
            elif row.lane == "compute" and rows[-1:] != [["update", 0]]:
                rows.append(["update", 0])
        return rows


def train_all(problem: Problem, folder: Path) -> None:
    """Train with every optimizer in every way."""
    curves, orders = {}, {}
    for name in TORCH_OPTIMIZERS:
        for way in WAYS:
            training = Training(problem, name, way)
            losses = training.train(range(HALF))
            if name == CROSSING:
                write_plain(folder / f"plain-{way}.npz", training.model, training.optimizer)
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
    for way in WAYS:
        training = Training(problem, CROSSING, way)
        read_plain(plain, training.model, training.optimizer)
        write_plain(folder / f"returned-{way}.npz", training.model, training.optimizer)
        curves[f"{way}/losses"] = training.train(range(HALF, STEPS))
        for key, array in training.results().items():
            curves[f"{way}/{key}"] = array
    save_arrays(folder / "resumed.npz", curves)


def main(command: str, problem: str, folder: str, *plain: str) -> None:
    """Run one of the two commands."""
    torch.set_num_threads(1)
    virtual.enable("h200", races="raise", late_copies=True)
    if command == "train":
        train_all(load_problem(Path(problem)), Path(folder))
    else:
        resume_all(load_problem(Path(problem)), Path(folder), Path(*plain))


if __name__ == "__main__":
    main(*sys.argv[1:])
