"""Checkpoints across processes, dtypes, movements and formats (C3, N2, M3)."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import resuming
from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import allocated, assert_same_bits
from twins import KINDS, Twin, assert_alike, assert_same_group, both, make_twin

TARGETS = [
    SwapOptimizerConfig(swap_times=3, packed_swap=True),
    SwapOptimizerConfig(swap_times=3, packed_swap=False),
    SwapOptimizerConfig(swap_times=1, min_numel=2500, packed_swap=True),
    SwapOptimizerConfig(swap_times=9, min_numel=0, packed_swap=False),
    SwapOptimizerConfig(swap_times=4, state_keys=("exp_avg_sq",), packed_swap=True),
    SwapOptimizerConfig(swap_times=2, state_keys=("max_exp_avg_sq", "exp_avg"), packed_swap=False),
]


def two_groups(parameters: Sequence[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "amsgrad": True}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "foreach": False, **options})


def copy_parameters(target: Twin, source: Twin) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters, source.parameters, strict=True):
            one.copy_(other)


def assert_same_checkpoint(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    optimizer, reference = found["optimizer"], expected["optimizer"]
    for number, state in reference["state"].items():
        assert set(optimizer["state"][number]) == set(state)
        for key, value in state.items():
            assert_same_bits(optimizer["state"][number][key], value, f"{key}, {what}")
    groups = zip(optimizer["param_groups"], reference["param_groups"], strict=True)
    for group, other in groups:
        assert_same_group(group, other, what)
        assert group["params"] == other["params"]
    pairs = zip(found["parameters"], expected["parameters"], strict=True)
    for index, pair in enumerate(pairs):
        assert_same_bits(*pair, f"parameter {index}, {what}")
    assert found["scheduler"] == expected["scheduler"]


def test_c3_update_59_in_a_new_process(
    device: torch.device, device_type: str, tmp_path: Path
) -> None:
    """58 steps, torch.save, a new process, one step: equal to 59 native steps in one go."""
    saved, expected = {}, {}
    for kind, packed in itertools.product(KINDS, (True, False)):
        twin, scheduler = resuming.start(device, kind, packed)
        resuming.proceed(twin, scheduler, range(resuming.STEPS))
        saved[kind, packed] = resuming.checkpoint(twin, scheduler)
        native, native_scheduler = resuming.start(device, kind, None)
        resuming.proceed(native, native_scheduler, range(resuming.STEPS + 1))
        expected[kind] = resuming.checkpoint(native, native_scheduler)
    source, target = tmp_path / "58.pt", tmp_path / "59.pt"
    torch.save(saved, source)
    program = [sys.executable, str(Path(resuming.__file__)), device_type, str(source), str(target)]
    subprocess.run(program, check=True, env=_environment(), timeout=120)
    results = torch.load(target, weights_only=True)
    assert len(results) == 2 * len(saved)
    for (kind, *movements), result in results.items():
        assert_same_checkpoint(result, expected[kind], f"{kind}, packed {movements}")
        steps = [float(state["step"]) for state in result["optimizer"]["state"].values()]
        assert steps == [resuming.STEPS + 1] * len(steps)
        lr, betas = (result["optimizer"]["param_groups"][0][key] for key in ("lr", "betas"))
        assert lr not in (1e-2, 2e-2)
        assert 0.85 < betas[0] < 0.95


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def loaded_pair(
    device: torch.device,
    packed: bool,
    saved: dict[str, Any],
    dtype: torch.dtype,
    *,
    stepped: bool,
) -> tuple[Twin, Twin]:
    """Load one checkpoint into a swapped optimizer and into its native twin."""
    pair = make_twin(device, two_groups, dtype=dtype), make_twin(device, two_groups, dtype=dtype)
    pair[0].wrap(packed)
    for twin in pair:
        if stepped:
            twin.train(range(20, 22))
        twin.optimizer.load_state_dict(copy.deepcopy(saved))
    return pair


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("source", ["native", "swapped"])
@pytest.mark.parametrize(
    ("saved_dtype", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=["fp32 to bf16", "bf16 to fp32", "fp32 to fp64"],
)
def test_n2_states_take_the_parameters_dtype(
    device: torch.device,
    packed: bool,
    saved_dtype: torch.dtype,
    dtype: torch.dtype,
    source: str,
    stepped: bool,
) -> None:
    origin = make_twin(device, two_groups, dtype=saved_dtype)
    if source == "swapped":
        origin.wrap(not packed)
    origin.train(3)
    saved = origin.optimizer.state_dict()
    swapped, native = loaded_pair(device, packed, saved, dtype, stepped=stepped)
    assert_alike(swapped, native)
    moments = [native.optimizer.state[p]["exp_avg"] for p in native.parameters]
    assert {tensor.dtype for tensor in moments} == {dtype}
    for twin in (swapped, native):
        twin.train(range(3, 6))
    assert_alike(swapped, native)


@pytest.mark.parametrize("target", TARGETS, ids=[str(number) for number in range(len(TARGETS))])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_loads_what_another_saved(
    device: torch.device, target: SwapOptimizerConfig, stepped: bool, kind: str
) -> None:
    """From each of the layouts, and from native, into this one."""

    def make() -> Twin:
        return make_twin(device, lambda p: two_groups(p, **KINDS[kind]))

    reference = make()
    reference.train(5)
    for source in (*TARGETS, None):
        origin, twin = make(), make()
        if source is not None:
            origin.optimizer = swap_optimizer(origin.base, source)
        twin.optimizer = swap_optimizer(twin.base, target)
        origin.train(3)
        if stepped:
            twin.train(range(30, 32))
        twin.optimizer.load_state_dict(origin.optimizer.state_dict())
        copy_parameters(twin, origin)
        twin.train(range(3, 5))
        assert_alike(twin, reference)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("saved_options", "options"),
    [
        (KINDS["loop"], KINDS["fused"]),
        (KINDS["fused"], KINDS["loop"]),
        ({"amsgrad": True}, {"amsgrad": False}),
        ({"amsgrad": False}, {"amsgrad": True}),
        ({"maximize": True, "weight_decay": 0.3}, {}),
    ],
    ids=["loop to fused", "fused to loop", "amsgrad off", "amsgrad on", "others"],
)
def test_the_checkpoints_settings_win(
    device: torch.device,
    packed: bool,
    saved_options: dict[str, Any],
    options: dict[str, Any],
    stepped: bool,
) -> None:
    """As natively: the groups of the checkpoint replace those of the optimizer."""
    origin = make_twin(device, lambda p: torch.optim.AdamW(p, 1e-2, **saved_options))
    origin.train(3)
    saved = copy.deepcopy(origin.optimizer.state_dict())
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 3e-2, **options)):
        if stepped:
            twin.train(range(30, 32))
        twin.optimizer.load_state_dict(copy.deepcopy(saved))
        for parameter in twin.parameters:
            step = twin.optimizer.state[parameter]["step"]
            twin.seen.append((float(step), str(step.device)))
        twin.train(range(3, 6))


def test_states_of_some_parameters_only(device: torch.device, packed: bool) -> None:
    """Parameters that had no gradient before the save, and none of the others after it."""
    for twin in both(device, packed, two_groups):
        for step in range(2):
            twin.give_gradients(step)
            twin.parameters[1].grad = twin.parameters[3].grad = None
            twin.optimizer.step()
        saved = copy.deepcopy(twin.optimizer.state_dict())
        assert sorted(saved["state"]) == [0, 2, 4]
        twin.train(range(2, 4))
        twin.optimizer.load_state_dict(saved)
        assert len(twin.optimizer.state) == 3
        twin.train(range(4, 6))


def test_entries_of_no_parameter_are_kept(device: torch.device, packed: bool) -> None:
    """As natively: a trainer's own note beside the states survives load and save."""
    for twin in both(device, packed, two_groups):
        twin.train(1)
        saved = copy.deepcopy(twin.optimizer.state_dict())
        saved["state"]["note"] = {"tokens": 12}
        twin.optimizer.load_state_dict(saved)
        twin.train(range(1, 3))
        assert twin.optimizer.state_dict()["state"]["note"] == {"tokens": 12}


