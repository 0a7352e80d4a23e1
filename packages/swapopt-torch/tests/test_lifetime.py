"""From wrapping to the end: what deleting frees, the way back, and a captured graph."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from swapopt_torch import SwapOptimizerConfig, is_swap_optimizer, swap_optimizer
from training import allocated, assert_same_bits
from twins import KINDS, Twin, assert_alike, both, make_twin


def adamw(parameters: Sequence[nn.Parameter], kind: str = "loop") -> torch.optim.AdamW:
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "amsgrad": True}]
    return torch.optim.AdamW(groups, 1e-2, **KINDS[kind])


def pinned_bytes(device_type: str) -> int:
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts pinned bytes")
    from swapopt_torch import virtual

    memory = virtual.host_memory()
    return memory.registered_bytes + memory.pinned_allocated_bytes


def device_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.device.type != "cpu" and value.dim() > 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_deleting_frees_everything_at_once(
    device: torch.device, device_type: str, packed: bool, kind: str
) -> None:
    """By reference counts alone: no cycle waits for the collector with memory in its hands."""
    pinned_before = pinned_bytes(device_type)
    parameters = make_twin(device, adamw).parameters
    idle = allocated(device)
    gc.disable()
    try:
        optimizer = swap_optimizer(adamw(parameters, kind), SwapOptimizerConfig(packed_swap=packed))
        twin = Twin(parameters, optimizer, optimizer)
        twin.train(3)
        handle = optimizer.register_step_post_hook(lambda *_: None)
        base, wrapper = weakref.ref(optimizer._base), weakref.ref(optimizer)
        assert pinned_bytes(device_type) > pinned_before
        del optimizer, twin
        assert wrapper() is None
        assert base() is None
        assert pinned_bytes(device_type) == pinned_before
    finally:
        gc.enable()
    assert allocated(device) == idle
    handle.remove()


def test_deleting_with_copies_in_flight(
    device: torch.device, device_type: str, packed: bool
) -> None:
    """The last offload's memory goes away while it is under way: nothing is lost or raced."""
    before = pinned_bytes(device_type)
    for kept in (False, True):
        swapped, native = (make_twin(device, adamw) for _ in range(2))
        swapped.wrap(packed)
        for twin in (swapped, native):
            twin.train(2)
        mirrors = [state["exp_avg"] for state in swapped.optimizer.state.values()]
        expected = [state["exp_avg"].cpu().clone() for state in native.optimizer.state.values()]
        swapped.train(range(2, 3))
        native.train(range(2, 3))
        expected = [state["exp_avg"].cpu().clone() for state in native.optimizer.state.values()]
        parameters = swapped.parameters
        if not kept:
            del mirrors
        del swapped, twin
        gc.collect()
        torch.get_device_module(device).synchronize(device)
        if kept:
            for mirror, value in zip(mirrors, expected, strict=True):
                assert_same_bits(mirror, value, "mirror that outlived its optimizer")
            del mirrors, mirror
        for one, other in zip(parameters, native.parameters, strict=True):
            assert_same_bits(one, other, "parameter")
        gc.collect()
        assert pinned_bytes(device_type) == before


