"""The dry device: no memory, no values, and the same time and memory accounts as the wet one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swapopt_torch import virtual

sys.path.insert(0, str(Path(__file__).parent))
from dry_programs import PROGRAMS

Figures = dict[str, Any]

_PREAMBLE = """
import resource, sys, torch
from swapopt_torch import virtual
virtual.enable("h200", device_count=1, dry=True)

def refusal(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"
"""


def run_process(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_dry(code: str) -> None:
    """Run a program, with assertions, in a process whose device is dry."""
    run_process(["-c", _PREAMBLE + code])


@pytest.fixture(scope="module")
def dry_and_wet() -> tuple[Figures, Figures]:
    script = str(Path(__file__).parent / "dry_programs.py")
    dry, wet = (json.loads(run_process([script, mode])) for mode in ("dry", "wet"))
    return dry, wet


@pytest.mark.parametrize("program", PROGRAMS)
def test_dry_takes_the_time_and_memory_of_wet(
    program: str, dry_and_wet: tuple[Figures, Figures]
) -> None:
    dry, wet = (figures[program] for figures in dry_and_wet)
    assert len(wet["rows"]) > 50
    assert wet["steps"][-1]["memory"]["active_bytes.all.peak"] > 0
    assert dry["operators"] == wet["operators"]
    for dry_row, wet_row in zip(dry["rows"], wet["rows"], strict=True):
        assert dry_row == wet_row
    assert dry["steps"] == wet["steps"]


def test_swapped_states_take_host_memory_in_the_books(
    dry_and_wet: tuple[Figures, Figures],
) -> None:
    for figures in dry_and_wet:
        assert figures["packed fused"]["steps"][-1]["host"]["registered_bytes"] > 0
        assert figures["native fused"]["steps"][-1]["host"]["registered_bytes"] == 0


def test_a_shard_of_seventy_billion_parameters_takes_no_memory() -> None:
    run_dry(
        """
from swapopt_torch import SwapOptimizerConfig, swap_optimizer
params = [torch.nn.Parameter(torch.empty(100_000_000, device="virtual")) for _ in range(11)]
for param in params:
    param.grad = torch.zeros_like(param)
import warnings; warnings.simplefilter("ignore")  # this machine may have too little memory for it
optimizer = torch.optim.AdamW(params, fused=True)
optimizer = swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=11))
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    optimizer.step()
optimizer.synchronize()
assert virtual.host_memory().registered_bytes >= 8_800_000_000
assert torch.virtual.max_memory_allocated() >= 2 * 4_400_000_000 + 2 * 800_000_000
pinned = torch.empty(2**34, dtype=torch.uint8, pin_memory=True)
pinned.copy_(torch.empty(2**34, dtype=torch.uint8, device="virtual"), non_blocking=True)
grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
assert grown_kib < 200 * 1024, grown_kib
"""
    )


def test_what_is_read_from_a_dry_device_is_zero() -> None:
    run_dry(
        """
x = torch.full((2, 3), 5.0, device="virtual")
assert x.sum().item() == 0 and bool(x.any()) is False and float(x[0, 0]) == 0
assert x.cpu().tolist() == x.tolist() == [[0.0] * 3] * 2
assert torch.arange(3, device="virtual").tolist() == [0, 0, 0]
target = torch.ones(4, 3)
target[1:3].copy_(x)
assert target.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]
assert torch.masked_select(x, x > 0).numel() == 0
assert torch.zeros_like(x, device="cpu").tolist() == [[0.0] * 3] * 2
assert (x.double() + 1).dtype == torch.float64 and (x > 0).dtype == torch.bool
"""
    )


def test_pinned_memory_of_a_dry_device_keeps_what_the_program_wrote() -> None:
    run_dry(
        """
pinned = torch.ones(5).pin_memory()
pinned.copy_(torch.zeros(5, device="virtual"), non_blocking=True)
torch.virtual.synchronize()
assert pinned.is_pinned() and pinned.tolist() == [1.0] * 5
assert torch.empty(5, pin_memory=True).tolist() == [0.0] * 5
"""
    )


def test_printing_shows_zeros() -> None:
    run_dry(
        """
