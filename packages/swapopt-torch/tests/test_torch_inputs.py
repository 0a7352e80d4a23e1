"""PyTorch's own words for its optimizers: its test inputs, and what it documents of Optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    optim_db,
)

from swapopt_torch import swap_optimizer
from training import assert_same_bits
from twins import KINDS, Twin, both, make_twin

INFOS: dict[str, OptimizerInfo] = {
    info.optim_cls.__name__: info
    for info in optim_db
    if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW)
}
REFUSED = {
    "Adam": {"foreach", "fused", "capturable", "differentiable"},
    "AdamW": {"foreach", "capturable", "differentiable"},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# torch gives different inputs to different devices; ours is to serve the inputs of all of them.
SPELLINGS = ("cpu", "cuda", "mps")


def torch_inputs(name: str, dtype: torch.dtype) -> Iterator[OptimizerInput]:
    """Yield each input as it is, without ``capturable``, and with each implementation chosen."""
    info = INFOS[name]
    seen: set[str] = set()
    for spelling in SPELLINGS:
        for given in info.optim_inputs_func(spelling, dtype):
            plain = {key: value for key, value in given.kwargs.items() if key != "capturable"}
            for kwargs in (given.kwargs, plain):
                for chosen in (None, *info.supported_impls):
                    flags = {flag: flag == chosen for flag in info.supported_impls}
                    full = {**copy.deepcopy(kwargs), **flags}
                    description = f"{sorted(full.items(), key=lambda item: item[0])}"
                    if description not in seen:
                        seen.add(description)
                        yield OptimizerInput(params=None, kwargs=full, desc=description)


def is_refused(name: str, kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(flag) for flag in REFUSED[name])


def test_torch_still_has_the_inputs_this_was_written_for() -> None:
    for name, info in INFOS.items():
        assert set(info.supported_impls) == {"foreach", "differentiable", "fused"}
        inputs = list(torch_inputs(name, torch.float32))
        admitted = [i for i in inputs if not is_refused(name, i.kwargs)]
        assert len(inputs) >= 50
        assert len(admitted) >= (18 if name == "AdamW" else 9)
        assert any(isinstance(i.kwargs.get("betas", (0,))[0], torch.Tensor) for i in admitted)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", INFOS)
def test_inputs_that_are_served(
    device: torch.device, packed: bool, name: str, dtype: torch.dtype
) -> None:
    kind = INFOS[name].optim_cls
    for given in torch_inputs(name, dtype):
        if is_refused(name, given.kwargs):
            continue
        options = given.kwargs

        def make(
            parameters: Sequence[nn.Parameter], options: dict[str, Any] = options
        ) -> torch.optim.Optimizer:
            return kind(parameters, **copy.deepcopy(options))

        for twin in both(device, packed, make, numels=(2048, 7, 1025), dtype=dtype):
            twin.train(3)


@pytest.mark.parametrize("name", INFOS)
def test_inputs_that_are_refused(device: torch.device, name: str) -> None:
    """By us, or by torch already: with ValueError, before anything has changed."""
    kind = INFOS[name].optim_cls
    refused_by_us = 0
    for given in torch_inputs(name, torch.float32):
        if not is_refused(name, given.kwargs):
            continue
        twin = make_twin(device, torch.optim.AdamW, numels=(2048,))
        try:
            optimizer = kind(twin.parameters, **given.kwargs)
        except ValueError:
            assert isinstance(given.kwargs["lr"], torch.Tensor)  # with foreach=True
            continue
        step = optimizer.step
        with pytest.raises(ValueError, match="=True; swap_optimizer needs it False"):
            swap_optimizer(optimizer)
        assert optimizer.step == step
        refused_by_us += 1
    assert refused_by_us >= 30


@pytest.mark.parametrize("name", INFOS)
def test_error_inputs(name: str) -> None:
    """torch's own refusals come first, as they are: what it does not build is never wrapped."""
    kind = INFOS[name].optim_cls
    inputs: list[ErrorOptimizerInput] = INFOS[name].optim_error_inputs_func("cpu", torch.float32)
    assert len(inputs) >= 10
    for given in inputs:
        assert given.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        error = given.optimizer_error_input
        params = error.params if error.params is not None else [nn.Parameter(torch.ones(3))]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(given.error_type, match=given.error_regex):
                swap_optimizer(kind(params, **error.kwargs))


