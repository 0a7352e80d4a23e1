"""A3: every hook of torch.optim.Optimizer fires exactly once, whichever object it was given to."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from swapopt_torch import SwapOptimizerConfig, swap_optimizer
from training import Run, TinyGPT, assert_same_bits, assert_same_run
from twins import KINDS, Twin, both, make_twin

REGISTER = {
    "step_pre": "register_step_pre_hook",
    "step_post": "register_step_post_hook",
    "state_dict_pre": "register_state_dict_pre_hook",
    "state_dict_post": "register_state_dict_post_hook",
    "load_pre": "register_load_state_dict_pre_hook",
    "load_post": "register_load_state_dict_post_hook",
}
ARGUMENTS = {
    "step_pre": 3,
    "step_post": 3,
    "state_dict_pre": 1,
    "state_dict_post": 2,
    "load_pre": 2,
    "load_post": 1,
}
USERS = ["base before wrapping", "wrapper", "base after wrapping"]


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, 1e-2, foreach=False)


@contextlib.contextmanager
def global_hooks(pre: Any, post: Any) -> Iterator[None]:
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(pre),
        torch_optimizer.register_optimizer_step_post_hook(post),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def use_once(twin: Twin) -> None:
    """Step, save, load: everything that hooks belong to."""
    twin.train(1)
    twin.optimizer.load_state_dict(twin.optimizer.state_dict())


def test_all_kinds_of_hooks_are_covered() -> None:
    found = {name for name in vars(torch.optim.Optimizer) if name.startswith("register_")}
    assert found == set(REGISTER.values())


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", REGISTER)
def test_a3_once_and_never_after_removal(
    device: torch.device, packed: bool, kind: str, user: str
) -> None:
    """The hook gets the wrapper, with as many arguments as natively."""
    twin = make_twin(device, adamw)
    calls: list[tuple[Any, ...]] = []

    def register() -> RemovableHandle:
        target = twin.optimizer if user == "wrapper" else twin.base
        handle: RemovableHandle = getattr(target, REGISTER[kind])(lambda *a: calls.append(a))
        return handle

    if user == "base before wrapping":
        handle = register()
        twin.wrap(packed)
    else:
        twin.wrap(packed)
        handle = register()
    use_once(twin)
    (arguments,) = calls
    assert arguments[0] is twin.optimizer
    assert len(arguments) == ARGUMENTS[kind]
    handle.remove()
    use_once(twin)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", REGISTER)
def test_a3_order(device: torch.device, packed: bool, kind: str) -> None:
    """Across both objects hooks fire in the order of registration; prepended ones come first."""
    for twin in both(device, packed, adamw):

        def note(name: str, twin: Twin = twin) -> Any:
            return lambda *_: twin.seen.append(name)

        getattr(twin.base, REGISTER[kind])(note("a"))
        getattr(twin.optimizer, REGISTER[kind])(note("b"))
        prepend = {} if kind.startswith("step") else {"prepend": True}
        getattr(twin.base, REGISTER[kind])(note("c"), **prepend)
        use_once(twin)
        assert twin.seen == (["c", "a", "b"] if prepend else ["a", "b", "c"])


def test_a3_global_hooks(device: torch.device, packed: bool) -> None:
    """Around the optimizer's own ones, as torch orders them, once however many batches."""
    for twin in both(device, packed, adamw):

        def note(name: str, twin: Twin = twin) -> Any:
            return lambda optimizer, args, kwargs: twin.seen.append(
                (name, optimizer is twin.optimizer, len(args), kwargs)
            )

        twin.optimizer.register_step_pre_hook(note("own pre"))
        twin.base.register_step_post_hook(note("own post"))
        with global_hooks(note("global pre"), note("global post")):
            twin.train(2)
        twin.train(1)
        names = [name for name, *_ in twin.seen]
        once = ["global pre", "own pre", "own post", "global post"]
        assert names == [*once, *once, "own pre", "own post"]


