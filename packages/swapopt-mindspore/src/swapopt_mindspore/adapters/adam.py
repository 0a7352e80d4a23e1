"""mindspore.nn.Adam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from mindspore import Parameter, Tensor, nn
from mindspore.nn.optim import optimizer as native

from swapopt_common import SwapOptimizerConfig
from swapopt_mindspore.adapters.base import NATIVE_REFUSED, MindSporeAdamBaseAdapter
from swapopt_mindspore.adapters.hyperparameters import PerParameter, value_of
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.slots import MindSporeUnit


class MindSporeNativeAdamAdapter(MindSporeAdamBaseAdapter[nn.Adam]):
    """Serves mindspore.nn.Adam, with Nesterov momentum or AMSGrad or neither.

    What native does to all gradients before its update (weight decay, centralization, the loss
    scale, in this order) is done parameter by parameter just before each update. The values are
    the same, and the changed gradients of one batch only are alive at a time.
    """

    serves = "mindspore.nn.Adam"
    update_methods = (
        "construct",
        "_apply_adam",
        "decay_weight",
        "gradients_centralization",
        "scale_grad",
    )
    refused_flags: ClassVar[Mapping[str, str]] = {
        **MindSporeAdamBaseAdapter.refused_flags,
        **NATIVE_REFUSED,
    }
    missing_key_hints: ClassVar[Mapping[str, str]] = {
        **MindSporeAdamBaseAdapter.missing_key_hints,
        "max_exp_avg_sq": "; max_exp_avg_sq needs use_amsgrad=True",
    }

    def __init__(self, optimizer: nn.Adam, config: SwapOptimizerConfig) -> None:
        super().__init__(optimizer, config)
        self._lr: PerParameter[Tensor] = ()
        self._weight_decay: PerParameter[Tensor] = ()
        self._beta_powers: tuple[Tensor, ...] = ()

    @classmethod
    def optimizer_class(cls) -> type[nn.Optimizer]:
        """Return nn.Adam."""
        adam: type[nn.Optimizer] = nn.Adam
        return adam

    def state_tuples(self) -> Mapping[str, Sequence[Parameter]]:
        """Return moments, and with AMSGrad their maxima."""
        adam = self._optimizer
        moments = {"exp_avg": adam.moment1, "exp_avg_sq": adam.moment2}
        return {**moments, "max_exp_avg_sq": adam.vhat} if adam.use_amsgrad else moments

    def read_hyperparameters(self) -> list[tuple[Parameter, Tensor]]:
        """Read weight decay and learning rates of this step; multiply the beta powers."""
        adam = self._optimizer
        self._weight_decay = adam.get_weight_decay()
        self._lr = adam.get_lr()
        powers = (adam.beta1_power * adam.beta1, adam.beta2_power * adam.beta2)
        self._beta_powers = powers
        return [
            (adam.global_step, adam.global_step + adam.global_step_increase_tensor),
            (adam.beta1_power, powers[0]),
            (adam.beta2_power, powers[1]),
        ]

    def update(self, unit: MindSporeUnit) -> None:
        """Call the optimizer's Adam operator on one parameter."""
        adam = self._optimizer
        adam.opt(
            local_part(unit.param),
            *(slot.operand() for slot in unit.slots),
            *self._beta_powers,
            value_of(self._lr, unit.adapter_index),
            adam.beta1,
            adam.beta2,
            adam.eps,
            self._prepared_gradient(unit),
        )

    def _prepared_gradient(self, unit: MindSporeUnit) -> Tensor:
        adam, index = self._optimizer, unit.adapter_index
        gradient = unit.gradient()
        if adam.exec_weight_decay:
            decay: Tensor = value_of(self._weight_decay, index)
            param = local_part(unit.param)
            gradient = native._apply_decay(decay, adam.decay_flags[index], param, gradient)
        if adam.is_group:
            flag = adam.grad_centralization_flags[index]
            gradient = native._apply_grad_centralization(flag, gradient)
        if adam.need_scale:
            gradient = native._grad_scale(adam.reciprocal_scale, gradient)
        return gradient
