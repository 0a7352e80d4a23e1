"""Who is measured where, and what the ways that are not ours do."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bench_devices import OpenDevice

from swapopt_torch.bench import contenders
from swapopt_torch.bench.contenders import (
    OPTIMIZERS,
    Native,
    PagedAdamW,
    PlainMove,
    Scene,
    TorchaoOffload,
    choose_contenders,
)
from training import bits

OWN_NAMES = ["native", "per-tensor", "packed", "RFC's order", "plain .to()"]


@pytest.mark.parametrize(
    ("device_type", "installed", "peers", "absent"),
    [
        ("cuda", {"torchao", "bitsandbytes"}, ["torchao offload", "bnb paged"], []),
        ("cuda", {"torchao"}, ["torchao offload"], ["bitsandbytes"]),
        ("cuda", set(), [], ["torchao", "bitsandbytes"]),
        ("xpu", {"torchao", "bitsandbytes"}, ["torchao offload"], []),
        ("npu", {"torchao", "bitsandbytes"}, [], []),
        ("virtual", {"torchao", "bitsandbytes"}, [], []),
    ],
)
def test_peers_are_measured_where_they_run_and_are_installed(
    device_type: str,
    installed: set[str],
    peers: list[str],
    absent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contenders, "find_spec", lambda name: name if name in installed else None)
    chosen, left_out = choose_contenders(device_type, state_nbytes=2**40, dry=False)
    assert [entry.name for entry in chosen] == [*OWN_NAMES, *peers]
    assert [line.split(", ")[1] for line in left_out] == [
        f"{name} is not installed" for name in absent
    ]


@pytest.mark.parametrize(
    ("state_nbytes", "dry", "measured"),
    [(2**30, True, True), (8 * 2**30, True, False), (8 * 2**30, False, True)],
)
def test_a_plain_move_of_much_is_not_measured_dry(
    state_nbytes: int, dry: bool, measured: bool
) -> None:
    chosen, absent = choose_contenders("virtual", state_nbytes=state_nbytes, dry=dry)
    assert ("plain .to()" in [entry.name for entry in chosen]) is measured
    assert len(absent) == (0 if measured else 1)


def make_scene(device: torch.device, kind: str = "adamw-fused") -> Scene:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (7,), (2048,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]
    grads = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    return Scene(params, grads, OPTIMIZERS[kind], swap_times=2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_move_equals_native_and_leaves_nothing_on_the_device(
    device: torch.device, kind: str
) -> None:
    native_scene, moved_scene = make_scene(device, kind), make_scene(device, kind)
    native, moved = Native(native_scene), PlainMove(moved_scene)
    gc.collect()
    before = torch.virtual.memory_allocated(device)
    steps = [[0, 1, 2], [0, 2], [0, 1, 2], [1]]
    for active in steps:
        moved.give_gradients(active)
        moved.step()
    # Only step counts are left there, one 512-byte block each, where torch keeps them there.
    counts = {"adamw-fused": 3, "adamw": 0, "hyper-adamw": 0}[kind]
    torch.virtual.synchronize(device)
    assert torch.virtual.memory_allocated(device) - before == 512 * counts
    assert moved.host_nbytes() == 2 * 4 * (40 * 30 + 7 + 2048)
    for active in steps:
        native.give_gradients(active)
        native.step()
    for found, expected in zip(moved_scene.params, native_scene.params, strict=True):
        assert torch.equal(bits(found), bits(expected))


def test_all_states_are_on_the_device_while_a_plain_move_steps(open_device: OpenDevice) -> None:
    device = open_device("h200").accelerator.device
    scene = make_scene(device)
    moved = PlainMove(scene)
    moved.give_gradients([0, 1, 2])
    moved.step()
    torch.virtual.synchronize(device)
    before = torch.virtual.memory_allocated(device)
    torch.virtual.reset_peak_memory_stats(device)
    moved.step()
    blocks = [2 * -(-numel * 4 // 512) * 512 for numel in (1200, 7, 2048)]
    assert torch.virtual.max_memory_allocated(device) - before == sum(blocks)


class FakeOffload:
    """Stands in for torchao's: copies gradients in hooks, as that one does."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        kind: type[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        self.made_with = list(params), kind, options
        self.copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.steps = 0
        for param in params:
            param.register_post_accumulate_grad_hook(self._copy)

    def _copy(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        self.copied.append((param, param.grad.clone()))

    def step(self) -> None:
        self.steps += 1


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType("package"))
    monkeypatch.setitem(sys.modules, name, module)


def test_torchaos_hooks_see_the_gradients_of_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeOffload] = []

    def make(*arguments: Any, **options: Any) -> FakeOffload:
        made.append(FakeOffload(*arguments, **options))
        return made[-1]

    fake_module(monkeypatch, "torchao.optim", CPUOffloadOptimizer=make)
    scene = make_scene(torch.device("cpu"))
    given = [grad.clone() for grad in scene.grads]
    contender = TorchaoOffload(scene)
    assert made[0].made_with == (scene.params, torch.optim.AdamW, {"fused": True})
    for active in ([0, 1, 2], [0, 2]):
        made[0].copied.clear()
        contender.give_gradients(active)
        contender.step()
        assert [
            param is scene.params[i] for i, (param, _) in zip(active, made[0].copied, strict=True)
        ]
        for index, (param, grad) in zip(
            active, sorted_by(scene.params, made[0].copied), strict=True
        ):
            assert param is scene.params[index]
            assert torch.equal(grad, given[index])
    assert made[0].steps == 2
    # Others use the same gradients: they are as they were.
    assert all(torch.equal(grad, old) for grad, old in zip(scene.grads, given, strict=True))
    assert contender.host_nbytes() == 4 * 4 * (40 * 30 + 7 + 2048)


def sorted_by(
    params: list[torch.nn.Parameter], copied: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    places = {id(param): place for place, param in enumerate(params)}
    return sorted(copied, key=lambda pair: places[id(pair[0])])


def test_the_paged_optimizer_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class FakePaged:
        def __init__(self, params: object) -> None:
            calls.append(params)

        def step(self) -> None:
            calls.append("step")

    fake_module(monkeypatch, "bitsandbytes.optim", PagedAdamW=FakePaged)
    scene = make_scene(torch.device("cpu"))
    contender = PagedAdamW(scene)
    contender.step()
    assert calls == [scene.params, "step"]


@pytest.mark.parametrize("make", [Native, PlainMove])
def test_only_the_chosen_have_gradients(make: Callable[[Scene], Native | PlainMove]) -> None:
    scene = make_scene(torch.device("cpu"))
    contender = make(scene)
    contender.give_gradients([1])
    assert [param.grad is grad for param, grad in zip(scene.params, scene.grads, strict=True)] == [
        False,
        True,
        False,
    ]
    assert scene.params[0].grad is None
