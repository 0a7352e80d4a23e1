"""Training runs to compare: the same model, data and optimizer, stepped in different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

Gradients = tuple[Tensor | None, ...]
MakeOptimizer = Callable[[list[Parameter]], nn.Optimizer]
Step = Callable[[Gradients], object]
Differentiate = Callable[[nn.Cell, nn.Optimizer, int, float], tuple[np.ndarray, Gradients]]

WIDTHS = (16, 32, 8)
ROWS = 12

_STATE_TUPLES = (
    *("moment1", "moment2", "vhat"),
    *("moments1", "moments2"),
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "fp32_params"),
)
_COUNTERS = ("global_step", "beta1_power", "beta2_power")


class Regressor(nn.Cell):
    """Two dense layers and a scale between them: 6 parameters, a dtype each, fp32 compute.

    Of few operators: each takes milliseconds, forward and backward, on a busy machine.

    Names hold ``gamma`` and ``beta`` where MindSpore's default leaves weight decay out.
    """

    def __init__(self, dtypes: Sequence[ms.Type], seed: int = 0) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        shapes = {}
        for layer, (inner, outer) in enumerate(pairwise(WIDTHS)):
            shapes[f"layer{layer}.weight"] = (outer, inner)
            shapes[f"layer{layer}.bias"] = (outer,)
        shapes |= {"norm.gamma": (WIDTHS[1],), "norm.beta": (WIDTHS[1],)}
        self.weights = ms.ParameterTuple(
            Parameter(
                Tensor(random.normal(0, 0.3, shape).astype(np.float32)).astype(
                    dtypes[index % len(dtypes)]
                ),
                name=name,
            )
            for index, (name, shape) in enumerate(shapes.items())
        )

    def construct(self, rows: Tensor) -> Tensor:
        weights = [weight.astype(ms.float32) for weight in self.weights]
        hidden = ops.dense(rows, weights[0], weights[1]) * weights[4] + weights[5]
        return ops.dense(ops.tanh(hidden), weights[2], weights[3])


@dataclass
class Run:
    """What a training run left, as NumPy arrays by name."""

    losses: list[np.ndarray] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    counters: dict[str, np.ndarray] = field(default_factory=dict)


def through_the_model(
    model: nn.Cell, optimizer: nn.Optimizer, step: int, loss_scale: float
) -> tuple[np.ndarray, Gradients]:
    """Return the loss on rows made for this step, and MindSpore's gradients."""
    random = np.random.default_rng([1, step])
    rows, targets = random.normal(size=(2, ROWS, WIDTHS[0])).astype(np.float32)

    def forward(rows: Tensor, targets: Tensor) -> Tensor:
        # Not ops.cross_entropy: on a CPU its last bit differs from call to call.
        return ops.square(model(rows) - targets).mean() * loss_scale

    differentiated = ms.value_and_grad(forward, None, optimizer.parameters)
    loss, gradients = differentiated(Tensor(rows), Tensor(targets[:, : WIDTHS[-1]]))
    return loss.asnumpy(), gradients


def towards_targets(
    model: nn.Cell, optimizer: nn.Optimizer, step: int, loss_scale: float
) -> tuple[np.ndarray, Gradients]:
    """Return how far the parameters are from this step's targets, and the gradients of that.

    In NumPy: a backward pass of MindSpore takes longer than all the rest of such a run.
    """
    del model
    loss, gradients = np.float32(0), []
    for index, param in enumerate(optimizer.parameters):
        target = np.random.default_rng([2, step, index]).normal(size=param.shape)
        distance = param.asnumpy().astype(np.float32) - target.astype(np.float32)
        loss += np.square(distance).mean()
        gradients.append(Tensor(distance * (0.1 * loss_scale), param.dtype))
    return np.asarray(loss), tuple(gradients)


