"""A small GPT over bytes, of operators whose results on a CPU are the same in every run."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.nn.layer.container import CellList
from mindspore.ops import operations
from mindspore.ops.auto_generate import Dense

from swapopt_mindspore.demo.corpus import Text
from swapopt_mindspore.demo.settings import ModelSize

VOCABULARY = 256
_HIDDEN = -1e9
"""What is added to the scores of bytes that are yet to come."""

_normalise = operations.LayerNorm(-1, -1)
_linear = Dense()
_multiply = operations.BatchMatMul()
_soften = operations.Softmax(-1)
_log_soften = operations.LogSoftmax(-1)
_bend = operations.GeLU()


class Initialiser:
    """Makes parameters; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def normal(self, *shape: int) -> Parameter:
        """Return small random numbers."""
        return Parameter(Tensor(self._random.normal(0, 0.02, shape).astype(np.float32)))

    def full(self, value: float, *shape: int) -> Parameter:
        """Return equal numbers."""
        return Parameter(Tensor(np.full(shape, value, np.float32)))


class Block(nn.Cell):
    """Attention and a perceptron, each behind a norm and beside a residual path.

    Args:
        size: the model's dimensions.
        make: makes its parameters.
    """

    def __init__(self, size: ModelSize, make: Initialiser) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = size.width
        self.heads = size.heads
        self.attention_gain, self.attention_shift = make.full(1, width), make.full(0, width)
        self.query_key_value = make.normal(3 * width, width)
        self.query_key_value_bias = make.full(0, 3 * width)
        self.mix, self.mix_bias = make.normal(width, width), make.full(0, width)
        self.perceptron_gain, self.perceptron_shift = make.full(1, width), make.full(0, width)
        self.widen, self.widen_bias = make.normal(4 * width, width), make.full(0, 4 * width)
        self.narrow, self.narrow_bias = make.normal(width, 4 * width), make.full(0, width)

    def construct(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Map hidden (batch, context, width) to the same shape; mask is (context, context)."""
        normal = _normalise(hidden, self.attention_gain, self.attention_shift)[0]
        hidden = hidden + self._attend(normal, mask)
        normal = _normalise(hidden, self.perceptron_gain, self.perceptron_shift)[0]
        wide = _bend(_linear(normal, self.widen, self.widen_bias))
        output: Tensor = hidden + _linear(wide, self.narrow, self.narrow_bias)
        return output

    def _attend(self, hidden: Tensor, mask: Tensor) -> Tensor:
        batch, context, width = hidden.shape
        parts = _linear(hidden, self.query_key_value, self.query_key_value_bias)
        parts = parts.reshape(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.transpose(2, 0, 3, 1, 4)
        scores = _multiply(query, key.swapaxes(-1, -2)) * (width // self.heads) ** -0.5
        mixed = _multiply(_soften(scores + mask), value)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, context, width)
        output: Tensor = _linear(mixed, self.mix, self.mix_bias)
        return output


class ByteGPT(nn.Cell):
    """Predicts the next byte; learned positions, pre-norm, untied head.

    Embedding and loss are products with one-hot rows, which are the same in every run: MindSpore's
    cross entropy gives other last bits from call to call on a CPU.

    Args:
        size: the model's dimensions.
        seed: of its parameters.
    """

    def __init__(self, size: ModelSize, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        make = Initialiser(seed)
        self.embedding = make.normal(VOCABULARY, size.width)
        self.positions = make.full(0, size.context, size.width)
        self.blocks = CellList([Block(size, make) for _ in range(size.layers)])
        self.gain, self.shift = make.full(1, size.width), make.full(0, size.width)
        self.head = make.normal(VOCABULARY, size.width)
        self.mask = Tensor(np.triu(np.full((size.context, size.context), _HIDDEN, np.float32), 1))

    def construct(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats per byte, as a scalar.

        Args:
            inputs: one-hot rows, float32 (batch, context, 256).
            targets: likewise, of the bytes that follow.
        """
        hidden = inputs.matmul(self.embedding) + self.positions
        for block in self.blocks:
            hidden = block(hidden, self.mask)
        logits = _linear(_normalise(hidden, self.gain, self.shift)[0], self.head)
        loss: Tensor = -(_log_soften(logits) * targets).sum(-1).mean()
        return loss


def one_hot(text: Text) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of `ByteGPT` for text of shape (batch, context + 1)."""
    rows = np.eye(VOCABULARY, dtype=np.float32)[text]
    return Tensor(rows[:, :-1]), Tensor(rows[:, 1:])
