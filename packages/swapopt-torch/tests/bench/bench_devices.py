"""What opens the virtual accelerator as the benchmark does."""

from collections.abc import Callable

from swapopt_torch.bench.device import VirtualBenchDevice

OpenDevice = Callable[[str], VirtualBenchDevice]
