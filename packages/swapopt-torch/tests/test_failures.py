"""F1: whatever fails in a step, nothing is lost and the next step works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swapopt_common import SlotState
from swapopt_torch import (
    HostMemoryError,
    SwapOptimizerConfig,
    SwapStepError,
    TorchSwapOptimizer,
    TransferCounts,
    announce,
    host_memory,
    swap_optimizer,
)
from swapopt_torch.packed import PackedMovement
from swapopt_torch.per_tensor import PerTensorMovement
from swapopt_torch.pinning import Lease
from training import allocated, assert_same_bits, capped, fail_at

COUNT = 8  # two parameters in each of four batches


class Step:
    """A swapped optimizer and a native one whose parameters can be stepped apart."""

    def __init__(
        self, device: torch.device, packed: bool, *, pageable_fallback: bool = False
    ) -> None:
        self.device = device
        self.swapped = [
            nn.Parameter(torch.linspace(0, i + 1, 4096, device=device)) for i in range(COUNT)
        ]
        self.native = [nn.Parameter(p.detach().clone()) for p in self.swapped]
        self.optimizer: TorchSwapOptimizer = swap_optimizer(
            torch.optim.AdamW(self.swapped, 1e-2, fused=True),
            SwapOptimizerConfig(swap_times=4, packed_swap=packed),
            pageable_fallback=pageable_fallback,
        )
        self.reference = torch.optim.AdamW(self.native, 1e-2, fused=True)

    def give_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for one, other in zip(self.swapped, self.native, strict=True):
            grad = torch.randn(4096, generator=generator).to(self.device)
            one.grad, other.grad = grad, grad.clone()

    def step_both(self, seed: int) -> None:
        self.give_gradients(seed)
        self.optimizer.step()
        self.reference.step()

    def native_updates_only(self, updated: set[int]) -> None:
        """Step the native parameters of those indices, leaving out all others."""
        kept = [parameter.grad for parameter in self.native]
        for index, parameter in enumerate(self.native):
            parameter.grad = kept[index] if index in updated else None
        self.reference.step()
        for grad, parameter in zip(kept, self.native, strict=True):
            parameter.grad = grad

    def assert_equal(self) -> None:
        for index, (one, other) in enumerate(zip(self.swapped, self.native, strict=True)):
            assert_same_bits(one, other, f"parameter {index}")
            for key, value in self.optimizer.state[one].items():
                assert_same_bits(value, self.reference.state[other][key], f"{key} of {index}")

    def assert_consistent(self, expected_bytes: int) -> None:
        """Invariant 6: all states home, no memory held, groups as they were."""
        assert allocated(self.device) == expected_bytes
        slots = [slot for unit in self.optimizer._adapter.units for slot in unit.slots]
        assert {slot.state for slot in slots} == {SlotState.HOST}
        assert all(slot.tensor is slot.cpu_tensor for slot in slots)
        assert [len(group["params"]) for group in self.optimizer.param_groups] == [COUNT]
        for state in self.optimizer.state.values():
            assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "cpu"


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_f1_update_fails(
    device: torch.device,
    packed: bool,
    failing: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update of one batch raises before it does anything: earlier ones keep their values."""
    pair = Step(device, packed)
    pair.step_both(0)
    pair.give_gradients(1)
    expected_bytes = allocated(device)
    with monkeypatch.context() as patch:
        fail_at(patch, torch, "_fused_adamw_", failing, error)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SwapStepError
        with pytest.raises(expected) as caught:
            pair.optimizer.step()
    if isinstance(caught.value, SwapStepError):
        assert caught.value.__cause__ is error
        assert caught.value.updated_batches == tuple(range(failing))
        assert caught.value.interrupted_batch == failing
        assert f"{failing} of 4 batches" in str(caught.value)
        assert f"param_groups[0]['params'][{2 * failing}]" in str(caught.value)
    del caught
    pair.assert_consistent(expected_bytes)
    pair.native_updates_only({2 * batch + i for batch in range(failing) for i in (0, 1)})
    pair.assert_equal()
    pair.step_both(2)
    pair.assert_equal()