x = torch.full((2,), 5.0, device="virtual")
assert repr(x) == "tensor([0., 0.], device='virtual:0')", repr(x)
assert repr(x.sum()) == "tensor(0., device='virtual:0')"
assert "0.,  ..., 0." in repr(torch.empty(10**13, device="virtual"))
assert f"{x.sum():.1f}" == "0.0"
assert "[0, 0]" in repr(x.long()) and "0.]" in repr(x.half())
"""
    )


def test_operators_whose_results_depend_on_values_are_refused() -> None:
    run_dry(
        """
x = torch.ones(3, device="virtual")
for function in (lambda: x.nonzero(), lambda: x[x > 0], lambda: torch.equal(x, x), x.unique):
    message = refusal(function)
    assert message.startswith("NotImplementedError: aten::"), message
    assert "its result depends on the values of its arguments" in message, message
    assert "enable(dry=False)" in message, message
"""
    )


def test_operators_of_unknown_shape_are_refused() -> None:
    run_dry(
        """
with torch.library._scoped_library("swapopt_test", "DEF") as library:
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x.clone(), "CPU")
    message = refusal(lambda: torch.ops.swapopt_test.mystery(torch.ones(3, device="virtual")))
assert message.startswith("NotImplementedError: swapopt_test::mystery: a dry virtual"), message
assert "torch has no such kernel" in message, message
"""
    )


def test_shapes_that_do_not_fit_are_refused_as_ever() -> None:
    run_dry(
        """
x = torch.ones(3, device="virtual")
long = torch.ones(3, dtype=torch.long, device="virtual")
assert "broadcast" in refusal(lambda: x + torch.ones(4, device="virtual"))
assert "RuntimeError" in refusal(lambda: x.add_(torch.ones(4, device="virtual")))
assert "RuntimeError" in refusal(lambda: long.add_(0.5))
assert "does not fit" in refusal(lambda: torch.ones(5).copy_(x))
assert "RuntimeError" in refusal(lambda: x @ torch.ones(4, device="virtual"))
x.untyped_storage().resize_(0)
assert "was released" in refusal(lambda: x.add_(1))
"""
    )


def test_races_are_found_on_a_dry_device() -> None:
    run_dry(
        """
virtual.enable("h200", device_count=1, races="collect", dry=True)
pinned = torch.empty(10**9, pin_memory=True)
side = torch.virtual.Stream()
target = torch.empty(10**9, device="virtual")
with torch.virtual.stream(side):
    target.copy_(pinned, non_blocking=True)
target.add_(1)
kinds = [race.kind for race in virtual.races()]
assert kinds == ["write after write", "write after write"], kinds
"""
    )


def test_capacity_and_limits_hold_on_a_dry_device() -> None:
    run_dry(
        """
virtual.enable("h200", device_count=1, capacity_bytes=10**12, dry=True)
held = torch.empty(9 * 10**11, dtype=torch.uint8, device="virtual")
assert "OutOfMemoryError" in refusal(lambda: torch.empty(2 * 10**11, device="virtual"))
virtual.set_pinned_limit(10**6)
assert "RuntimeError" in refusal(lambda: torch.empty(10**7, pin_memory=True))
"""
    )


def test_a_dry_device_has_no_process_groups() -> None:
    run_dry(
        """
import torch.distributed as dist
store = dist.HashStore()
def collective():
    dist.init_process_group("virtual:vccl", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, device="virtual"))
assert "build what one rank holds" in refusal(collective), refusal(collective)
"""
    )


def test_dry_is_fixed_by_the_first_call() -> None:
    assert not virtual.is_dry()
    with pytest.raises(ValueError, match=r"dry is fixed by the first enable\(\): it is False"):
        virtual.enable("h200", device_count=2, dry=True)
    run_dry(
        """
assert virtual.is_dry()
expected = "ValueError: dry is fixed by the first enable(): it is True, found False"
assert refusal(lambda: virtual.enable("h200", device_count=1)) == expected
virtual.enable("half-duplex", device_count=1, dry=True)
assert virtual.profile().name == "half-duplex"
"""
    )


def test_late_copies_need_values() -> None:
    with pytest.raises(ValueError, match="late_copies need values"):
        virtual.enable("h200", device_count=2, dry=True, late_copies=True)
    run_dry('assert "this device is dry" in refusal(lambda: virtual.set_late_copies(True))')


def test_a_wet_device_reads_what_was_written() -> None:
    assert torch.full((2,), 5.0, device="virtual").tolist() == [5.0, 5.0]