class HostAllocations(TorchDispatchMode):
    """Adds up the bytes of all CPU tensors that operators allocate, freed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.device.type == "cpu" and _storage(tensor) not in given:
                self.nbytes += tensor.untyped_storage().nbytes()
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("case", ["same layout", "snapshot alive", "other dtype", "first load"])
@pytest.mark.parametrize("source", ["native", "swapped"])
def test_m3_a_load_stays_on_the_host(
    device: torch.device, device_type: str, packed: bool, case: str, source: str
) -> None:
    """No byte on the device; host memory beyond the caller's below 1.1 times the states."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator has peaks of pinned memory")
    from swapopt_torch import virtual

    numels = (20_000, 30_000, 50_000, 10_000)
    saved_dtype = torch.bfloat16 if case == "other dtype" else torch.float32
    origin, twin = (make_twin(device, _adamw, numels, d) for d in (saved_dtype, torch.float32))
    if source == "swapped":
        origin.wrap(packed)
    twin.wrap(packed)
    origin.train(2)
    saved = copy.deepcopy(origin.optimizer.state_dict())
    for state in saved["state"].values():
        state.update({key: value.cpu() for key, value in state.items()})
    snapshot = None
    if case != "first load":
        twin.train(range(5, 7))
        twin.optimizer.load_state_dict(copy.deepcopy(saved))
        twin.train(1)
        if case == "snapshot alive":
            snapshot = twin.optimizer.state_dict()
    idle = allocated(device)
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = virtual.host_memory(reset_peaks=True)
    with HostAllocations() as pageable:
        twin.optimizer.load_state_dict(saved)
    after = virtual.host_memory()
    assert module.max_memory_allocated(device) == idle
    states = 2 * 4 * sum(numels)
    pinned = after.peak_registered_bytes + after.peak_pinned_allocated_bytes
    pinned -= before.registered_bytes + before.pinned_allocated_bytes
    assert pinned + pageable.nbytes < 1.1 * states
    in_place = case in ("same layout", "other dtype")
    assert (pinned < 0.01 * states) == in_place
    del snapshot


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, foreach=False)