@pytest.mark.parametrize("failing", range(4))
def test_f1_memory_runs_out(
    device: torch.device, packed: bool, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for one prefetch: if nothing was updated, the cause itself is raised."""
    pair = Step(device, packed)
    pair.step_both(0)
    pair.give_gradients(1)
    expected_bytes = allocated(device)
    movement = PackedMovement if packed else PerTensorMovement
    with monkeypatch.context() as patch:
        fail_at(patch, movement, "acquire", failing, torch.OutOfMemoryError("none left"))
        with pytest.raises(RuntimeError) as caught:
            pair.optimizer.step()
    updated = max(0, failing - 1)
    if updated == 0:
        assert isinstance(caught.value, torch.OutOfMemoryError)
    else:
        assert isinstance(caught.value, SwapStepError)
        assert caught.value.updated_batches == tuple(range(updated))
        assert caught.value.interrupted_batch is None
    del caught
    pair.assert_consistent(expected_bytes)
    pair.native_updates_only(set(range(2 * updated)))
    pair.assert_equal()
    pair.step_both(2)
    pair.assert_equal()


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("direction", ["add_h2d", "add_d2h"])
def test_f1_any_copy_fails(
    device: torch.device,
    packed: bool,
    failing: int,
    direction: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error between two copies of a prefetch or an offload: values stay consistent."""
    pair = Step(device, packed)
    pair.step_both(0)
    pair.give_gradients(1)
    expected_bytes = allocated(device)
    before = [parameter.detach().clone() for parameter in pair.swapped]
    with monkeypatch.context() as patch:
        # Every copy is counted right after it is issued.
        fail_at(patch, TransferCounts, direction, failing, RuntimeError("link down"))
        with pytest.raises(RuntimeError, match="link down"):
            pair.optimizer.step()
    expected_bytes += sum(value.nbytes for value in before)
    pair.assert_consistent(expected_bytes)
    updated = {
        index
        for index, value in enumerate(before)
        if not torch.equal(value, pair.swapped[index].detach())
    }
    pair.native_updates_only(updated)
    pair.assert_equal()
    pair.step_both(2)
    pair.assert_equal()


def test_memory_for_an_arena_is_explained(device: torch.device, device_type: str) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator takes a capacity")
    pair = Step(device, True)
    pair.step_both(0)
    pair.give_gradients(1)
    with (
        capped(device, allocated(device) + 1000),
        pytest.raises(
            torch.OutOfMemoryError, match=r"takes 2 of 65,536 bytes\. A larger swap_times makes"
        ),
    ):
        pair.optimizer.step()
    pair.step_both(1)

    one = [nn.Parameter(torch.ones(4096, device=device))]
    optimizer = swap_optimizer(torch.optim.AdamW(one))
    one[0].grad = torch.ones_like(one[0])
    with (
        capped(device, allocated(device) + 1000),
        pytest.raises(
            torch.OutOfMemoryError,
            match=r"takes 1 of 32,768 bytes\. That is what the states of one",
        ),
    ):
        optimizer.step()


def test_memory_for_a_batch_is_explained(device: torch.device, device_type: str) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator takes a capacity")
    pair = Step(device, False)
    pair.step_both(0)
    pair.give_gradients(1)
    with (
        capped(device, allocated(device) + 1000),
        pytest.raises(torch.OutOfMemoryError, match=r"batch, 65,536 bytes.*swap_times"),
    ):
        pair.optimizer.step()
    pair.step_both(1)


def test_pinned_memory_that_runs_out_is_explained(device: torch.device, device_type: str) -> None:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator limits pinned memory")
    from swapopt_torch import virtual

    pair = Step(device, True)
    pair.give_gradients(0)
    virtual.set_pinned_limit(1000)
    try:
        with pytest.raises(HostMemoryError, match=r"Pinned host memory ran out: 262,144 bytes"):
            pair.optimizer.step()
    finally:
        virtual.set_pinned_limit(None)
    assert not pair.optimizer.state
    pair.step_both(0)
    pair.assert_equal()


@pytest.fixture
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(host_memory, "registered_buffer", refuse)
    monkeypatch.setattr(host_memory, "allocated_buffer", refuse)


@pytest.mark.usefixtures("no_pinning")
def test_m6_pageable_memory_only_where_it_was_asked_for(device: torch.device, packed: bool) -> None:
    held = Lease.total_nbytes
    pair = Step(device, packed)
    pair.give_gradients(0)
    with pytest.raises(HostMemoryError, match=rf"{held:,} bytes are held.*pageable_fallback=True"):
        pair.optimizer.step()
    assert not pair.optimizer.state

    fallback = Step(device, packed, pageable_fallback=True)
    with pytest.warns(UserWarning, match=r"Pinned host memory ran out: 262,144 bytes.*pageable"):
        fallback.step_both(0)
    fallback.step_both(1)
    fallback.assert_equal()
    assert fallback.optimizer.swap_stats().pinned_nbytes == 0
    assert not fallback.optimizer.state[fallback.swapped[0]]["exp_avg"].is_pinned()


def test_m6_a_host_that_is_too_small_is_warned_of(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "available_host_nbytes", lambda: 262_143)
    with pytest.warns(UserWarning, match=r"need 262,144 bytes .* 262,143 are free"):
        Step(device, packed)


def test_available_host_memory_is_found() -> None:
    available = host_memory.available_host_nbytes()
    assert available is not None
    assert 10**6 < available < 10**15
