"""mindspore.nn.AdamWeightDecay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from mindspore import Parameter, Tensor, nn
from mindspore.nn.optim import adam as native
from mindspore.ops import operations

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.adapters.base import NATIVE_REFUSED, MindSporeAdamBaseAdapter
from swapopt_mindspore.adapters.hyperparameters import PerParameter, value_of
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.slots import MindSporeUnit

_cast = operations.Cast()


class MindSporeNativeAdamWAdapter(MindSporeAdamBaseAdapter[nn.AdamWeightDecay]):
    """Serves mindspore.nn.AdamWeightDecay."""

    serves = "mindspore.nn.AdamWeightDecay"
    update_methods = ("construct",)
    refused_flags: ClassVar[Mapping[str, str]] = {
        **MindSporeAdamBaseAdapter.refused_flags,
        **NATIVE_REFUSED,
    }
    missing_key_hints: ClassVar[Mapping[str, str]] = {
        **MindSporeAdamBaseAdapter.missing_key_hints,
        "max_exp_avg_sq": "; it has no AMSGrad, nn.Adam(use_amsgrad=True) has",
    }

    def __init__(self, optimizer: nn.AdamWeightDecay, config: SwapOptimizerConfig) -> None:
        super().__init__(optimizer, config)
        self._lr: PerParameter[Tensor] = ()
        self._weight_decay: PerParameter[Tensor] = ()

    @classmethod
    def optimizer_class(cls) -> type[nn.Optimizer]:
        """Return nn.AdamWeightDecay."""
        adam_weight_decay: type[nn.Optimizer] = nn.AdamWeightDecay
        return adam_weight_decay

    def state_tuples(self) -> Mapping[str, Sequence[Parameter]]:
        """Return the moments."""
        return {"exp_avg": self._optimizer.moments1, "exp_avg_sq": self._optimizer.moments2}

    def read_hyperparameters(self) -> list[tuple[Parameter, Tensor]]:
        """Read weight decay and learning rates of this step."""
        adam = self._optimizer
        self._weight_decay = adam.get_weight_decay()
        self._lr = adam.get_lr()
        return [(adam.global_step, adam.global_step + adam.global_step_increase_tensor)]

    def update(self, unit: MindSporeUnit) -> None:
        """Call the optimizer's operator on one parameter, or its form in small operators."""
        adam, index = self._optimizer, unit.adapter_index
        param, gradient = local_part(unit.param), unit.gradient()
        exp_avg, exp_avg_sq = (slot.operand() for slot in unit.slots)
        lr: Tensor = value_of(self._lr, index)
        weight_decay: Tensor = value_of(self._weight_decay, index)
        decays: bool = adam.decay_flags[index]
        betas_and_eps = (adam.beta1, adam.beta2, adam.eps)
        if adam.use_fused_opt:
            decay = weight_decay if decays else 0.0
            gradient = _cast(gradient, param.dtype)
            adam.fused_opt(param, exp_avg, exp_avg_sq, lr, *betas_and_eps, decay, gradient)
        else:
            states = (param, exp_avg, exp_avg_sq)
            native._update_run_op(*betas_and_eps, lr, weight_decay, *states, gradient, decays, True)