def test_a3_a_pre_hook_that_replaces_the_arguments(device: torch.device, packed: bool) -> None:
    """It takes a closure away that would have been refused; later hooks see what it returned."""
    for twin in both(device, packed, adamw):

        def without_closure(_: Any, args: Any, kwargs: Any, twin: Twin = twin) -> Any:
            twin.seen.append((len(args), sorted(kwargs)))
            return (twin.optimizer,), {}

        twin.optimizer.register_step_pre_hook(without_closure)
        twin.optimizer.register_step_post_hook(
            lambda _, args, kwargs, twin=twin: twin.seen.append((len(args), sorted(kwargs)))
        )
        twin.give_gradients(0)
        twin.optimizer.step(closure=lambda: 0.0)
        assert twin.seen == [(1, ["closure"]), (1, [])]


def test_a3_a_pre_hook_that_returns_something_else(device: torch.device, packed: bool) -> None:
    """Refused as natively, before anything has changed."""
    for twin in both(device, packed, adamw):
        handle = twin.optimizer.register_step_pre_hook(lambda *_: "nonsense")
        twin.give_gradients(0)
        with pytest.raises(RuntimeError, match="must return None or a tuple"):
            twin.optimizer.step()
        assert not twin.optimizer.state
        handle.remove()
        twin.train(2)


def test_a3_pre_hooks_act_on_the_step_they_come_before(device: torch.device, packed: bool) -> None:
    """Gradients and learning rates changed in a hook count; a post hook sees new parameters."""
    for twin in both(device, packed, adamw):

        def prepare(optimizer: Any, *_: Any) -> None:
            optimizer.param_groups[0]["lr"] *= 0.5
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(2)

        def inspect(optimizer: Any, *_: Any, twin: Twin = twin) -> None:
            parameter = twin.parameters[0]
            moments = optimizer.state[parameter]["exp_avg"]
            twin.seen.append((parameter.sum().item(), moments.cpu().sum().item()))

        twin.optimizer.register_step_pre_hook(prepare)
        twin.optimizer.register_step_post_hook(inspect)
        twin.train(3)


def test_a3_state_dict_hooks_that_replace_the_dictionary(
    device: torch.device, packed: bool
) -> None:
    for twin in both(device, packed, adamw):
        twin.train(2)
        twin.optimizer.register_state_dict_post_hook(
            lambda _, saved: {"wrapped": saved, "version": 7}
        )
        twin.base.register_load_state_dict_pre_hook(lambda _, saved: saved["wrapped"])
        saved = twin.optimizer.state_dict()
        assert saved["version"] == 7
        assert set(saved["wrapped"]) == {"state", "param_groups"}
        kept = copy.deepcopy(saved)
        twin.train(2)
        twin.optimizer.load_state_dict(kept)
        twin.train(1)


def test_a3_a_load_hook_gets_a_shallow_copy(device: torch.device, packed: bool) -> None:
    """What it adds does not reach the caller's dictionary, and is ignored."""
    for twin in both(device, packed, adamw):
        twin.train(1)
        twin.optimizer.register_load_state_dict_pre_hook(
            lambda _, saved: saved.update(extra=1)  # returns None
        )
        saved = copy.deepcopy(twin.optimizer.state_dict())
        twin.optimizer.load_state_dict(saved)
        assert "extra" not in saved
        twin.train(1)


def test_a3_hooks_that_edit_in_place(device: torch.device, packed: bool) -> None:
    """A checkpoint's groups edited by a hook are what is saved; the optimizer keeps its own."""
    for twin in both(device, packed, adamw):
        twin.train(1)

        def halve(_: Any, saved: dict[str, Any]) -> None:
            saved["param_groups"][0]["lr"] /= 2

        handle = twin.optimizer.register_state_dict_post_hook(halve)
        saved = twin.optimizer.state_dict()
        handle.remove()
        assert saved["param_groups"][0]["lr"] == 5e-3
        assert twin.optimizer.param_groups[0]["lr"] == 1e-2
        twin.optimizer.register_load_state_dict_pre_hook(halve)
        twin.optimizer.load_state_dict(saved)
        assert twin.optimizer.param_groups[0]["lr"] == 2.5e-3


