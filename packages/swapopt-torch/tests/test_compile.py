"""torch.compile beside the optimizer, around it, and before it is wrapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from swapopt_torch import swap_optimizer
from twins import KINDS, Twin, both, make_twin

BACKEND = "aot_eager"  # traces forward and backward; the virtual accelerator has no inductor


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    forget_graphs()
    yield
    forget_graphs()


def forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """Return how many graphs have been compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def graph_breaks() -> str:
    return "\n".join(torch._dynamo.utils.counters["graph_break"])


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 48))
    return model.to(device)


def batch(device: torch.device, step: int) -> torch.Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(step)).to(device)


def model_twins(device: torch.device, packed: bool, kind: str) -> Iterator[tuple[Twin, nn.Module]]:
    """Yield twins over the parameters of a model, and the model."""
    models: list[nn.Module] = []

    def make(_: Any) -> torch.optim.Optimizer:
        models.append(make_model(device))
        return torch.optim.AdamW(models[-1].parameters(), 1e-2, **KINDS[kind])

    for twin in both(device, packed, make):
        twin.parameters = list(models[-1].parameters())
        yield twin, models[-1]


def test_importing_the_package_leaves_the_compiler_alone() -> None:
    program = "import swapopt_torch, sys; sys.exit('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model(device: torch.device, packed: bool, kind: str) -> None:
    """Its graph is compiled once, whatever the optimizer does between its calls."""
    for twin, model in model_twins(device, packed, kind):
        forget_graphs()
        compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
        for step in range(4):
            loss = compiled(batch(device, step)).square().mean()
            loss.backward()
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            twin.seen.append(loss.item())
        assert graphs() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_of_training(device: torch.device, packed: bool, kind: str) -> None:
    """The optimizer's step runs outside of the graphs: results are those of eager training."""
    compiled_graphs = []
    for twin, model in model_twins(device, packed, kind):

        def train(data: torch.Tensor, twin: Twin = twin, model: nn.Module = model) -> torch.Tensor:
            loss = model(data).square().mean()
            loss.backward()
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            return loss.detach() * 2

        is_swapped = twin.base is not twin.optimizer
        run = torch.compile(train, backend=BACKEND) if is_swapped else train
        for step in range(4):
            twin.seen.append(run(batch(device, step)).item())
            compiled_graphs.append(graphs())
    assert compiled_graphs[1] == compiled_graphs[3] > 0, "it went on compiling"
    assert "TorchSwapOptimizer.step" in graph_breaks()


def test_hooks_and_schedulers_in_a_compiled_function(device: torch.device, packed: bool) -> None:
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False)):
        twin.optimizer.register_step_pre_hook(lambda *_, twin=twin: twin.seen.append("pre"))
        twin.optimizer.register_step_post_hook(lambda *_, twin=twin: twin.seen.append("post"))
        scheduler = ExponentialLR(twin.optimizer, 0.5)

        def advance(
            value: torch.Tensor, twin: Twin = twin, scheduler: ExponentialLR = scheduler
        ) -> torch.Tensor:
            value = value * 2
            twin.optimizer.step()
            scheduler.step()
            return value + 1

        is_swapped = twin.base is not twin.optimizer
        run = torch.compile(advance, backend=BACKEND) if is_swapped else advance
        for step in range(3):
            twin.give_gradients(step)
            twin.seen.append(run(torch.ones(3, device=device)).tolist())
            twin.seen.append(twin.optimizer.param_groups[0]["lr"])
        assert twin.seen.count("pre") == twin.seen.count("post") == 3


def test_checkpoints_in_a_compiled_function(device: torch.device, packed: bool) -> None:
    """Everything that touches states is left out of the graphs, as with torch's optimizers."""
    saved: list[dict[str, Any]] = []
    for twin in both(device, packed, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False)):

        def reload(value: torch.Tensor, twin: Twin = twin) -> torch.Tensor:
            value = value * 2
            saved.append(twin.optimizer.state_dict())
            twin.optimizer.load_state_dict(saved[0])
            return value + 1

        is_swapped = twin.base is not twin.optimizer
        run = torch.compile(reload, backend=BACKEND) if is_swapped else reload
        twin.train(2)
        saved.clear()
        twin.seen.append(run(torch.ones(3, device=device)).tolist())
        twin.train(range(2, 4))
    for name in ("state_dict", "load_state_dict"):
        assert f"TorchSwapOptimizer.{name}`" in graph_breaks()


class _OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


class _OwnInit(torch.optim.Adam):
    def _init_group(self, *arguments: Any) -> bool:
        return bool(super()._init_group(*arguments))


class _Disabled(torch.optim.AdamW):
    """Its author keeps the compiler out, as torch itself does."""


_Disabled.step = torch.compiler.disable(torch.optim.AdamW.step)  # type: ignore[method-assign]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, _Disabled])
def test_optimizers_made_after_the_first_compilation(
    device: torch.device, packed: bool, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """The first torch.compile of a process wraps methods of every optimizer class."""
    torch.compile(lambda value: value + 1, backend=BACKEND)(torch.ones(3))
    for twin in both(device, packed, lambda p: make(p, lr=1e-2, foreach=False)):
        twin.train(3)


@pytest.mark.parametrize("make", [_OwnStep, _OwnInit, torch.optim.SGD])
def test_what_is_refused_stays_refused_after_a_compilation(
    device: torch.device, make: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.compile(lambda value: value + 1, backend=BACKEND)(torch.ones(3))
    twin = make_twin(device, lambda p: make(p, lr=1e-2))
    with pytest.raises(ValueError, match="override neither step nor _init_group"):
        swap_optimizer(twin.base)
