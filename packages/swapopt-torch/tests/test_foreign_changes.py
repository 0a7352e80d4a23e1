"""What others do to the optimizer between steps: as native, or refused before anything changes."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import adam as torch_adam

from swapopt_torch import SwapOptimizerConfig, host_memory, streams, swap_optimizer
from swapopt_torch.pipeline import PipelineSwapRuntime
from training import assert_same_bits

NUMELS = [2048, 3000, 5000, 1500, 4096, 2500]


class Twins:
    """The same parameters under a native and a swapped optimizer, changed alike."""

    def __init__(self, device: torch.device, packed: bool | None, **options: Any) -> None:
        values = [torch.linspace(-1, 1, n).to(device) for n in NUMELS]
        self.native = [nn.Parameter(v.clone()) for v in values]
        self.swapped = [nn.Parameter(v.clone()) for v in values]
        self.reference = torch.optim.AdamW(self.native, 1e-2, foreach=False, **options)
        self.optimizer = swap_optimizer(
            torch.optim.AdamW(self.swapped, 1e-2, foreach=False, **options),
            SwapOptimizerConfig(swap_times=3, packed_swap=packed),
        )

    def both(self, change: Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]) -> None:
        change(self.reference, self.native)
        change(self.optimizer, self.swapped)

    def step(self, seed: int, skip: tuple[int, ...] = ()) -> None:
        for parameters in (self.native, self.swapped):
            generator = torch.Generator().manual_seed(seed)
            for index, parameter in enumerate(parameters):
                grad = torch.randn(parameter.shape, generator=generator)
                grad = grad.to(parameter.device, parameter.dtype)
                parameter.grad = None if index in skip else grad
        self.reference.step()
        self.optimizer.step()

    def assert_equal(self) -> None:
        for index, (one, other) in enumerate(zip(self.swapped, self.native, strict=True)):
            assert_same_bits(one, other, f"parameter {index}")
            assert (one in self.optimizer.state) == (other in self.reference.state)
            if other in self.reference.state:
                for key, value in self.reference.state[other].items():
                    found = self.optimizer.state[one][key]
                    assert_same_bits(found, value, f"{key} of {index}")


def replace_state(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    parameter = parameters[1]
    optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 0.25).detach()


def replace_data(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    moment = optimizer.state[parameters[2]]["exp_avg_sq"]
    moment.data = torch.full_like(moment, 0.5)


def clear_all(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    del parameters
    optimizer.state.clear()


def empty_one(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.state[parameters[0]] = {}


def delete_one(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    del optimizer.state[parameters[3]]


def write_in_place(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


def replace_parameter(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    fresh = nn.Parameter(torch.full_like(parameters[1], 3.0))
    parameters[1] = optimizer.param_groups[0]["params"][1] = fresh


def reverse_parameters(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    del parameters
    optimizer.param_groups[0]["params"].reverse()


def drop_parameter(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    del parameters
    del optimizer.param_groups[0]["params"][4]


CHANGES = [
    replace_state,
    replace_data,
    clear_all,
    empty_one,
    delete_one,
    write_in_place,
    replace_parameter,
    reverse_parameters,
    drop_parameter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_steps_are_as_native(
    device: torch.device, packed: bool, change: Callable[..., None]
) -> None:
    twins = Twins(device, packed)
    twins.step(0)
    twins.step(1)
    twins.both(change)
    twins.step(2, skip=(1, 5))
    twins.step(3)
    twins.step(4, skip=(0, 2))
    twins.assert_equal()


def to_bfloat16(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()


def to_float64(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.double()


def grow(parameters: list[nn.Parameter]) -> None:
    parameters[2].data = torch.ones(7000, device=parameters[2].device)


def to_columns(parameters: list[nn.Parameter]) -> None:
    parameters[0].data = parameters[0].data.view(32, 64).t()


@pytest.mark.parametrize(
    "convert", [to_bfloat16, to_float64, grow, to_columns], ids=lambda convert: convert.__name__
)
def test_a_model_converted_before_its_first_step(
    device: torch.device, packed: bool, convert: Callable[[list[nn.Parameter]], None]
) -> None:
    twins = Twins(device, packed, eps=1e-4)
    convert(twins.native)
    convert(twins.swapped)
    twins.step(0)
    twins.step(1)
    twins.assert_equal()


@pytest.mark.parametrize("choice", [True, False, None])
def test_a_model_moved_to_another_device(device_type: str, choice: bool | None) -> None:
    if torch.get_device_module(device_type).device_count() < 2:
        pytest.skip("one device of this type")
    twins = Twins(torch.device(device_type, 1), choice)
    twins.step(0)
    for parameter in twins.swapped:
        parameter.data = parameter.data.to(f"{device_type}:0")
    for parameter in twins.native:
        parameter.data = parameter.data.to(f"{device_type}:0")
    for state in twins.reference.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(f"{device_type}:0")
    twins.step(1)
    twins.step(2)
    twins.assert_equal()
    assert twins.optimizer.swap_stats().packed is (choice is not False)


def test_states_on_another_device_than_their_parameters(device_type: str, packed: bool) -> None:
    if torch.get_device_module(device_type).device_count() < 2:
        pytest.skip("one device of this type")
    here, there = torch.device(device_type, 1), torch.device(device_type, 0)
    native = [nn.Parameter(torch.linspace(-1, 1, n).to(here)) for n in NUMELS]
    swapped = [nn.Parameter(p.detach().clone()) for p in native]
    reference = torch.optim.AdamW(native, foreach=False)
    base = torch.optim.AdamW(swapped, foreach=False)
    for optimizer, parameters in ((reference, native), (base, swapped)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for state in base.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(there)
    optimizer = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
    for one, other in zip(swapped, native, strict=True):
        for key, value in reference.state[other].items():
            assert_same_bits(optimizer.state[one][key], value, key)
    optimizer.step()
    reference.step()
    for one, other in zip(swapped, native, strict=True):
        assert_same_bits(one, other, "parameter")


def test_a_parameter_held_twice_is_refused(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2048, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = torch.optim.AdamW([parameter, parameter])
    with pytest.raises(ValueError, match="twice"):
        swap_optimizer(base)


def test_own_entries_beside_the_states_travel(device: torch.device, packed: bool) -> None:
    twins = Twins(device, packed)
    twins.step(0)

    def annotate(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        optimizer.state[parameters[0]]["row"] = torch.arange(3.0)
        optimizer.state["epoch"] = 7  # type: ignore[index]

    twins.both(annotate)
    saved = twins.optimizer.state_dict()
    assert saved["state"]["epoch"] == 7
    assert saved["state"][0]["row"].tolist() == [0.0, 1.0, 2.0]
    twins.optimizer.load_state_dict(saved)
    assert twins.optimizer.state["epoch"] == 7  # type: ignore[index]
    twins.step(1)


def forget_second_moment(saved: dict[str, Any]) -> None:
    del saved["state"][1]["exp_avg_sq"]


def forget_step(saved: dict[str, Any]) -> None:
    del saved["state"][1]["step"]


def claim_amsgrad(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["amsgrad"] = True


def put_sparse(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].to_sparse()


def put_number(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = 0.5


@pytest.mark.parametrize(
    "spoil",
    [forget_second_moment, forget_step, claim_amsgrad, put_sparse, put_number],
    ids=lambda spoil: spoil.__name__,
)
def test_a_spoilt_checkpoint_changes_nothing(
    device: torch.device, packed: bool, spoil: Callable[[dict[str, Any]], None]
) -> None:
    twins = Twins(device, packed)
    twins.step(0)
    saved = copy.deepcopy(twins.optimizer.state_dict())
    twins.step(1)
    saved["param_groups"][0]["lr"] = 5.0
    spoil(saved)
    with pytest.raises(ValueError, match=r"param_groups\[0\]"):
        twins.optimizer.load_state_dict(saved)
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()


def test_a_load_that_finds_no_pinned_memory_changes_nothing(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, packed)
    twins.step(0)
    snapshot = twins.optimizer.state_dict()  # alive: loading needs memory of its own
    twins.step(1)
    keep = twins.optimizer.state_dict()

    def refuse(*_: object) -> None:
        raise RuntimeError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "registered_buffer", refuse)
        patch.setattr(host_memory, "allocated_buffer", refuse)
        with pytest.raises(RuntimeError, match="Pinned host memory ran out"):
            twins.optimizer.load_state_dict(snapshot)
    del keep
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()


def test_an_interrupted_wait_has_not_happened(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, packed)
    twins.step(0)
    copies = streams.copy_streams(device)

    class Interrupted:
        def synchronize(self) -> None:
            raise KeyboardInterrupt

    tail = copies._tail
    monkeypatch.setattr(copies, "_tail", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        twins.optimizer.state_dict()
    assert isinstance(copies._tail, Interrupted)
    monkeypatch.setattr(copies, "_tail", tail)
    twins.assert_equal()


@pytest.mark.parametrize("reader", ["next step", "state"])
def test_an_interrupted_recovery_is_finished_later(
    device: torch.device, packed: bool, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C pressed twice: the second one while states are brought home."""
    twins = Twins(device, packed)
    twins.step(0)
    original, calls = torch_adam.adam, 0

    def interrupted(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        original(*arguments, **options)
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    def interrupted_again(self: PipelineSwapRuntime, *_: object) -> None:
        raise KeyboardInterrupt

    for parameters in (twins.native, twins.swapped):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patch:
        patch.setattr(torch_adam, "adam", interrupted)
        patch.setattr(PipelineSwapRuntime, "_bring_home", interrupted_again)
        with pytest.raises(KeyboardInterrupt):
            twins.optimizer.step()
    updated = [
        unit.param for batch in twins.optimizer._engine.layout.batches[:2] for unit in batch.units
    ]
    if reader == "state":
        assert len(twins.optimizer.state) == len(NUMELS)
    # The native twin takes the same updates; then both go on.
    for one, other in zip(twins.swapped, twins.native, strict=True):
        if not any(one is parameter for parameter in updated):
            other.grad = None
    twins.reference.step()
    twins.step(1)
    twins.assert_equal()


def test_warnings_that_are_errors_change_nothing(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(8, 8)
        base = torch.optim.AdamW(model.parameters())
        with pytest.raises(UserWarning, match="no optimizer state"):
            swap_optimizer(base)
        base.step()
        parameters = [nn.Parameter(torch.ones(2048, device=device))]
        base = torch.optim.AdamW(parameters)
        parameters[0].grad = torch.ones_like(parameters[0])
        base.step()
        with pytest.raises(UserWarning, match="include_master_params"):
            swap_optimizer(base, SwapOptimizerConfig(include_master_params=True))
        assert base.state[parameters[0]]["exp_avg"].device == device
        base.step()
        swap_optimizer(base)


def test_wrapping_after_torch_compile() -> None:
    """torch.compile wraps the methods of every optimizer class: that is no override."""
    code = (
        "import torch, copy, pickle, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from swapopt_torch import swap_optimizer\n"
        "before = swap_optimizer(torch.optim.AdamW([torch.ones(2, requires_grad=True)]))\n"
        "torch.compile(torch.nn.Linear(2, 2), backend='eager')(torch.ones(2))\n"
        "for kind in (torch.optim.Adam, torch.optim.AdamW):\n"
        "    swap_optimizer(kind([torch.ones(2, requires_grad=True)]))\n"
        "class Own(torch.optim.AdamW):\n"
        "    def step(self, closure=None): pass\n"
        "try: swap_optimizer(Own([torch.ones(2, requires_grad=True)]))\n"
        "except ValueError: pass\n"
        "else: raise SystemExit('an override was accepted')\n"
        "copy.deepcopy(before); pickle.loads(pickle.dumps(before))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inference_mode(device: torch.device, packed: bool) -> None:
    """What lasts is made of ordinary tensors, also where the first step is in inference mode."""
    twins = Twins(device, packed)
    parameter = nn.Parameter(torch.ones(2048, device=device))
    parameter.grad = torch.ones_like(parameter)
    base = torch.optim.AdamW([parameter])
    base.step()
    with torch.inference_mode():
        wrapped = swap_optimizer(base, SwapOptimizerConfig(packed_swap=packed))
    for parameters in (twins.native, twins.swapped):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
    with torch.inference_mode():
        twins.optimizer.step()
    twins.reference.step()
    twins.step(1)
    twins.step(2)
    twins.assert_equal()
    wrapped.step()


def test_wrapping_again_after_an_interrupted_wrapping(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first wrapper is gone, its offloads are still under way: they are waited for."""
    native = [nn.Parameter(torch.linspace(-1, 1, n).to(device)) for n in NUMELS]
    swapped = [nn.Parameter(p.detach().clone()) for p in native]
    reference = torch.optim.AdamW(native, foreach=False)
    base = torch.optim.AdamW(swapped, foreach=False)
    for optimizer, parameters in ((reference, native), (base, swapped)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    config = SwapOptimizerConfig(packed_swap=packed)
    with monkeypatch.context() as patch:
        patch.setattr("swapopt_torch.guard.take_step_away", interrupt)
        with pytest.raises(KeyboardInterrupt):
            swap_optimizer(base, config)
    optimizer = swap_optimizer(base, config)
    optimizer.step()
    reference.step()
    for one, other in zip(swapped, native, strict=True):
        assert_same_bits(one, other, "parameter")
        for key, value in reference.state[other].items():
            assert_same_bits(optimizer.state[one][key], value, key)


def test_lazy_modules(device: torch.device, packed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.LazyLinear(64, device=device)
        optimizer = swap_optimizer(
            torch.optim.AdamW(module.parameters()), SwapOptimizerConfig(packed_swap=packed)
        )
    module(torch.ones(2, 64, device=device)).sum().backward()
    optimizer.step()
    assert optimizer.swap_stats().swapped_states == 2
