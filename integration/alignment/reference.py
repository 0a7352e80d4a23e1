"""The optimizers' formulas in NumPy, and how far rounding may carry a backend from them.

Everything is computed in float64, so what a run of a formula differs from another's is the
formulas' own. What remains between a backend and its formula is rounding to float32, and its size
is measured here, too: see `rounding_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from problem import LAYERS, OPTIMIZERS, Array, Arrays, Hyperparameters, Problem

UNIT_ROUNDOFF = 2.0**-24
"""Largest relative error of one float32 operation."""
ROUNDINGS = 16
"""Roundings between two stored values: operators of an update (MindFormers' has the most, 16), and
about as many of the three layers' gradients, sums over a few dozen rows or columns included."""
POWER_ROUNDINGS = 2
"""Of beta^t, where it is float32: neither pow nor a product that grows by a factor per step gives
the nearest number. 1 - beta2^t makes much of it, since beta2^t is close to 1."""
SAMPLES = 8

Disturb = Callable[[Array, int], Array]
"""Takes a value and the number of roundings behind it; returns it with an error."""


class Formula(NamedTuple):
    """How an optimizer of the Adam family computes.

    Attributes:
        corrects_bias: whether moments are divided by 1 - beta^t.
        eps_before_correction: eps is added to sqrt(v) before v's correction, not after it. An eps
            so placed weighs 1 / sqrt(1 - beta2^t) times as much, some thirty times in step 1.
        scalars: the type in which hyperparameters and powers of the betas are kept. In float32,
            1 - beta2 and 1 - beta2^t lose digits: 0.001 is known to five of them.
    """

    corrects_bias: bool = True
    eps_before_correction: bool = False
    scalars: type[np.float64 | np.float32] = np.float64


FORMULAS = {
    ("torch", "adam"): Formula(),
    ("torch", "adam_large_eps"): Formula(),
    ("torch", "adamw"): Formula(),
    ("mindspore", "adam"): Formula(eps_before_correction=True, scalars=np.float32),
    ("mindspore", "adam_large_eps"): Formula(eps_before_correction=True, scalars=np.float32),
    ("mindspore", "adamw"): Formula(scalars=np.float32),
    ("mindspore", "adam_weight_decay"): Formula(corrects_bias=False, scalars=np.float32),
}


def loss_and_gradients(weights: Arrays, rows: Array, targets: Array) -> tuple[float, Arrays]:
    """Return the mean square error of the dense layers with tanh between them, and its slopes."""
    inputs = [rows]
    for layer in LAYERS:
        outputs = inputs[-1] @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        inputs.append(outputs if layer == LAYERS[-1] else np.tanh(outputs))
    difference = inputs.pop() - targets
    slope = 2 * difference / difference.size
    gradients = {}
    for layer in reversed(LAYERS):
        given = inputs.pop()
        gradients[f"{layer}.weight"] = slope.T @ given
        gradients[f"{layer}.bias"] = slope.sum(axis=0)
        slope = slope @ weights[f"{layer}.weight"] * (1 - given**2)
    return float(np.mean(difference**2)), gradients


def train(
    formula: Formula,
    hyperparameters: Hyperparameters,
    problem: Problem,
    disturb: Disturb = lambda array, roundings: array,
) -> Array:
    """Return the losses of a training run in float64.

    Args:
        formula: what an update computes.
        hyperparameters: of the optimizer.
        problem: weights, rows and rates.
        disturb: applied to every gradient, moment and parameter that is stored, and to the powers
            of the betas where these are float32.
    """
    scalar = formula.scalars
    beta1, beta2 = map(scalar, hyperparameters.betas)
    eps, decay = scalar(hyperparameters.eps), scalar(hyperparameters.weight_decay)
    weights = {name: array.astype(np.float64) for name, array in problem.weights.items()}
    moments = {name: (np.zeros_like(array),) * 2 for name, array in weights.items()}
    losses = []
    for step, rate in enumerate(problem.rates):
        rows, targets = (data[step].astype(np.float64) for data in (problem.rows, problem.targets))
        loss, gradients = loss_and_gradients(weights, rows, targets)
        losses.append(loss)
        first_part, second_part = corrections(formula, (beta1, beta2), step, disturb)
        for name, exact in gradients.items():
            gradient, (first, second) = disturb(exact, ROUNDINGS), moments[name]
            first = float(beta1) * first + float(scalar(1) - beta1) * gradient
            second = float(beta2) * second + float(scalar(1) - beta2) * gradient**2
            first, second = moments[name] = disturb(first, ROUNDINGS), disturb(second, ROUNDINGS)
            placed = float(eps) / second_part**0.5 if formula.eps_before_correction else float(eps)
            update = first / first_part / (np.sqrt(second / second_part) + placed)
            kept = weights[name] * (1 - float(rate) * float(decay))
            weights[name] = disturb(kept - float(rate) * update, ROUNDINGS)
    return np.array(losses)


def corrections(
    formula: Formula, betas: Iterable[np.floating], step: int, disturb: Disturb
) -> tuple[float, ...]:
    """Return what the two moments are divided by in a step."""
    if not formula.corrects_bias:
        return 1.0, 1.0
    powers = [beta ** formula.scalars(step + 1) for beta in betas]
    if formula.scalars is np.float32:
        powers = [disturb(power, POWER_ROUNDINGS) for power in map(np.float64, powers)]
    return tuple(1 - float(power) for power in powers)


def formula_losses(backend: str, optimizer: str, problem: Problem) -> Array:
    """Return what a backend's optimizer would lose without rounding."""
    return train(FORMULAS[backend, optimizer], OPTIMIZERS[optimizer], problem)


def rounding_bound(backend: str, optimizer: str, problem: Problem) -> Array:
    """Return, for each step, how far rounding may carry a float32 run's loss from its formula.

    Adam divides by sqrt(v), and the next gradients depend on the weights: how errors grow from
    step to step is a property of the problem, and no constant tells it. So the run is repeated in
    float64 with relative errors of `ROUNDINGS` unit roundoffs, up or down at random, in every
    gradient, moment and parameter that is stored, and of `POWER_ROUNDINGS` in float32 powers; the
    farthest of some such runs is taken. The roundings of one value all err to one side there,
    which true ones do not. To that comes the rounding of the loss itself. The bound never shrinks
    with the steps: an error that happens to cancel in one was there in the one before.
    """
    formula, hyperparameters = FORMULAS[backend, optimizer], OPTIMIZERS[optimizer]
    exact = train(formula, hyperparameters, problem)
    random = np.random.RandomState(11)

    def disturb(array: Array, roundings: int) -> Array:
        signs = random.randint(0, 2, array.shape) * 2 - 1
        return array * (1 + roundings * UNIT_ROUNDOFF * signs)

    runs = [train(formula, hyperparameters, problem, disturb) for _ in range(SAMPLES)]
    farthest = np.max([np.abs(run - exact) for run in runs], axis=0)
    return np.maximum.accumulate(farthest + ROUNDINGS * UNIT_ROUNDOFF * exact)