def train(
    make: MakeOptimizer,
    stepped: Callable[[nn.Optimizer], Step],
    *,
    steps: int = 8,
    dtypes: Sequence[ms.Type] = (ms.float32,),
    missing: Mapping[int, set[int]] | None = None,
    loss_scale: float = 1.0,
    differentiate: Differentiate = through_the_model,
) -> Run:
    """Train for some steps and collect what is left.

    Args:
        make: makes the optimizer over the model's parameters.
        stepped: makes of the optimizer what is called with the gradients.
        steps: how many steps.
        dtypes: of the parameters, in turn.
        missing: for a step, the indices of parameters whose gradient is None.
        loss_scale: what the differentiated loss is multiplied with.
        differentiate: returns loss and gradients of a step.
    """
    model = Regressor(dtypes)
    optimizer = make(list(model.trainable_params()))
    step = stepped(optimizer)
    run = Run()
    for index in range(steps):
        loss, gradients = differentiate(model, optimizer, index, loss_scale)
        without = (missing or {}).get(index, set())
        step(tuple(None if i in without else gradient for i, gradient in enumerate(gradients)))
        run.losses.append(loss)
    collect(run, optimizer)
    return run


def eager(optimizer: nn.Optimizer) -> Step:
    """Step natively: the whole of construct, without compiling it."""
    construct = type(optimizer).construct
    plain = getattr(construct, "__wrapped__", construct)
    return lambda gradients: plain(optimizer, gradients)


def compiled(optimizer: nn.Optimizer) -> Step:
    """Step natively, as users do: nn.Adam and nn.AdamWeightDecay compile their construct."""
    return optimizer


def eager_leaving_alone(optimizer: nn.Optimizer) -> Step:
    """Step natively with a None among the gradients, which native refuses.

    The parameter gets a gradient of zeros, and afterwards it and its states get back the values
    that they had.
    """
    step = eager(optimizer)

    def leaving_alone(gradients: Gradients) -> None:
        alone = [
            tensor
            for index, gradient in enumerate(gradients)
            for tensor in of_parameter(optimizer, index).values()
            if gradient is None
        ]
        before = [copy_of(tensor) for tensor in alone]
        step(
            tuple(
                ops.zeros_like(param) if gradient is None else gradient
                for param, gradient in zip(optimizer.parameters, gradients, strict=True)
            )
        )
        for tensor, values in zip(alone, before, strict=True):
            tensor.copy_(Tensor(values, tensor.dtype))

    return leaving_alone


def of_parameter(optimizer: nn.Optimizer, index: int) -> dict[str, Parameter]:
    """Return a parameter and all states that the optimizer has for it, by name."""
    param = optimizer.parameters[index]
    tuples = {name: getattr(optimizer, name, None) for name in _STATE_TUPLES}
    states = {name: states[index] for name, states in tuples.items() if states}
    return {param.name: param} | {f"{name}:{state.name}": state for name, state in states.items()}


def snapshot(optimizer: nn.Optimizer) -> Run:
    """Return parameters, states and counters as they are now."""
    run = Run()
    collect(run, optimizer)
    return run


def collect(run: Run, optimizer: nn.Optimizer) -> None:
    """Copy parameters, states and counters of a native optimizer."""
    for index, param in enumerate(optimizer.parameters):
        run.parameters[param.name] = copy_of(param)
        for name, state in of_parameter(optimizer, index).items():
            run.states[name] = copy_of(state)
    for name in _COUNTERS:
        if hasattr(optimizer, name):
            run.counters[name] = copy_of(getattr(optimizer, name))


def copy_of(tensor: Tensor) -> np.ndarray:
    """Return the values after everything issued so far."""
    values: np.ndarray = tensor.asnumpy().copy()
    return values


def assert_same_run(found: Run, expected: Run) -> None:
    """Losses, parameters, states and counters are equal byte for byte, and finite."""
    for step, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert_same_bytes(loss, other, f"loss of step {step}")
    for kind in ("parameters", "states", "counters"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert list(ours) == list(theirs), f"{kind}: {list(ours)} instead of {list(theirs)}"
        for name, values in ours.items():
            assert_same_bytes(values, theirs[name], name)


def assert_same_bytes(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    assert np.isfinite(found.astype(np.float32)).all(), f"{what} is not finite"
    assert found.tobytes() == expected.tobytes(), f"{what} differs"
