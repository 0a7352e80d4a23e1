"""MindFormers' PyNative AdamW: fp32 states, and fp32 masters of fp16 and bf16 parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from mindspore import Parameter, Tensor, _no_grad, nn
from mindspore import dtype as mstype
from mindspore.ops import operations

from swapopt_common import SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore.adapters.base import MindSporeAdamBaseAdapter
from swapopt_mindspore.adapters.hyperparameters import PerParameter, value_of
from swapopt_mindspore.local_tensor import local_part
from swapopt_mindspore.slots import MindSporeSlot, MindSporeUnit

_cast = operations.Cast()

# MindFormers may be absent: an optimizer of it can only exist once somebody has imported it.
_HOME = "mindformers.pynative.optimizer.adamw"


class MindFormersAdamWAdapter(MindSporeAdamBaseAdapter[nn.Optimizer]):
    """Serves mindformers.pynative.optimizer.adamw.AdamW, fused or not.

    Fused and without AMSGrad, its ``max_exp_avg_sq`` is the very object ``exp_avg_sq``: that is
    one state with one slot, which the operator gets twice.

    Masters that swap are written to their model parameters right after each update, since they
    leave the device after their batch. Masters that stay are written at the end of the step, all
    of them, as native does.
    """

    serves = "MindFormers AdamW"
    update_methods = (
        "construct",
        "forward_opt",
        "forward_fused_opt",
        "_increase_global_step",
        "_copy_main_params_to_model_params",
    )
    refused_flags: ClassVar[Mapping[str, str]] = {
        **MindSporeAdamBaseAdapter.refused_flags,
        "enable_cpu_offload": "two mechanisms cannot move the same states",
    }
    missing_key_hints: ClassVar[Mapping[str, str]] = {
        "max_exp_avg_sq": "; max_exp_avg_sq needs the fused form and amsgrad=True",
        "master_param": "; only fp16 and bf16 parameters have masters",
    }
    packed_by_default = True
    takes_views = True

    def __init__(self, optimizer: nn.Optimizer, config: SwapOptimizerConfig) -> None:
        super().__init__(optimizer, config)
        self._home = sys.modules[_HOME]
        self._lr: PerParameter[float] = ()
        self._weight_decay: PerParameter[float] = ()
        self._fused_step: Tensor | None = None
        self._bias_corrections: tuple[Tensor, ...] = ()

    @classmethod
    def optimizer_class(cls) -> type[nn.Optimizer] | None:
        """Return MindFormers' AdamW, if somebody has imported it."""
        known = getattr(sys.modules.get(_HOME), "AdamW", None)
        return known if isinstance(known, type) else None

    def validate(self) -> None:
        """Refuse settings and state keys; masters swap only where two settings agree."""
        super().validate()
        named = self._config.state_keys is not None and "master_param" in self._config.state_keys
        if named and not self._config.include_master_params:
            raise SwapConfigError(
                "state_keys names 'master_param', but include_master_params is False. Set "
                "include_master_params=True to swap the masters, too, or take the name out."
            )

    def unselected(self, key: str) -> str | None:
        """Return why the configuration leaves a state alone; None if it does not."""
        if key == "master_param" and not self._config.include_master_params:
            return "include_master_params is False"
        return super().unselected(key)

    def state_tuples(self) -> Mapping[str, Sequence[Parameter]]:
        """Return moments, and the maxima where they are a state of their own."""
        adamw = self._optimizer
        moments = {"exp_avg": adamw.exp_avg, "exp_avg_sq": adamw.exp_avg_sq}
        if adamw.enable_fused_opt and adamw.amsgrad:
            return {**moments, "max_exp_avg_sq": adamw.max_exp_avg_sq}
        return moments

    def master_of(self, index: int) -> Parameter | None:
        """Return the fp32 master of an fp16 or bf16 parameter."""
        adamw = self._optimizer
        return adamw.fp32_params[index] if adamw._is_low_precision_param[index] else None

    def read_hyperparameters(self) -> list[tuple[Parameter, Tensor]]:
        """Read weight decay and learning rates, as native's numbers; count this step."""
        adamw = self._optimizer
        weight_decay, lr = adamw.get_weight_decay(), adamw.get_lr()
        own_lr = adamw.is_group and adamw.is_group_lr
        self._lr = tuple(map(float, lr)) if own_lr else float(lr)
        self._weight_decay = (
            tuple(map(float, weight_decay)) if adamw.is_group else float(weight_decay)
        )
        step: Tensor = adamw.global_step + adamw.global_step_increase_tensor
        if adamw.enable_fused_opt:
            self._fused_step = _cast(step, mstype.int64)
        else:
            self._bias_corrections = (1.0 - adamw.beta1**step, 1.0 - adamw.beta2**step)
        return [(adamw.global_step, step)]

    @property
    def launches_per_update(self) -> int:
        """One operator if fused, else those of MindFormers' arithmetic."""
        return 1 if self._optimizer.enable_fused_opt else 16

    def step_batch(self, batch: Sequence[MindSporeUnit]) -> None:
        """Update a batch, parameter by parameter, on the local parts of DTensors."""
        with self._home.SkipDTensorDispatch():
            super().step_batch(batch)

    def update(self, unit: MindSporeUnit) -> None:
        """Call MindFormers' update of one parameter; write a master that is about to leave."""
        if self._optimizer.enable_fused_opt:
            self._update_fused(unit)
        else:
            self._update_unfused(unit)
        if self._masters_move:
            _write_model_parameter(unit)

    def _update_fused(self, unit: MindSporeUnit) -> None:
        adamw = self._optimizer
        moments = _moments(unit)
        self._home._run_fused_adamw_opt(
            adamw.fused_adamw_opt,
            adamw.amsgrad,
            adamw.maximize,
            adamw.beta1_value,
            adamw.beta2_value,
            adamw.eps_value,
            self._fused_step,
            value_of(self._lr, unit.adapter_index),
            value_of(self._weight_decay, unit.adapter_index),
            _updated_tensor(unit),
            unit.gradient(),
            *(moments if adamw.amsgrad else (*moments, moments[1])),
        )

    def _update_unfused(self, unit: MindSporeUnit) -> None:
        adamw = self._optimizer
        self._home._run_adamw_opt(
            adamw.beta1,
            adamw.beta2,
            adamw.eps,
            value_of(self._lr, unit.adapter_index),
            value_of(self._weight_decay, unit.adapter_index),
            _updated_tensor(unit),
            unit.gradient(),
            *_moments(unit),
            True,
            *self._bias_corrections,
            adamw.one_minus_beta2,
        )

    def finish_step(self) -> None:
        """Advance the counter if nothing else has; write the masters that stay, all of them."""
        super().finish_step()
        if not self._masters_move:
            self._write_model_parameters(self.units)

    def abandon_step(self) -> None:
        """Make whole what a failed step has updated: model parameters follow their masters."""
        super().abandon_step()
        if not self._masters_move:
            self._write_model_parameters(self._updated)

    def reload_masters(self, store: Callable[[MindSporeSlot, Tensor], None]) -> None:
        """Let every master have its model parameter's value, as after loading weights only.

        Runs on the caller's current stream; no step may be under way.

        Args:
            store: gives a slot a new valid value, wherever that is kept; gets an fp32 device
                tensor of the slot's shape that nobody else holds.
        """
        with _no_grad(), self._home.SkipDTensorDispatch():
            for unit in self.units:
                if unit.master is not None:
                    store(unit.master, _cast(local_part(unit.param), mstype.float32))

    @property
    def _masters_move(self) -> bool:
        return self.unselected("master_param") is None

    def _write_model_parameters(self, units: Sequence[MindSporeUnit]) -> None:
        with self._home.SkipDTensorDispatch():
            for unit in units:
                _write_model_parameter(unit)


def _write_model_parameter(unit: MindSporeUnit) -> None:
    if unit.master is not None:
        param = local_part(unit.param)
        param.copy_(_cast(unit.master.operand(), param.dtype))


def _updated_tensor(unit: MindSporeUnit) -> Tensor:
    return local_part(unit.param) if unit.master is None else unit.master.operand()


def _moments(unit: MindSporeUnit) -> list[Tensor]:
    return [slot.operand() for slot in unit.slots if slot is not unit.master]