BAD_GROUPS: dict[str, Callable[[Twin], Any]] = {
    "not a dict": lambda twin: [nn.Parameter(torch.ones(3))],
    "a set": lambda twin: {"params": {nn.Parameter(torch.ones(3))}},
    "not a tensor": lambda twin: {"params": [1.0]},
    "not a leaf": lambda twin: {"params": [twin.parameters[0] * 2]},
    "known already": lambda twin: {"params": [twin.parameters[0]]},
    "some names": lambda twin: {
        "params": [("w", nn.Parameter(torch.ones(3))), nn.Parameter(torch.ones(3))]
    },
    "names where others have none": lambda twin: {"params": [("w", nn.Parameter(torch.ones(3)))]},
    "no params": lambda twin: {"lr": 1.0},
}


@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_groups_that_cannot_be_added(device: torch.device, packed: bool, bad: str) -> None:
    """The same error as natively, and training goes on as if nothing had been asked."""
    errors = []
    for twin in both(device, packed, torch.optim.AdamW):
        twin.train(1)
        with pytest.raises((KeyError, TypeError, ValueError)) as caught:
            twin.optimizer.add_param_group(BAD_GROUPS[bad](twin))
        errors.append((caught.type, str(caught.value)))
        assert len(twin.optimizer.param_groups) == 1
        twin.train(range(1, 3))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_added_between_steps(device: torch.device, packed: bool, kind: str) -> None:
    """With defaults, with settings, with nothing in it; as one tensor, and with amsgrad."""
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, **KINDS[kind])):
        for step in range(4):
            extra = nn.Parameter(torch.linspace(0, 1, 1500 + step, device=device))
            group: dict[str, Any] = [
                {"params": extra},
                {"params": [extra], "lr": 0.1, "betas": (0.5, 0.6)},
                {"params": [extra], "amsgrad": True},
                {"params": []},
            ][step]
            twin.train(range(2 * step, 2 * step + 2))
            twin.optimizer.add_param_group(group)
            twin.parameters.extend(group["params"])
            twin.seen.append(len(twin.optimizer.param_groups))
        twin.train(range(8, 10))


def test_a_group_with_the_same_parameter_twice(device: torch.device, packed: bool) -> None:
    """torch warns of it and updates the parameter twice a step; we say no before anything moves."""
    parameter = nn.Parameter(torch.linspace(0, 1, 2048, device=device))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([parameter, parameter])
    with pytest.raises(ValueError, match="a parameter twice"):
        swap_optimizer(optimizer)
    twin = make_twin(device, torch.optim.AdamW)
    twin.wrap(packed)
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="a parameter twice"),
    ):
        twin.optimizer.add_param_group({"params": [parameter, parameter]})
    assert len(twin.optimizer.param_groups) == 1
    twin.train(1)


@pytest.mark.parametrize("names", [False, True], ids=["plain", "named"])
def test_state_dict_of_a_fresh_optimizer(device: torch.device, packed: bool, names: bool) -> None:
    """Groups without states, names where parameters have them; loading it changes nothing."""

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        named = [(f"weight {index}", p) for index, p in enumerate(parameters)]
        return torch.optim.AdamW(named if names else parameters, 1e-2, foreach=False)

    for twin in both(device, packed, make):
        saved = twin.optimizer.state_dict()
        assert saved["state"] == {}
        assert ("param_names" in saved["param_groups"][0]) == names
        twin.seen.append(saved)
        twin.optimizer.load_state_dict(saved)
        twin.train(2)
        twin.optimizer.load_state_dict(saved)  # forgets the states
        assert not twin.optimizer.state
        twin.train(2)


