"""Training runs to compare: the same model, data and optimizer, native and swapped."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from swapopt_torch import SwapOptimizerConfig, TorchSwapOptimizer, swap_optimizer
from swapopt_torch.local_tensor import layout_of, local_of

Parameters = Iterable[nn.Parameter]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class TinyGPT(nn.Module):
    """Embedding, two pre-norm blocks with attention, a head: 28 parameters of many sizes."""

    def __init__(self, vocabulary: int = 67, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.ModuleDict(_block(width)) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + self._attend(block, block["norm1"](hidden))
            hidden = hidden + block["down"](nn.functional.gelu(block["up"](block["norm2"](hidden))))
        return self.head(self.norm(hidden))

    def _attend(self, block: nn.ModuleDict, hidden: torch.Tensor) -> torch.Tensor:
        count, length, width = hidden.shape
        heads = block["qkv"](hidden).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return block["out"](mixed.transpose(1, 2).reshape(count, length, width))


def _block(width: int) -> dict[str, nn.Module]:
    return {
        "norm1": nn.LayerNorm(width),
        "qkv": nn.Linear(width, 3 * width),
        "out": nn.Linear(width, width),
        "norm2": nn.LayerNorm(width),
        "up": nn.Linear(width, 4 * width),
        "down": nn.Linear(4 * width, width),
    }


@dataclass
class Run:
    """What a training run left; device bytes beyond what was there before it.

    ``idle_bytes`` is between steps, ``peak_bytes`` the peak of the last step alone.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    idle_bytes: int = 0
    peak_bytes: int = 0
    optimizer: torch.optim.Optimizer | None = None

    @property
    def swapped(self) -> TorchSwapOptimizer:
        assert isinstance(self.optimizer, TorchSwapOptimizer)
        return self.optimizer


def train_gpt(
    device: torch.device,
    make: MakeOptimizer,
    config: SwapOptimizerConfig | None = None,
    *,
    steps: int = 8,
    dtype: torch.dtype = torch.float32,
    synchronous: bool = False,
) -> Run:
    """Train for some steps; native without a config, swapped with one."""
    module = torch.get_device_module(device)
    before = allocated(device)
    torch.manual_seed(0)
    model = TinyGPT().to(device, dtype)
    optimizer = make(model)
    if config is not None:
        optimizer = swap_optimizer(optimizer, config, synchronous=synchronous)
    run = Run(optimizer=optimizer)
    data = torch.Generator().manual_seed(1)
    for step in range(steps):
        tokens = torch.randint(0, 67, (4, 17), generator=data).to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if step == steps - 1:
            module.synchronize(device)
            module.reset_peak_memory_stats(device)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach().cpu())
    run.idle_bytes = allocated(device) - before
    run.peak_bytes = module.max_memory_allocated(device) - before
    collect(run, list(model.parameters()))
    return run


def allocated(device: torch.device) -> int:
    """Return the allocated bytes once garbage is gone and the device is idle."""
    gc.collect()
    module = torch.get_device_module(device)
    module.synchronize(device)
    nbytes: int = module.memory_allocated(device)
    return nbytes


@contextmanager
def capped(device: torch.device, nbytes: int) -> Iterator[None]:
    """Give the virtual device so many bytes of memory for a while."""
    module = torch.get_device_module(device)
    module.set_capacity(nbytes, device)
    try:
        yield
    finally:
        module.set_capacity(None, device)


def collect(run: Run, parameters: Sequence[torch.Tensor]) -> None:
    """Copy parameters and states to the CPU."""
    assert run.optimizer is not None
    state = run.optimizer.state
    run.parameters = [parameter.detach().cpu().clone() for parameter in parameters]
    run.states = [
        {key: value.detach().cpu().clone() for key, value in state[p].items()} if p in state else {}
        for p in parameters
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals itself and -0.0 differs from 0.0.

    Of a DTensor they are those of its local tensor.
    """
    return local_of(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    assert layout_of(found) == layout_of(expected), f"{what}: sharded in another way"
    assert torch.equal(bits(found), bits(expected)), f"{what} differs"


def assert_same_run(found: Run, expected: Run) -> None:
    """Losses, parameters and every state are equal bit for bit, and finite."""
    for step, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert loss.isfinite(), f"loss of step {step} is {loss}"
        assert_same_bits(loss, other, f"loss of step {step}")
    pairs = zip(found.parameters, expected.parameters, strict=True)
    for index, (parameter, other) in enumerate(pairs):
        assert parameter.isfinite().all(), f"parameter {index} is not finite"
        assert_same_bits(parameter, other, f"parameter {index}")
    for index, (state, other) in enumerate(zip(found.states, expected.states, strict=True)):
        assert list(state) == list(other), f"states of parameter {index}: {list(state)}"
        for key, value in state.items():
            assert value.isfinite().all(), f"{key} of parameter {index} is not finite"
            assert_same_bits(value, other[key], f"{key} of parameter {index}")


def swapped_device_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the device bytes of state tensors with more than one element."""
    return sum(
        local_of(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0 and value.device.type != "cpu"
    )


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, error: BaseException
) -> None:
    """Let the given call (from 0) of ``owner.name`` raise, once."""
    original: Callable[..., object] = getattr(owner, name)
    calls = 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls - 1 == call:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
