"""What must hold in a process whose device is dry: `python dry_checks.py` runs every check.

Prints, as JSON, a traceback for every check that failed, under its name.
"""

from __future__ import annotations

import copy
import io
import json
import re
import resource
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual

Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size, device="virtual")


def refused(error: type[Exception], expected: str, function: Callable[[], object]) -> None:
    try:
        result = function()
    except error as raised:
        assert re.search(expected, str(raised)), f"{raised} does not say {expected}"
    else:
        raise AssertionError(f"{result} was returned, and no {error.__name__} raised")


@check
def a_shard_of_seventy_billion_parameters_takes_no_memory() -> None:
    params = [torch.nn.Parameter(torch.empty(10**8, device="virtual")) for _ in range(11)]
    for param in params:
        param.grad = torch.zeros_like(param)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this machine may have too little memory for it
        optimizer = swap_optimizer(
            torch.optim.AdamW(params, fused=True), SwapOptimizerConfig(swap_times=11)
        )
    for _ in range(3):
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.state[params[0]]["exp_avg"][:5].tolist() == [0.0] * 5
    assert virtual.host_memory().registered_bytes >= 11 * 8 * 10**8
    peak_bytes = torch.get_device_module("virtual").max_memory_allocated()
    assert peak_bytes >= 2 * 11 * 4 * 10**8 + 2 * 8 * 10**8
    pinned = torch.empty(2**34, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(torch.empty(2**34, dtype=torch.uint8, device="virtual"), non_blocking=True)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 300 * 1024, grown_kib


@check
def states_may_be_larger_than_all_memory_of_this_machine() -> None:
    param = torch.nn.Parameter(torch.empty(2 * 10**11, device="virtual"))
    param.grad = torch.zeros_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = swap_optimizer(torch.optim.AdamW([param], fused=True))
    optimizer.step()
    assert optimizer.swap_stats().pinned_nbytes >= 16 * 10**11


@check
def what_is_read_from_it_is_zero() -> None:
    x = torch.full((2, 3), 5.0, device="virtual")
    assert x.sum().item() == 0
    assert bool(x.any()) is False
    assert x.cpu().tolist() == x.tolist() == [[0.0] * 3] * 2
    assert torch.arange(3, device="virtual").tolist() == [0, 0, 0]
    target = torch.ones(4, 3)
    target[1:3].copy_(x)
    assert target.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert torch.masked_select(x, x > 0).numel() == 0
    assert torch.rand_like(x, device="cpu").shape == x.shape
    assert torch.zeros_like(x, device="meta").is_meta


@check
def results_have_their_shapes_dtypes_and_strides() -> None:
    x = ones(2, 3)
    assert (x.double() + 1).dtype == torch.float64
    assert (x > 0).dtype == torch.bool
    assert (x.t() @ x).shape == (3, 3)
    assert x.t().clone().stride() == (1, 3)
    assert torch.where(x > 0, 1.0, x).dtype == torch.float32
    assert (x.half() * 2.5).dtype == torch.float16
    rows = x[torch.tensor([1, 0, 1])]
    assert rows.shape == (3, 3)
    assert rows.untyped_storage().nbytes() == 36
    assert x[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    out = torch.empty(0, device="virtual")
    assert torch.mul(x, 2, out=out) is out
    assert out.shape == (2, 3)


@check
def pinned_memory_keeps_what_the_program_wrote() -> None:
    pinned = torch.ones(5).pin_memory()
    pinned.copy_(torch.zeros(5, device="virtual"), non_blocking=True)
    torch.get_device_module("virtual").synchronize()
    assert pinned.is_pinned()
    assert pinned.tolist() == [1.0] * 5
    assert torch.empty(5, pin_memory=True).tolist() == [0.0] * 5


@check
def printing_shows_zeros() -> None:
    x = torch.full((2,), 5.0, device="virtual")
    assert repr(x) == "tensor([0., 0.], device='virtual:0')"
    assert repr(x.sum()) == "tensor(0., device='virtual:0')"
    assert "0.,  ..., 0." in repr(torch.empty(10**13, device="virtual"))
    assert f"{x.sum():.1f}" == "0.0"
    assert "[0, 0]" in repr(x.long())
    assert "0.]" in repr(x.half())


@check
def copies_files_and_checkpoints_work() -> None:
    layer = torch.nn.Linear(64, 64, device="virtual")
    optimizer = swap_optimizer(
        torch.optim.AdamW(layer.parameters(), fused=True), SwapOptimizerConfig(swap_times=2)
    )
    for _ in range(2):
        layer(ones(2, 64)).sum().backward()
        optimizer.step()
    twin = copy.deepcopy(layer)
    assert twin.weight.device == layer.weight.device
    assert layer.weight.untyped_storage().clone().nbytes() == layer.weight.nbytes
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["model"]["weight"].device == layer.weight.device
    assert not torch.load(io.BytesIO(file.getvalue()), map_location="cpu")["model"]["weight"].any()
    layer.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizer.step()
    assert optimizer.unswap().state[layer.weight]["exp_avg"].device == layer.weight.device


@check
def operators_whose_results_depend_on_values_are_refused() -> None:
    x = ones(3)
    for function in (x.nonzero, lambda: x[x > 0], lambda: torch.equal(x, x), x.unique):
        refused(NotImplementedError, r"^aten::.*depends on the values.*dry=False", function)


@check
def operators_of_unknown_shape_are_refused() -> None:
    library = torch.library.Library("swapopt_test", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x.clone(), "CPU")
    expected = "^swapopt_test::mystery: a dry virtual device.* torch has no such kernel"
    refused(NotImplementedError, expected, lambda: torch.ops.swapopt_test.mystery(ones(3)))


@check
def arguments_that_do_not_fit_are_refused_as_ever() -> None:
    x = ones(3)
    refused(RuntimeError, "broadcast", lambda: x + ones(4))
    refused(RuntimeError, "", lambda: x.add_(ones(4)))
    refused(RuntimeError, "", lambda: x.long().add_(0.5))
    refused(RuntimeError, "does not fit", lambda: torch.ones(5).copy_(x))
    refused(RuntimeError, "", lambda: x @ ones(4))
    refused(RuntimeError, "same device", lambda: x + torch.ones(3))
    x.untyped_storage().resize_(0)
    refused(RuntimeError, "was released", lambda: x.add_(1))


@check
def races_are_found() -> None:
    virtual.enable("h200", device_count=1, races="collect", dry=True)
    pinned = torch.empty(10**9, pin_memory=True)
    side = torch.Stream(device="virtual")
    target = torch.empty(10**9, device="virtual")
    with side:
        target.copy_(pinned, non_blocking=True)
    target.add_(1)
    kinds = [race.kind for race in virtual.races()]
    assert kinds == ["write after write", "write after write"], kinds
    torch.get_device_module("virtual").synchronize()


@check
def capacity_and_limits_hold() -> None:
    virtual.enable("h200", device_count=1, capacity_bytes=10**12, dry=True)
    held = torch.empty(9 * 10**11, dtype=torch.uint8, device="virtual")
    refused(torch.OutOfMemoryError, "out of memory", lambda: torch.empty_like(held))
    virtual.set_pinned_limit(10**6)
    refused(RuntimeError, "Cannot pin", lambda: torch.empty(10**7, pin_memory=True))
    virtual.set_pinned_limit(None)


@check
def it_has_no_process_groups_of_its_own() -> None:
    def collective() -> None:
        store = dist.HashStore()
        dist.init_process_group("virtual:vccl", store=store, rank=0, world_size=1)
        dist.all_reduce(ones(3))

    try:
        refused(RuntimeError, "virtual:fake", collective)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@check
def it_stays_dry() -> None:
    assert virtual.is_dry()
    expected = r"^dry is fixed by the first enable\(\): it is True, found False"
    refused(ValueError, expected, lambda: virtual.enable("h200", device_count=1))
    virtual.enable("half-duplex", device_count=1, dry=True)
    assert virtual.profile().name == "half-duplex"


@check
def late_copies_are_refused() -> None:
    refused(ValueError, "this device is dry", lambda: virtual.set_late_copies(True))


def failure(function: Check) -> str:
    virtual.enable("h200", device_count=1, dry=True)
    try:
        function()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({name: failure(function) for name, function in CHECKS.items()}))