def test_names_of_a_checkpoint(device: torch.device, packed: bool) -> None:
    """Names in it replace ours; if it has none, ours stay. They never decide what loads where."""

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([(f"w{i}", p) for i, p in enumerate(parameters)], foreach=False)

    for twin in both(device, packed, make):
        twin.train(1)
        saved = copy.deepcopy(twin.optimizer.state_dict())
        saved["param_groups"][0]["param_names"] = list("edcba")
        twin.optimizer.load_state_dict(saved)
        assert twin.optimizer.param_groups[0]["param_names"] == list("edcba")
        del saved["param_groups"][0]["param_names"]
        twin.optimizer.load_state_dict(saved)
        assert twin.optimizer.param_groups[0]["param_names"] == list("edcba")
        twin.train(range(1, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_older_versions(device: torch.device, packed: bool, kind: str) -> None:
    """Settings that did not exist yet get their defaults; step was a number."""
    newer = ("maximize", "foreach", "capturable", "differentiable", "decoupled_weight_decay")
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, **KINDS[kind])):
        twin.train(2)
        saved = copy.deepcopy(twin.optimizer.state_dict())
        for group in saved["param_groups"]:
            for key in (*newer, *(["fused"] if kind == "loop" else [])):
                del group[key]
        for state in saved["state"].values():
            state["step"] = float(state["step"])
        twin.optimizer.load_state_dict(saved)
        for parameter in twin.parameters:
            assert isinstance(twin.optimizer.state[parameter]["step"], torch.Tensor)
        twin.train(range(2, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_all_sorts(device: torch.device, packed: bool, kind: str) -> None:
    """Empty, one element, scalar, transposed, frozen, double: each treated as natively."""

    def parameters() -> list[nn.Parameter]:
        shapes: list[tuple[int, ...]] = [(0,), (1,), (), (48, 64), (2, 3, 400)]
        made = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        made.append(nn.Parameter(torch.linspace(0, 1, 3072).view(48, 64).t()))
        made.append(nn.Parameter(torch.linspace(0, 1, 2000, dtype=torch.float64)))
        moved = [nn.Parameter(parameter.detach().to(device)) for parameter in made]
        moved.append(nn.Parameter(torch.ones(2000, device=device), requires_grad=False))
        return moved

    def make(_: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters(), 1e-2, **KINDS[kind])

    for twin in both(device, packed, make):
        twin.parameters = list(twin.optimizer.param_groups[0]["params"])
        frozen = twin.parameters[-1]
        for step in range(4):
            twin.give_gradients(step)
            frozen.grad = None
            twin.optimizer.step()
            assert frozen not in twin.optimizer.state


def test_complex_parameters(device: torch.device, packed: bool) -> None:
    """They are updated as pairs of real numbers; their states stay on the device."""

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        extra = nn.Parameter(torch.complex(torch.ones(1500), torch.zeros(1500)).to(device))
        return torch.optim.AdamW([*parameters, extra], 1e-2, amsgrad=True, foreach=False)

    for twin in both(device, packed, make):
        complex_one = twin.optimizer.param_groups[0]["params"][-1]
        for step in range(3):
            twin.give_gradients(step)
            complex_one.grad = torch.full_like(complex_one, 1 + 2j)
            twin.optimizer.step()
        state = twin.optimizer.state[complex_one]
        twin.seen.append([complex_one.detach().cpu().tolist(), state["exp_avg"].cpu().tolist()])


def test_parameters_on_the_cpu_beside_others(device: torch.device, packed: bool) -> None:
    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        on_cpu = nn.Parameter(torch.linspace(0, 1, 3000))
        return torch.optim.AdamW([on_cpu, *parameters], 1e-2, foreach=False)

    for twin in both(device, packed, make):
        twin.parameters = list(twin.optimizer.param_groups[0]["params"])
        twin.train(3)
        twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
        twin.train(range(3, 5))


def test_a_step_without_gradients_changes_nothing(device: torch.device, packed: bool) -> None:
    for twin in both(device, packed, torch.optim.AdamW):
        twin.optimizer.step()
        assert not twin.optimizer.state
        twin.train(2)
        before = [parameter.detach().clone() for parameter in twin.parameters]
        twin.optimizer.step()
        for parameter, old in zip(twin.parameters, before, strict=True):
            assert_same_bits(parameter, old, "parameter")


def test_zeros_as_gradients_are_gradients(device: torch.device, packed: bool) -> None:
    """zero_grad(set_to_none=False): momentum and weight decay go on."""
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False)):
        twin.train(2)
        twin.give_gradients(2)
        twin.optimizer.zero_grad(set_to_none=False)
        for parameter in twin.parameters:
            assert parameter.grad is not None
            assert not parameter.grad.any()
        twin.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_default_dtype_of_the_step(device: torch.device, packed: bool, kind: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for twin in both(device, packed, lambda p: torch.optim.AdamW(p, **KINDS[kind])):
            twin.train(3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_closures_are_refused_and_nothing_has_run(device: torch.device, packed: bool) -> None:
    """torch's inputs for all optimizers are run with closures, too; the RFC admits none."""
    twin = make_twin(device, torch.optim.AdamW)
    twin.wrap(packed)
    twin.give_gradients(0)
    calls: list[int] = []
    with pytest.raises(ValueError, match="no closure"):
        twin.optimizer.step(lambda: calls.append(1) or 0.0)  # type: ignore[func-returns-value]
    assert calls == []
    assert not twin.optimizer.state