@pytest.mark.parametrize("kind", KINDS)
def test_safetensors(device: torch.device, packed: bool, kind: str, tmp_path: Path) -> None:
    """It refuses tensors that share memory or are not contiguous: ours are saved as they are."""
    file = tmp_path / "optimizer.safetensors"
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        twin.train(3)
        saved = twin.optimizer.state_dict()
        named = {f"{n}.{key}": t for n, state in saved["state"].items() for key, t in state.items()}
        save_file(named, file)
        twin.train(range(3, 5))
        restored: dict[str, Any] = {"state": {}, "param_groups": saved["param_groups"]}
        for name, tensor in load_file(file).items():
            number, key = name.split(".")
            restored["state"].setdefault(int(number), {})[key] = tensor
        twin.optimizer.load_state_dict(restored)
        twin.train(range(5, 7))


class Model(nn.Module):
    """The parameters of a twin under names, which is what a distributed checkpoint asks for."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.weights = nn.ParameterList(twin.parameters)


OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["to swapped", "to native", "between swapped"])
def test_distributed_checkpoint_without_a_process_group(
    device: torch.device, kind: str, options: StateDictOptions, way: str
) -> None:
    """Saved and loaded by name, into an optimizer that has not stepped, in both directions."""
    packed = (kind == "loop") == options.full_state_dict

    def transfer(swap_origin: bool, swap_target: bool) -> Twin:
        origin, target = (
            make_twin(device, lambda p: two_groups(p, **KINDS[kind])) for _ in range(2)
        )
        if swap_origin:
            origin.wrap(packed)
        if swap_target:
            target.wrap(packed)
        origin.train(3)
        saved = copy.deepcopy(
            get_optimizer_state_dict(Model(origin), origin.optimizer, options=options)
        )
        set_optimizer_state_dict(
            Model(target), target.optimizer, optim_state_dict=saved, options=options
        )
        fresh = make_twin(device, _adamw)
        for parameter, start in zip(target.parameters, fresh.parameters, strict=True):
            assert_same_bits(parameter, start, "parameter of a fresh optimizer")
            assert parameter.grad is None
        again = get_optimizer_state_dict(Model(target), target.optimizer, options=options)
        for one, other in zip(_tensors(again), _tensors(saved), strict=True):
            assert_same_bits(one, other, "state that came through")
        copy_parameters(target, origin)
        target.train(range(3, 5))
        return target

    swapped = transfer(way != "to swapped", way != "to native")
    assert_alike(swapped, transfer(False, False))


def test_distributed_checkpoint_of_a_fresh_optimizer(device: torch.device, packed: bool) -> None:
    """Asking for its state takes a step with lr 0 and no closure: nothing but states appears."""
    for twin in both(device, packed, two_groups):
        before = [parameter.detach().clone() for parameter in twin.parameters]
        saved = get_optimizer_state_dict(Model(twin), twin.optimizer)
        assert len(saved["state"]) == len(twin.parameters)
        for parameter, old in zip(twin.parameters, before, strict=True):
            assert_same_bits(parameter, old, "parameter")
        twin.seen.append([group["lr"] for group in twin.optimizer.param_groups])
        twin.train(2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_m3_distributed_checkpoint_stays_on_the_host(
    device: torch.device, packed: bool, options: StateDictOptions
) -> None:
    """No byte on the device, except for the step by which torch makes a fresh one's states."""
    numels = (20_000, 30_000, 50_000, 10_000)
    origin, stepped, fresh = (make_twin(device, _adamw, numels) for _ in range(3))
    for twin in (origin, stepped, fresh):
        twin.wrap(packed)
    origin.train(2)
    stepped.train(1)
    saved = get_optimizer_state_dict(Model(origin), origin.optimizer, options=options)
    assert {tensor.device.type for tensor in _tensors(saved)} == {"cpu"}
    assert _peak_of_loading(device, stepped, saved, options) == 0
    gradients, temporaries = 4 * sum(numels), 3 * 4 * max(numels)
    step_bytes = fresh.swapped.swap_stats().bound_nbytes + gradients + temporaries
    assert 0 < _peak_of_loading(device, fresh, saved, options) <= step_bytes


def _peak_of_loading(
    device: torch.device, twin: Twin, saved: dict[str, Any], options: StateDictOptions
) -> int:
    module = torch.get_device_module(device)
    idle = allocated(device)
    module.reset_peak_memory_stats(device)
    set_optimizer_state_dict(Model(twin), twin.optimizer, saved, options=options)
    get_optimizer_state_dict(Model(twin), twin.optimizer, options=options)
    assert allocated(device) == idle
    return int(module.max_memory_allocated(device)) - idle
