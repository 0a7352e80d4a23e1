"""The device as training code meets it: torch.virtual, streams, generators, saving, compiling."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading

import pytest
import torch

from swapopt_torch import virtual


def test_device_module() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.get_device_module("virtual") is torch.virtual
    assert torch.virtual.is_available()
    assert torch.virtual.device_count() == torch.accelerator.device_count() == 2
    assert torch.virtual.get_device_name(1) == "virtual accelerator"
    assert torch.virtual.is_bf16_supported()


def test_current_device_and_guards() -> None:
    assert torch.virtual.current_device() == 0
    with torch.virtual.device(1):
        assert torch.empty(1, device="virtual").device == torch.device("virtual", 1)
        with torch.virtual.device("virtual:0"):
            assert torch.virtual.current_device() == 0
        assert torch.virtual.current_device() == 1
    assert torch.virtual.current_device() == 0
    with torch.virtual.device_of(torch.empty(1, device="virtual:1")):
        assert torch.virtual.current_device() == 1


@pytest.mark.parametrize("device", [2, -1, "virtual:7"])
def test_devices_that_do_not_exist(device: str | int) -> None:
    with pytest.raises(ValueError, match="device index from 0 to 1"):
        torch.virtual.set_device(device)
    with pytest.raises(ValueError, match="device index from 0 to 1"):
        torch.virtual.memory_allocated(device)


def test_devices_of_other_types() -> None:
    with pytest.raises(ValueError, match="expected a virtual device, found 'cpu'"):
        torch.virtual.synchronize("cpu")


def test_streams() -> None:
    stream = torch.virtual.Stream()
    before = torch.virtual.current_stream()
    assert before == torch.virtual.default_stream()
    assert isinstance(before, torch.virtual.Stream)
    with torch.virtual.stream(stream):
        assert torch.virtual.current_stream() == stream == torch.accelerator.current_stream()
    with stream:
        assert torch.virtual.current_stream() == stream
    assert torch.virtual.current_stream() == before
    with torch.virtual.stream(None):
        assert torch.virtual.current_stream() == before
    assert torch.virtual.Stream() != torch.virtual.Stream()


def test_stream_context_restores_device_and_both_streams() -> None:
    on_one = torch.virtual.Stream(1)
    with torch.virtual.stream(on_one):
        assert torch.virtual.current_device() == 1
        assert torch.virtual.current_stream() == on_one
        assert torch.virtual.current_stream(0) == torch.virtual.default_stream(0)
    assert torch.virtual.current_device() == 0
    assert torch.virtual.current_stream(1) == torch.virtual.default_stream(1)


def test_current_stream_is_per_thread() -> None:
    seen: list[bool] = []

    def other_thread() -> None:
        with torch.virtual.stream(torch.virtual.Stream()):
            seen.append(torch.virtual.current_stream() != torch.virtual.default_stream())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [True]
    assert torch.virtual.current_stream() == torch.virtual.default_stream()


def test_events() -> None:
    event = torch.virtual.Event()
    assert isinstance(event, torch.virtual.Event)
    assert event.query()
    event.wait()
    event.synchronize()
    with pytest.raises(ValueError, match="do not cross processes"):
        torch.virtual.Event(interprocess=True)


def test_work_queued_on_a_stream_is_not_done_at_once() -> None:
    stream = torch.virtual.Stream()
    with torch.virtual.stream(stream):
        torch.ones(1 << 20, device="virtual")
    assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_backward_across_streams_is_ordered_by_autograd() -> None:
    side = torch.virtual.Stream()
    weight = torch.ones(100, 100, device="virtual", requires_grad=True)
    side.wait_stream(torch.virtual.current_stream())
    with torch.virtual.stream(side):
        hidden = (weight @ weight).relu()
    torch.virtual.current_stream().wait_stream(side)
    (hidden * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum().item() == 4_000_000


def test_copy_between_devices() -> None:
    source = torch.arange(5.0, device="virtual:0")
    target = source.to("virtual:1", non_blocking=True)
    assert target.device.index == 1
    assert target.tolist() == source.tolist()


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="virtual") + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="virtual:0") + torch.ones(3, device="virtual:1")
    assert (torch.ones(3, device="virtual") + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert torch.arange(4, device="virtual")[torch.tensor([1, 3])].tolist() == [1, 3]


def test_random_numbers_are_those_of_the_cpu() -> None:
    for draw in (torch.rand, torch.randn, torch.randperm):
        torch.manual_seed(3)
        expected = draw(7)
        torch.manual_seed(3)
        assert torch.equal(draw(7, device="virtual").cpu(), expected)


def test_random_state_is_of_the_device() -> None:
    torch.virtual.manual_seed_all(5)
    state = torch.virtual.get_rng_state()
    cpu_state = torch.get_rng_state()
    first = torch.rand(3, device="virtual")
    assert torch.equal(torch.get_rng_state(), cpu_state)
    torch.virtual.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="virtual"), first)
    assert torch.equal(torch.rand(3, device="virtual:1"), first.to("virtual:1"))
    states = torch.virtual.get_rng_state_all()
    torch.virtual.set_rng_state_all(states)
    with torch.random.fork_rng(devices=[0], device_type="virtual"):
        torch.rand(3, device="virtual")
    assert torch.equal(torch.virtual.get_rng_state(), states[0])


def test_generators() -> None:
    generator = torch.Generator(device="virtual:1").manual_seed(9)
    expected = torch.randn(4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(torch.randn(4, device="virtual:1", generator=generator).cpu(), expected)
    assert torch.virtual.default_generators[1].device == torch.device("virtual", 1)


def test_deterministic_algorithms_fill_uninitialised_memory_as_on_the_cpu() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (torch.float32, torch.int32, torch.bool):
            found = torch.empty(4, dtype=dtype, device="virtual").cpu()
            torch.testing.assert_close(found, torch.empty(4, dtype=dtype), equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_save_and_load() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device="virtual:1")}, file)
    file.seek(0)
    loaded = torch.load(file)["a"]
    assert loaded.device == torch.device("virtual", 1)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["a"].tolist() == [0, 1, 2]


def test_deepcopy_and_moving_modules() -> None:
    layer = torch.nn.Linear(2, 2, device="virtual")
    assert copy.deepcopy(layer).weight.device.type == "virtual"
    assert layer.cpu().weight.device.type == "cpu"
    assert layer.virtual(1).weight.device == torch.device("virtual", 1)
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="virtual").weight.is_virtual


def test_out_and_views_and_in_place_keep_identity() -> None:
    out = torch.empty(0, device="virtual")
    assert torch.add(torch.ones(4, device="virtual"), 1, out=out) is out
    assert out.tolist() == [2, 2, 2, 2]
    base = torch.zeros(2, 3, device="virtual")
    assert base.add_(1) is base
    base.t()[1].fill_(5)
    assert base.tolist() == [[1, 5, 1], [1, 5, 1]]
    values, indices = base.max(dim=1)
    assert (values.tolist(), indices.tolist()) == ([5, 5], [1, 1])


def test_long_lists_are_not_quadratic() -> None:
    tensors = [torch.ones(1, device="virtual") for _ in range(3000)]
    torch._foreach_mul_(tensors, 3.0)
    sums = torch._foreach_add(tensors, tensors)
    assert {value.item() for value in sums[:3] + sums[-3:]} == {6.0}


def test_conjugate_and_complex() -> None:
    pairs = torch.view_as_complex(torch.ones(3, 2, device="virtual")).conj()
    assert pairs.cpu().resolve_conj().tolist() == [1 - 1j] * 3
    assert pairs.imag.tolist() == [-1, -1, -1]


def test_set_data_and_storage() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="virtual"))
    parameter.data = torch.full((2,), 2.0, device="virtual")
    assert parameter.tolist() == [2, 2]
    window = torch.empty(0, device="virtual").set_(parameter.untyped_storage(), 1, (1,))
    assert window.data_ptr() == parameter.data_ptr() + 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_code_generator(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().sum()

    inputs = torch.ones(3, device="virtual", requires_grad=True)
    compiled = torch.compile(function, backend=backend)
    compiled(inputs).backward()
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad.cpu(), 2 * torch.cos(torch.full((3,), 2.0)))


def test_functional_transforms() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x**2).sum()

    rows = torch.ones(3, 2, device="virtual")
    assert torch.func.vmap(torch.func.grad(square))(rows).tolist() == [[2, 2]] * 3


def test_profiler_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3, device="virtual").add_(1)
    assert any("add_" in event.key for event in profile.key_averages())


def test_sparse_is_refused_with_advice() -> None:
    with pytest.raises(RuntimeError, match="strided tensors only"):
        torch.eye(3, device="virtual").to_sparse()


def test_settings_can_change_but_not_the_number_of_devices() -> None:
    with pytest.raises(ValueError, match="device_count is fixed"):
        virtual.enable(device_count=3)
    with pytest.raises(ValueError, match="race mode"):
        virtual.set_race_mode("sometimes")  # type: ignore[arg-type]
    virtual.enable("half-duplex", races="off", capacity_bytes=1 << 20)
    assert virtual.profile().name == "half-duplex"
    assert torch.virtual.mem_get_info()[1] == 1 << 20
    assert virtual.is_enabled()


PROCESS_THAT_ENDS_IN_BACKWARD = """
from swapopt_torch import virtual
import torch
assert not virtual.is_enabled()
try:
    virtual.now_ns()
except RuntimeError as error:
    assert "enable()" in str(error)
virtual.enable(device_count=1)
torch.ones(3, device="virtual", requires_grad=True).sum().backward()
"""


def test_a_process_that_ends_right_after_backward_ends_well() -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROCESS_THAT_ENDS_IN_BACKWARD], check=True)
