"""Time to partition many units of very different sizes; no framework needed.

python packages/swapopt-common/benchmarks/partition.py [units]
"""

import random
import sys
import time
from dataclasses import dataclass

from swapopt_common import partition


@dataclass(eq=False)
class Unit:
    swappable_nbytes: int


def main(count: int) -> None:
    generator = random.Random(0)
    units = [Unit(8 * int(generator.lognormvariate(11, 3))) for _ in range(count)]
    for swap_times in (1, 16, 256, 4096, count // 2):
        began = time.perf_counter()
        batches = partition(units, swap_times)
        seconds = time.perf_counter() - began
        print(f"{count} units, {len(batches)} batches: {seconds:.3f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
