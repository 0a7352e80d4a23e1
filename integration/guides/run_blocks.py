"""Run the blocks of the guides that are marked for one backend.

    run_blocks.py FRAMEWORK             all but those that stand alone, page by page
    run_blocks.py FRAMEWORK PAGE LINE   the one whose code begins there, alone

What blocks write goes to a folder that is gone afterwards. Where a guide says "cuda", the virtual
accelerator is taken. Pages may use what every reader has: a model, an optimizer, batches; see the
two functions below.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any

from blocks import PAGES, Block, blocks_of

Names = dict[str, Any]  # a program's variables


def torch_names() -> Names:
    """Return what pages about torch may use."""
    import torch

    from swapopt_torch import SwapOptimizerConfig, swap_optimizer, virtual

    virtual.enable("h200", device_count=2, races="raise", late_copies=True)
    device = torch.device("virtual")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model.to(device)
    optimizer = swap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    batches = [
        (torch.randn(4, 64, device=device), torch.randn(4, 8, device=device)) for _ in range(3)
    ]
    inputs, targets = batches[0]
    loss_of = torch.nn.functional.mse_loss
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    return {
        **{"torch": torch, "virtual": virtual, "device": device, "model": model},
        **{"optimizer": optimizer, "batches": batches, "inputs": inputs, "targets": targets},
        **{"loss_of": loss_of, "SwapOptimizerConfig": SwapOptimizerConfig},
        "swap_optimizer": swap_optimizer,
    }


def mindspore_names() -> Names:
    """Return what pages about MindSpore may use."""
    import mindspore
    import numpy as np
    from mindspore import Tensor, nn, ops

    from swapopt_mindspore import SwapOptimizerConfig, swap_optimizer

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = nn.Dense(64, 32)
    random = np.random.default_rng(0)
    batches = [
        (
            Tensor(random.normal(size=(4, 64)).astype(np.float32)),
            Tensor(random.normal(size=(4, 32)).astype(np.float32)),
        )
        for _ in range(3)
    ]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return ops.square(net(inputs) - targets).mean()

    optimizer = swap_optimizer(nn.Adam(net.trainable_params()))
    return {
        **{"mindspore": mindspore, "nn": nn, "net": net, "batches": batches, "loss_of": loss_of},
        **{"optimizer": optimizer, "swap_optimizer": swap_optimizer},
        "SwapOptimizerConfig": SwapOptimizerConfig,
    }


def mindspore_device() -> AbstractContextManager[object]:
    """Return the device that MindSpore's pages run on."""
    from swapopt_mindspore.emulated import EmulatedDevice

    return EmulatedDevice()


NAMES: dict[str, Callable[[], Names]] = {"torch": torch_names, "mindspore": mindspore_names}
DEVICES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "torch": nullcontext,
    "mindspore": mindspore_device,
}


def code_of(block: Block) -> str:
    """Return the code to run; empty lines before it make the line numbers the page's."""
    return "\n" * (block.line - 1) + block.code.replace('"cuda"', '"virtual"')


def run(block: Block, names: Names) -> None:
    """Run a block; an exception names the page and the line."""
    exec(compile(code_of(block), block.page, "exec"), names)


def run_two_processes(block: Block) -> None:
    """Run a block as torchrun runs a program in two processes."""
    from torch.distributed.run import main as torchrun

    program = Path("program.py")
    program.write_text(code_of(block), encoding="utf-8")
    torchrun(["--standalone", "--nproc-per-node", "2", str(program)])


def main(framework: str, *alone: str) -> None:
    """Run one block, or all of a framework that do not stand alone."""
    if alone:
        page, line = alone
        (block,) = (block for block in blocks_of(page) if block.line == int(line))
        if block.how == "two processes":
            run_two_processes(block)
        else:
            run(block, {})
        print(f"{block.page}:{block.line}")
        return
    for page in PAGES:
        chosen = [
            block for block in blocks_of(page) if block.framework == framework and not block.how
        ]
        if chosen:
            with DEVICES[framework]():
                names = NAMES[framework]()
                for block in chosen:
                    run(block, names)
                    print(f"{block.page}:{block.line}")


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "3")  # read when mindspore is imported
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        main(*sys.argv[1:])
