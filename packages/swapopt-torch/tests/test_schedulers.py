"""A1: whatever changes hyperparameters between steps works as on a native optimizer."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from twins import KINDS, Twin, assert_alike, both, make_twin

STEPS = 7
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def _sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2, 4])


def _chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, mode="triangular2"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [2e-2, 1e-2], total_steps=STEPS + 1),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, anneal_epochs=4),
}
ABSTRACT = {"LRScheduler", "_LRScheduler"}
CYCLES_MOMENTUM = {"CyclicLR", "OneCycleLR"}


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def two_groups(parameters: Sequence[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "foreach": False, **options})


def lr_tensor(device: torch.device, kind: str) -> torch.Tensor:
    """The loop reads a learning rate on the CPU, the fused kernel one on the device, too."""
    return torch.tensor(1e-2, device=device if kind == "fused" else "cpu")


def follow(twin: Twin, scheduler: LRScheduler, steps: int | range = STEPS) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        twin.train(range(step, step + 1))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 3)
        else:
            scheduler.step()
        twin.seen.append([float(lr) for lr in scheduler.get_last_lr()])
        twin.seen.append([tuple(map(float, g["betas"])) for g in twin.optimizer.param_groups])


def test_every_scheduler_of_torch_is_listed() -> None:
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler)
    }
    assert found - ABSTRACT == set(SCHEDULERS)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a1_schedulers(
    device: torch.device, name: str, kind: str, made: str, tensor_lr: bool
) -> None:
    """Movements in turn: which one runs has nothing to do with who changes the groups."""
    packed = (len(name) + len(made) + tensor_lr) % 2 == 0

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        lr = lr_tensor(device, kind) if tensor_lr else 1e-2
        return two_groups(parameters, lr=lr, **KINDS[kind])

    swapped, native = (make_twin(device, make, numels=(2048, 16, 1500)) for _ in range(2))
    if made == "before":
        scheduler = SCHEDULERS[name](swapped.base)
        swapped.wrap(packed)
    else:
        swapped.wrap(packed)
        scheduler = SCHEDULERS[name](swapped.optimizer)
    follow(swapped, scheduler)
    follow(native, SCHEDULERS[name](native.optimizer))
    assert_alike(swapped, native)
    assert len({str(rates) for rates in native.seen[::2]}) > 1, "the learning rate never changed"
    cycled = len({str(betas) for betas in native.seen[1::2]}) > 1
    assert cycled == (name in CYCLES_MOMENTUM)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a1_schedulers_resume(device: torch.device, name: str) -> None:
    """Saved with the optimizer after three steps, both loaded into fresh ones."""

    def interrupted(twin: Twin, fresh: Twin) -> Twin:
        scheduler = SCHEDULERS[name](twin.optimizer)
        follow(twin, scheduler, 3)
        saved = copy.deepcopy((scheduler.state_dict(), twin.optimizer.state_dict()))
        fresh.seen = twin.seen
        with torch.no_grad():
            for one, other in zip(fresh.parameters, twin.parameters, strict=True):
                one.copy_(other)
        resumed = SCHEDULERS[name](fresh.optimizer)
        resumed.load_state_dict(saved[0])
        fresh.optimizer.load_state_dict(saved[1])
        follow(fresh, resumed, range(3, STEPS))
        return fresh

    swapped, swapped_fresh, native, native_fresh = (
        make_twin(device, lambda p: two_groups(p, foreach=False)) for _ in range(4)
    )
    swapped.wrap(True)
    swapped_fresh.wrap(False)
    assert_alike(interrupted(swapped, swapped_fresh), interrupted(native, native_fresh))


def test_a1_a_scheduler_stepped_too_early_is_still_warned_of(device: torch.device) -> None:
    twin = make_twin(device, two_groups)
    early_on_base = lr_scheduler.ExponentialLR(twin.base, 0.9)
    twin.wrap(True)
    for scheduler in (early_on_base, lr_scheduler.ExponentialLR(twin.optimizer, 0.9)):
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


@pytest.mark.parametrize("kind", KINDS)
def test_swa(device: torch.device, packed: bool, kind: str) -> None:
    """An averaged and an exponentially averaged model beside the optimizer, SWALR at the end."""
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        model = nn.ParameterList(twin.parameters)
        averaged = swa_utils.AveragedModel(model)
        smoothed = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        scheduler: LRScheduler = lr_scheduler.CosineAnnealingLR(twin.optimizer, 4)
        for step in range(STEPS):
            if step == 4:
                scheduler = swa_utils.SWALR(twin.optimizer, 1e-3, 2)
            follow(twin, scheduler, range(step, step + 1))
            smoothed.update_parameters(model)
            if step >= 4:
                averaged.update_parameters(model)
        for average in (averaged, smoothed):
            twin.seen.append([p.detach().cpu().tolist() for p in average.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_hyperparameters_changed_by_hand(device: torch.device, packed: bool, kind: str) -> None:
    edits: list[tuple[str, Any]] = [
        ("lr", 5e-2),
        ("betas", (0.5, 0.9)),
        ("weight_decay", 0.3),
        ("eps", 1e-3),
        ("maximize", True),
        ("lr", torch.tensor(2e-3)),
        ("betas", [0.7, 0.8]),
        ("lr", 0.0),
        ("maximize", False),
    ]
    for twin in both(device, packed, lambda p: two_groups(p, **KINDS[kind])):
        for step, (key, value) in enumerate(edits):
            twin.optimizer.param_groups[step % 2][key] = copy.deepcopy(value)
            twin.train(range(step, step + 1))
            tensor = twin.optimizer.param_groups[1]["lr"]
            if isinstance(tensor, torch.Tensor):
                tensor.mul_(0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_tensor_lr_and_betas(device: torch.device, packed: bool, kind: str, where: str) -> None:
    """What torch itself takes without capturable; read anew at each step."""

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        place = device if where == "device" else torch.device("cpu")
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        lr = torch.tensor(1e-2, device=place)
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, **KINDS[kind])

    for twin in both(device, packed, make):
        for step in range(4):
            twin.train(range(step, step + 1))
            (group,) = twin.optimizer.param_groups
            group["lr"].mul_(0.5)
            group["betas"][0].sub_(0.1)


def test_a_tensor_lr_costs_no_more_than_native(
    device: torch.device, device_type: str, packed: bool
) -> None:
    """Reading one on the device stops the host: the operators are native's, and the copies."""
    if device_type != "virtual":
        pytest.skip("only the virtual accelerator counts operators")
    from swapopt_torch import virtual

    counts = []
    for twin in both(device, packed, lambda p: two_groups(p, lr=lr_tensor(device, "fused"))):
        twin.train(1)
        twin.give_gradients(1)
        virtual.clear_operator_counts()
        twin.optimizer.step()
        counts.append(dict(virtual.operator_counts()))
    swapped, native = counts
    assert set(swapped) - set(native) <= {"aten::_copy_from", "aten::record_stream"}
    assert {name: swapped[name] for name in native} == native


def test_a_group_held_by_somebody_stays_the_optimizers_own(
    device: torch.device, packed: bool
) -> None:
    for twin in both(device, packed, two_groups):
        held = twin.base.param_groups[1]
        twin.train(1)
        held["lr"] = 0.5
        twin.train(range(1, 3))
        assert twin.optimizer.param_groups[1] is held
