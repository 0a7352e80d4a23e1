"""Run benchmarks on a dry virtual accelerator, in a process of its own; print them as JSON.

The argument is a list of cases as JSON; the answer is a list of what bench.json would hold.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from swapopt_torch import virtual
from swapopt_torch.bench.contenders import OWN
from swapopt_torch.bench.device import VirtualBenchDevice, choose_device
from swapopt_torch.bench.report import content_of
from swapopt_torch.bench.run import run_bench
from swapopt_torch.bench.settings import BenchSettings
from swapopt_torch.bench.workloads import find_workload

_COMPARED = ("native", "per-tensor", "packed", "RFC's order")


@dataclass(frozen=True)
class Case:
    """One benchmark: settings of the same names."""

    profile: str
    workload: str
    optimizer: str
    swap_times: int = 16


def run(case: Case) -> dict[str, object]:
    settings = BenchSettings(
        workload=case.workload,
        optimizer=case.optimizer,
        swap_times=case.swap_times,
        rounds=1,
        device="virtual",
        profile=case.profile,
        dry=True,
    )
    # Times of this machine are of no interest here.
    device = VirtualBenchDevice(choose_device(settings).accelerator, measures_host=False)
    virtual.reset_clock()
    entries = [entry for entry in OWN if entry.name in _COMPARED]
    result = run_bench(settings, find_workload(case.workload), device, lambda name: None, entries)
    return content_of(result, settings)


if __name__ == "__main__":
    print(json.dumps([run(Case(**case)) for case in json.loads(sys.argv[1])]))