def test_a_new_optimizer_at_once_over_the_same_parameters(
    device: torch.device, packed: bool
) -> None:
    """The old one's copies are under way while the new one takes the same memory."""
    for twin in both(device, packed, adamw):
        twin.train(2)
        is_swapped = is_swap_optimizer(twin.optimizer)
        twin.base = twin.optimizer = adamw(twin.parameters)
        if is_swapped:
            twin.wrap(packed)
        twin.train(range(2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_unswap_is_as_if_never_wrapped(
    device: torch.device, device_type: str, packed: bool, kind: str
) -> None:
    pinned_before = pinned_bytes(device_type)
    swapped, native = (make_twin(device, lambda p: adamw(p, kind)) for _ in range(2))
    swapped.wrap(packed)
    for twin in (swapped, native):
        twin.train(3)
    wrapper = swapped.swapped
    assert wrapper.unswap() is swapped.base
    swapped.optimizer = swapped.base
    assert_alike(swapped, native)
    assert device_state_bytes(swapped.base) == device_state_bytes(native.base) > 0
    for state in swapped.base.state.values():
        assert not any(value.is_pinned() for value in state.values() if value.dim() > 0)
    assert "step" not in vars(swapped.base)
    with pytest.raises(RuntimeError, match=r"unswap\(\) gave"):
        wrapper.step()
    assert pinned_bytes(device_type) == pinned_before
    for twin in (swapped, native):
        twin.train(range(3, 5))
        twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
        twin.train(range(5, 7))
    assert_alike(swapped, native)
    assert wrapper.swap_stats().swapped_states == 0


def test_nothing_that_changes_states_works_on_an_unswapped_wrapper(
    device: torch.device, packed: bool
) -> None:
    """It would move states of an optimizer that steps by itself again."""
    twin = make_twin(device, adamw)
    twin.wrap(packed)
    twin.train(1)
    wrapper = twin.swapped
    saved = wrapper.state_dict()
    wrapper.unswap()
    extra = nn.Parameter(torch.ones(2048, device=device))
    for call in (
        wrapper.step,
        wrapper.unswap,
        lambda: wrapper.load_state_dict(saved),
        lambda: wrapper.add_param_group({"params": [extra]}),
        lambda: setattr(wrapper, "state", twin.base.state),
    ):
        with pytest.raises(RuntimeError, match=r"unswap\(\) gave"):
            call()
    assert len(twin.base.param_groups) == 2
    twin.optimizer = twin.base
    twin.train(range(1, 3))


def test_unswap_with_copies_in_flight_on_another_stream(device: torch.device, packed: bool) -> None:
    """The copies back run on the caller's stream; the base steps there without waiting."""
    module = torch.get_device_module(device)
    for twin in both(device, packed, adamw):
        twin.train(2)
        stream = module.Stream(device=device)
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            twin.train(range(2, 3))
            if is_swap_optimizer(twin.optimizer):
                twin.optimizer = twin.swapped.unswap()
            twin.train(range(3, 5))
        module.current_stream(device).wait_stream(stream)


def test_unswap_of_an_optimizer_that_never_stepped(device: torch.device, packed: bool) -> None:
    for twin in both(device, packed, adamw):
        if is_swap_optimizer(twin.optimizer):
            twin.optimizer = twin.swapped.unswap()
        assert not twin.optimizer.state
        twin.train(2)


def test_wrapped_again(device: torch.device, packed: bool) -> None:
    """Any number of times, with other settings, states along each way."""
    for twin in both(device, packed, adamw):
        twin.train(2)
        is_swapped = is_swap_optimizer(twin.optimizer)
        for round_number in range(3):
            if is_swapped:
                twin.optimizer = twin.swapped.unswap()
            twin.train(range(2 + 4 * round_number, 4 + 4 * round_number))
            if is_swapped:
                twin.wrap(packed != (round_number == 1), swap_times=1 + round_number)
            twin.train(range(4 + 4 * round_number, 6 + 4 * round_number))


@pytest.mark.parametrize("made", ["on the base", "on the wrapper"])
def test_schedulers_live_through_wrapping_and_back(
    device: torch.device, packed: bool, made: str
) -> None:
    """One scheduler over native, swapped and native steps, without a warning."""

    def follow(twin: Twin, scheduler: LRScheduler, steps: range) -> None:
        for step in steps:
            twin.train(range(step, step + 1))
            scheduler.step()
            twin.seen.append(scheduler.get_last_lr())

    swapped, native = (make_twin(device, adamw) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference = ExponentialLR(native.base, 0.8)
        follow(native, reference, range(6))
        if made == "on the base":
            scheduler = ExponentialLR(swapped.base, 0.8)
            follow(swapped, scheduler, range(2))
            swapped.wrap(packed)
        else:
            swapped.wrap(packed)
            scheduler = ExponentialLR(swapped.optimizer, 0.8)
            follow(swapped, scheduler, range(2))
        follow(swapped, scheduler, range(2, 4))
        swapped.optimizer = swapped.swapped.unswap()
        follow(swapped, scheduler, range(4, 6))
    assert_alike(swapped, native)


def test_a_scheduler_made_on_a_wrapper_that_never_stepped(device: torch.device) -> None:
    """It cannot know whether the base steps; it must not say that nobody does."""
    for twin in both(device, True, adamw):
        scheduler = ExponentialLR(twin.optimizer, 0.8)
        if is_swap_optimizer(twin.optimizer):
            twin.optimizer = twin.swapped.unswap()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2):
                twin.train(range(step, step + 1))
                scheduler.step()
        twin.seen.append(scheduler.get_last_lr())


def test_hooks_and_scaling_after_the_way_back(device: torch.device, packed: bool) -> None:
    """Hooks registered on either object stay with the base; a scaler takes it as any other."""
    for twin in both(device, packed, lambda p: adamw(p, "fused")):
        twin.optimizer.register_step_pre_hook(lambda *_, twin=twin: twin.seen.append("one"))
        twin.base.register_step_post_hook(lambda *_, twin=twin: twin.seen.append("two"))
        twin.train(1)
        if is_swap_optimizer(twin.optimizer):
            twin.optimizer = twin.swapped.unswap()
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
        twin.give_gradients(1)
        scaler.scale(torch.ones((), device=device))  # makes the scale
        scaler.step(twin.optimizer)
        scaler.update()
        assert twin.seen == ["one", "two"] * 2


def test_unswap_where_the_states_do_not_fit(
    device: torch.device, device_type: str, packed: bool
) -> None:
    """They stay swapped, and training goes on with them there."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator takes a capacity")
    module = torch.get_device_module(device)
    numels = [40_000] * 6
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, fused=True), numels):
        twin.train(2)
        if is_swap_optimizer(twin.optimizer):
            module.set_capacity(allocated(device) + 5 * 4 * 40_000, device)
            try:
                with pytest.raises(torch.OutOfMemoryError):
                    twin.swapped.unswap()
            finally:
                module.set_capacity(None, device)
            assert device_state_bytes(twin.optimizer) == 0
            with pytest.raises(RuntimeError, match="swap_optimizer returned"):
                twin.base.step()
        twin.train(range(2, 4))


def test_a_captured_graph_is_refused(
    device: torch.device, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would repeat one step's copies and counters; found before anything moves."""
    module = torch.get_device_module(device)
    for twin in both(device, packed, adamw):
        twin.train(2)
        if is_swap_optimizer(twin.optimizer):
            asked: list[int] = []

            def capturing(asked: list[int] = asked) -> bool:
                asked.append(module.current_device())
                return True

            twin.give_gradients(2)
            before = _checkpoint(twin.optimizer)
            with monkeypatch.context() as patch:
                patch.setattr(module, "is_current_stream_capturing", capturing, raising=False)
                with pytest.raises(RuntimeError, match="captured"):
                    twin.optimizer.step()
            assert set(asked) == {device.index}
            for key, value in _checkpoint(twin.optimizer).items():
                assert_same_bits(value, before[key], f"state {key}")
        twin.train(range(2, 4))


def _checkpoint(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, str], torch.Tensor]:
    saved = copy.deepcopy(optimizer.state_dict())
    return {(n, key): value for n, state in saved["state"].items() for key, value in state.items()}
