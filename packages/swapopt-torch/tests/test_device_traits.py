"""Ascend's differences, on a stand-in for torch.npu that the virtual accelerator carries."""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_common import HostMemoryError
from swapopt_torch import SwapOptimizerConfig, device_traits, optim, swap_optimizer
from swapopt_torch.device_traits import pinned_block_nbytes
from training import assert_same_bits, assert_same_run, train_gpt

MAPPED = 0x2
NO_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION
# What swapopt-torch and the helpers of these tests may ask of torch.npu; tools/
# check_npu_contract.py finds the same names in torch_npu's wheel.
NAMES = (
    *("current_stream", "synchronize", "device", "device_count", "set_device"),
    *("current_device", "set_stream"),
    *("memory_stats", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"),
    "is_available",  # torch.optim itself asks
)


class NpuRuntime:
    """Registers whole pages, and answers with codes instead of exceptions."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses_from = 1 << 60

    def npuHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == MAPPED
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        if nbytes >= self.refuses_from:
            return NO_MEMORY
        torch.virtual.host_register(address, nbytes)
        self.registered[address] = nbytes
        return 0

    def npuHostUnregister(self, address: int) -> int:
        del self.registered[address]
        torch.virtual.host_unregister(address)
        return 0


class Npu(SimpleNamespace):
    """What ``torch.npu`` would be: only the names that the contract knows."""

    def __init__(self) -> None:
        super().__init__(**{name: getattr(torch.virtual, name) for name in NAMES})
        self.runtime = NpuRuntime()
        self.npurt = lambda: self.runtime
        self.capturing: torch.device | None = None
        self.step_dtypes: list[torch.dtype] = []

    def is_current_stream_capturing(self) -> bool:
        index = torch.virtual.current_device()
        return self.capturing is not None and self.capturing.index == index


@pytest.fixture
def npu(device: torch.device, device_type: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Npu]:
    """Let the virtual accelerator be an Ascend to swapopt-torch."""
    if device_type != "virtual":
        pytest.skip("the stand-in is made of the virtual accelerator")
    npu, real_lookup, kernel = Npu(), torch.get_device_module, torch._fused_adamw_

    def lookup(wanted: torch.device | str | None = None) -> object:
        is_stand_in = wanted is not None and torch.device(wanted).type == "virtual"
        return npu if is_stand_in else real_lookup(wanted)

    def fused_adamw(*tensors: list[torch.Tensor], **options: Any) -> None:
        steps = tensors[5]
        npu.step_dtypes.extend(step.dtype for step in steps)
        assert all(step.numel() == 1 and step.device == tensors[0][0].device for step in steps)
        kernel(*tensors[:5], [step.float() for step in steps], **options)

    monkeypatch.setattr(torch, "get_device_module", lookup)
    monkeypatch.setattr(torch, "_fused_adamw_", fused_adamw)
    monkeypatch.setitem(device_traits.TRAITS, "virtual", device_traits.TRAITS["npu"])
    monkeypatch.setattr(device_traits, "linux_version", lambda: (5, 11))
    device_traits._ascend_registrar.cache_clear()
    yield npu
    gc.collect()
    device_traits._ascend_registrar.cache_clear()
    assert not npu.runtime.registered


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), foreach=False),
    "adam_amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, foreach=False),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
    "adamw_fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "hyper_adamw": lambda model: optim.AdamW(model.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_adapter_goes_through_torch_npus_names(
    npu: Npu, device: torch.device, packed: bool, name: str
) -> None:
    config = SwapOptimizerConfig(swap_times=4, packed_swap=packed)
    native = train_gpt(device, OPTIMIZERS[name], steps=2)
    swapped = train_gpt(device, OPTIMIZERS[name], config, steps=2)
    assert_same_run(swapped, native)
    stats = swapped.swapped.swap_stats()
    assert stats.swapped_nbytes > 0
    assert sum(npu.runtime.registered.values()) == stats.pinned_nbytes
    wanted = {"adamw_fused": {torch.float32}, "hyper_adamw": {torch.int64}}
    assert set(npu.step_dtypes) == wanted.get(name, set())


def test_our_adamw_counts_in_the_devices_dtype(npu: Npu, device: torch.device) -> None:
    assert device_traits.TRAITS["npu"].fused_step_dtype is torch.int64
    one = nn.Parameter(torch.linspace(-1, 1, 4096, device=device))
    other = nn.Parameter(one.detach().clone())
    ours, torchs = optim.AdamW([one], 1e-2), torch.optim.AdamW([other], 1e-2, fused=True)
    for step in range(3):
        for parameter in (one, other):
            parameter.grad = torch.full_like(parameter, 0.1 * step - 0.05)
        ours.step()
        torchs.step()
        assert_same_bits(one, other, f"parameter after step {step}")
    assert set(npu.step_dtypes) == {torch.int64, torch.float32}


@pytest.fixture(params=["old torch_npu", "old kernel", "old driver"])
def no_registration(
    request: pytest.FixtureRequest, npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Three ways in which host memory cannot be registered, and what the log says."""
    if request.param == "old torch_npu":
        del npu.npurt
        return "torch_npu before 2.10.0.post7 has no torch.npu.npurt"
    if request.param == "old kernel":
        monkeypatch.setattr(device_traits, "linux_version", lambda: (5, 10))
        return "CANN needs a Linux kernel later than 5.10 for that"
    npu.runtime.refuses_from = 0
    return f"npuHostRegister failed with error {NO_MEMORY}"


def make_parameters(device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (1500, 40_000)
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach() * 0.1
    return parameters


def test_without_registration_memory_comes_from_the_pinned_allocator(
    npu: Npu,
    no_registration: str,
    device: torch.device,
    packed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from swapopt_torch import virtual

    ours, theirs = make_parameters(device), make_parameters(device)
    before = virtual.host_memory().pinned_allocated_bytes
    caplog.set_level(logging.INFO, logger="swapopt_torch")
    swapped = swap_optimizer(
        torch.optim.AdamW(ours, fused=True), SwapOptimizerConfig(packed_swap=packed)
    )
    native = torch.optim.AdamW(theirs, fused=True)
    for _ in range(3):
        swapped.step()
        native.step()
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other, "parameter")
        for key in ("exp_avg", "exp_avg_sq"):
            assert swapped.state[one][key].is_pinned()
            assert_same_bits(swapped.state[one][key], native.state[other][key], key)
    stats = swapped.swap_stats()
    assert virtual.host_memory().pinned_allocated_bytes - before == stats.pinned_nbytes
    assert stats.swapped_nbytes < stats.pinned_nbytes == pinned_block_nbytes(stats.pinned_nbytes)
    refusal = f"{device} cannot register host memory"
    said = [r.getMessage() for r in caplog.records if refusal in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{refusal} ({no_registration}).")


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "allocated"])
def test_memory_outlives_the_copies_of_a_dropped_optimizer(
    npu: Npu, device: torch.device, packed: bool, registered: bool
) -> None:
    """Whoever gets the memory next finds no late copy writing into it."""
    if not registered:
        del npu.npurt
    parameter = nn.Parameter(torch.zeros(1 << 16, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = swap_optimizer(
        torch.optim.AdamW([parameter], fused=True), SwapOptimizerConfig(packed_swap=packed)
    )
    optimizer.step()
    nbytes = optimizer.swap_stats().pinned_nbytes
    optimizer.step()
    del optimizer
    gc.collect()
    reused = [torch.full((nbytes,), 7, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    npu.synchronize(device)
    assert all(bool((block == 7).all()) for block in reused)


def test_memory_that_cannot_be_registered_is_an_error(npu: Npu, device: torch.device) -> None:
    npu.runtime.refuses_from = 2 * mmap.PAGESIZE
    parameter = nn.Parameter(torch.zeros(1 << 16, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = swap_optimizer(torch.optim.AdamW([parameter], fused=True))
    with pytest.raises(HostMemoryError, match="Pinned host memory ran out") as caught:
        optimizer.step()
    assert f"npuHostRegister failed with error {NO_MEMORY}" in str(caught.value.__cause__)
    assert_same_bits(parameter, torch.zeros_like(parameter), "parameter")


def test_the_stream_of_the_parameters_device_is_asked_whether_it_captures(
    npu: Npu, device: torch.device
) -> None:
    """Device 0 is current, the parameter is on the last one."""
    parameter = nn.Parameter(torch.zeros(8, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = optim.AdamW([parameter])
    npu.capturing = device
    with pytest.raises(RuntimeError, match=f"graph is being captured on {device}"):
        optimizer.step()
    npu.capturing = torch.device(device.type, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert not device_traits.is_capturing(torch.device("cpu"))