def test_a3_a_hook_that_raises_leaves_a_whole_optimizer(device: torch.device, packed: bool) -> None:
    for twin in both(device, packed, adamw):
        twin.train(1)

        def fail(*_: Any) -> None:
            raise LookupError("hook")

        for kind in ("step_pre", "step_post"):
            handle = getattr(twin.optimizer, REGISTER[kind])(fail)
            twin.give_gradients(1)
            with pytest.raises(LookupError, match="hook"):
                twin.optimizer.step()
            handle.remove()
        twin.train(range(2, 4))


@pytest.mark.parametrize("fused", [False, True])
def test_the_profiler_sees_one_range_per_step(
    device: torch.device, packed: bool, fused: bool
) -> None:
    """Under the wrapper's name, once, however many batches there are."""
    twin = make_twin(device, lambda p: torch.optim.AdamW(p, fused=fused, foreach=False))
    twin.wrap(packed)
    twin.train(1)
    twin.give_gradients(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        twin.optimizer.step()
        twin.optimizer.zero_grad()
    names = [event.name for event in profiler.events() or () if "Optimizer." in event.name]
    steps = [name for name in names if name.startswith("Optimizer.step#")]
    assert steps == ["Optimizer.step#TorchSwapOptimizer.step"]
    assert len([name for name in names if name.startswith("Optimizer.zero_grad#")]) == 1


def test_repr_lists_the_groups(device: torch.device, packed: bool) -> None:
    """As torch prints an optimizer."""
    twin = make_twin(device, adamw)
    native = repr(twin.base)
    twin.wrap(packed)
    twin.train(1)
    shown = repr(twin.optimizer)
    assert shown.splitlines()[0] == "TorchSwapOptimizer ("
    assert shown.splitlines()[1:] == native.splitlines()[1:]


def test_hooks_die_with_the_optimizer(device: torch.device, packed: bool) -> None:
    """A handle held by somebody keeps nothing alive, and may be removed afterwards."""
    twin = make_twin(device, adamw)
    twin.wrap(packed)
    handle = twin.optimizer.register_step_pre_hook(lambda *_: None)
    twin.train(1)
    gone = weakref.ref(twin.optimizer)
    del twin
    gc.collect()
    assert gone() is None
    handle.remove()


def test_copies_start_without_hooks(device: torch.device, packed: bool) -> None:
    """As torch's own do: __getstate__ leaves hooks behind."""
    for twin in both(device, packed, adamw):
        twin.train(1)
        twin.optimizer.register_step_pre_hook(lambda *_, twin=twin: twin.seen.append("hook"))
        for other in (copy.deepcopy(twin.optimizer), pickle.loads(pickle.dumps(twin.optimizer))):
            assert type(other) is type(twin.optimizer)
            own = other.param_groups[0]["params"]
            for parameter, original in zip(own, twin.parameters, strict=True):
                assert_same_bits(parameter, original, "parameter of the copy")
                parameter.grad = torch.ones_like(parameter)
            other.step()
        assert twin.seen == []


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_that_step_inside_backward(
    device: torch.device, packed: bool, kind: str
) -> None:
    """One per parameter, stepped by a hook as soon as its gradient is there, which then goes."""

    def train(swap: bool) -> Run:
        torch.manual_seed(0)
        model = TinyGPT().to(device)
        optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}
        config = SwapOptimizerConfig(swap_times=1, packed_swap=packed, min_numel=64)
        for parameter in model.parameters():
            native = torch.optim.AdamW([parameter], 1e-2, **KINDS[kind])
            optimizers[parameter] = swap_optimizer(native, config) if swap else native

            def step(arrived: torch.Tensor) -> None:
                optimizers[arrived].step()
                optimizers[arrived].zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        run = Run()
        data = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(0, 67, (2, 9), generator=data).to(device)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            run.losses.append(loss.detach().cpu())
        for parameter, optimizer in optimizers.items():
            assert parameter.grad is None
            run.parameters.append(parameter.detach().cpu().clone())
            state = optimizer.state[parameter]
            run.states.append({key: value.cpu().clone() for key, value in state.items()})
        return run

    assert_same_run(train(True), train(False))
