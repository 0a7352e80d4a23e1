"""Programs that take the same time and memory dry and wet: `python dry_programs.py dry|wet`.

Prints, as JSON, what every program saw on the device. A process has a dry device or a wet one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual
from swapopt_torch.optim import AdamW as HyperAdamW

DEVICE = "virtual:0"
Figures = dict[str, Any]
Step = Callable[[], object]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.mix = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, width // 4).transpose(1, 2)
            for part in self.attention(self.norm(x)).chunk(3, dim=-1)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(batch, length, width)
        return x + self.mix(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = torch.nn.Embedding(300, 64)
        self.blocks = torch.nn.ModuleList(Block(64) for _ in range(2))
        self.head = torch.nn.Linear(64, 300)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, foreach=False, amsgrad=True),
    "hyper": HyperAdamW,
}


def optimizer_for(model: torch.nn.Module, name: str, way: str) -> torch.optim.Optimizer:
    native = OPTIMIZERS[name](model.parameters())
    if way == "native":
        return native
    return swap_optimizer(native, SwapOptimizerConfig(swap_times=4, packed_swap=way == "packed"))


def training(name: str, way: str) -> Step:
    model = Model().to(DEVICE)
    optimizer = optimizer_for(model, name, way)
    tokens = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def mixed_precision() -> Step:
    model = Model().to(DEVICE)
    optimizer = optimizer_for(model, "fused", "packed")
    scaler = torch.amp.GradScaler("virtual")
    tokens = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("virtual", torch.bfloat16):
            loss = model(tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def recomputation() -> Step:
    model = Model(recompute=True).to(DEVICE)
    optimizer = optimizer_for(model, "fused", "packed")
    tokens = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)

    def step() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shapes() -> Step:
    """Results of other sizes, dtypes and strides than their arguments; views; storages."""
    image = torch.zeros(2, 3, 16, 16, device=DEVICE, requires_grad=True)
    layer = torch.nn.Conv2d(3, 8, 3, stride=2).to(DEVICE)

    def step() -> None:
        features = torch.nn.functional.max_pool2d(layer(image), 2)
        (features.permute(0, 2, 3, 1).contiguous() > 0).float().mean(dim=1).sum()
        features.relu().sum().backward()
        out = torch.empty(0, device=DEVICE)
        torch.add(torch.zeros(7, 5, device=DEVICE), 1, out=out)
        values, indices = out.t().max(dim=0)
        torch.cat([values.half(), indices[:3].half()]).var()
        out.untyped_storage().resize_(16)
        torch.arange(5, device=DEVICE).add_(1).cpu()
        torch._foreach_add([out.new_zeros(3), out.new_zeros(4, 2)], 1.0)
        torch.zeros(100, device=DEVICE).view(10, 10).copy_(torch.zeros(10, 1))
        torch.zeros(4, 6, device=DEVICE).to(torch.bfloat16).sort(dim=1)

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    **{
        f"{way} {name}": (lambda name=name, way=way: training(name, way))  # type: ignore[misc]
        for name in OPTIMIZERS
        for way in ("native", "packed", "per_tensor")
    },
    "mixed precision": mixed_precision,
    "recomputation": recomputation,
    "shapes": shapes,
}


def observe(program: Callable[[], Step]) -> Figures:
    """Run three steps; return all that can be seen of time and memory, step by step."""
    gc.collect()
    torch.virtual.synchronize()
    torch.virtual.empty_cache()
    torch.virtual.reset_peak_memory_stats()
    torch.virtual.reset_accumulated_memory_stats()
    virtual.clear_timeline()
    virtual.clear_operator_counts()
    virtual.reset_clock()
    step = program()
    seen: list[Figures] = []
    for _ in range(3):
        step()
        host = virtual.host_memory(reset_peaks=True)
        seen.append(
            {
                "now_ns": virtual.now_ns(),
                "memory": torch.virtual.memory_stats(),
                "host": vars(host),
            }
        )
    torch.virtual.synchronize()
    rows = [tuple(vars(row).values()) for row in virtual.timeline()]
    return {"steps": seen, "operators": virtual.operator_counts(), "rows": rows}


def main(mode: str) -> None:
    torch.set_num_threads(1)
    virtual.enable("ascend-910b", device_count=1, races="collect", dry=mode == "dry")
    figures = {name: observe(program) for name, program in PROGRAMS.items()}
    assert not virtual.races()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
