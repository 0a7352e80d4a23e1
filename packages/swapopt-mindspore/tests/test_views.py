"""Why batches hold whole parameters: what MindSpore's operators do with parts of a tensor.

A range of a parameter can be had as a view. An operator that leaves a view unwritten cannot update
the range; the arithmetic itself could be cut anywhere. Should a view be written some day, these
tests say so, and docs/mindspore.md has to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import mindformers_adamw
from training import assert_same_bytes

NUMEL = 4096 + 77
CUTS = (0, 13, 512, 2048, NUMEL)
Update = Callable[[Tensor, Tensor, Tensor, Tensor], object]


def adam(param: Parameter) -> Update:
    optimizer = nn.Adam([param], 0.02)
    powers = (Tensor(0.9, ms.float32), Tensor(0.999, ms.float32))
    rates = (Tensor(0.02, ms.float32), optimizer.beta1, optimizer.beta2, optimizer.eps)
    return lambda p, m, v, gradient: optimizer.opt(p, m, v, *powers, *rates, gradient)


def adam_weight_decay(param: Parameter) -> Update:
    optimizer = nn.AdamWeightDecay([param], 0.02)
    rates = (Tensor(0.02, ms.float32), optimizer.beta1, optimizer.beta2, optimizer.eps)
    decay = Tensor(0.1, ms.float32)
    return lambda p, m, v, gradient: optimizer.fused_opt(p, m, v, *rates, decay, gradient)


def mindformers(param: Parameter) -> Update:
    home = mindformers_adamw.home()
    optimizer = home.AdamW([param], learning_rate=0.02)
    rates = (optimizer.beta1, optimizer.beta2, optimizer.eps, 0.02, 0.1)
    corrections = (1.0 - optimizer.beta1 ** Tensor(1), 1.0 - optimizer.beta2 ** Tensor(1))
    return lambda p, m, v, gradient: home._run_adamw_opt(
        *rates, p, gradient, m, v, True, *corrections, optimizer.one_minus_beta2
    )


def operands() -> list[np.ndarray]:
    """Return a parameter, its moments and its gradient."""
    random = np.random.default_rng(0)
    param, exp_avg, exp_avg_sq, gradient = random.normal(size=(4, NUMEL)).astype(np.float32)
    return [param, exp_avg * 0.1, np.square(exp_avg_sq) * 0.01, gradient]


def updated_whole(update: Update) -> list[np.ndarray]:
    tensors = [Tensor(values) for values in operands()]
    update(*tensors)
    return [tensor.asnumpy() for tensor in tensors]


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_same_bytes(ours, theirs, f"operand {index}")


@pytest.mark.parametrize("make", [adam, adam_weight_decay])
def test_an_operator_leaves_a_view_as_it_was(make: Callable[[Parameter], Update]) -> None:
    update = make(Parameter(Tensor(operands()[0]), name="p"))
    tensors = [Parameter(Tensor(values), name=f"x{i}") for i, values in enumerate(operands())]
    for begin, end in pairwise(CUTS):
        update(*(tensor.narrow(0, begin, end - begin) for tensor in tensors))
    assert_same([tensor.asnumpy() for tensor in tensors], operands())


@pytest.mark.parametrize("make", [adam, adam_weight_decay, mindformers])
def test_the_arithmetic_may_be_cut_anywhere(make: Callable[[Parameter], Update]) -> None:
    update = make(Parameter(Tensor(operands()[0]), name="p"))
    arrays = operands()
    for begin, end in pairwise(CUTS):
        pieces = [Tensor.from_numpy(array[begin:end]) for array in arrays]
        update(*pieces)
        for piece in pieces:
            piece.asnumpy()  # MindSpore is done with it
    expected = updated_whole(update)
    assert_same(arrays, expected)
    assert expected[0].tobytes() != operands()[0].tobytes()
