"""A DTensor as HyperParallel's, of which the optimizers and the wrapper see one method.

HyperParallel itself is on no package index. What matters here of its DTensor: it is a tensor
whose data are this rank's shard, ``to_local()`` returns a tensor over the same memory, and a
Parameter may be made of it. Its operators act on the shard, as HyperParallel's do under
SkipDTensorDispatch.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor


class DTensor(Tensor):
    """A tensor that is divided among ranks.

    Args:
        local: this rank's shard, or another DTensor, whose shard it then shares.
    """

    _local: Tensor

    def __new__(cls, local: Tensor) -> DTensor:
        shard = local.to_local() if isinstance(local, DTensor) else local
        made: DTensor = Tensor._make_subclass(cls, shard)
        made._local = shard
        return made

    def __init__(self, local: Tensor) -> None:
        """Leave alone what ``__new__`` has made; Tensor's own would make it anew."""
        del local

    def to_local(self) -> Tensor:
        """Return this rank's shard; writing to it writes to the DTensor."""
        return self._local

    def asnumpy(self) -> np.ndarray:
        """Return the shard's values."""
        values: np.ndarray = self._local.asnumpy()
        return values

    def set_data(self, data: Tensor, slice_shape: bool = False) -> None:
        """Let the shard, and with it the DTensor, have other memory."""
        del slice_shape
        values = data.init_data() if data.has_init else data
        self._local.data = Tensor(values.asnumpy(), values.dtype)
        self.data = self._local

    def __copy__(self) -> DTensor:
        """Return a DTensor with memory of its own; Parameter.clone asks for one."""
        copied: DTensor = DTensor.__new__(type(self), Tensor(self._local.asnumpy()))
        own = {name: value for name, value in vars(self).items() if name != "_local"}
        vars(copied).update(own)
        return copied
