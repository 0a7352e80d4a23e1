"""A benchmark from beginning to end, on small workloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_devices import OpenDevice

from swapopt_torch import virtual
from swapopt_torch.bench.contenders import OWN, Contender, Entry, Native, Scene
from swapopt_torch.bench.device import VirtualBenchDevice
from swapopt_torch.bench.run import BenchResult, run_bench
from swapopt_torch.bench.settings import BenchSettings
from swapopt_torch.bench.workloads import Workload, find_workload
from swapopt_torch.division import CUT_NUMEL

SETTINGS = BenchSettings(swap_times=4, rounds=2, training_seconds=0.001)
SMALL = find_workload("uniform-64MiB")
CHANGING = Workload(
    "changing", "for a test", ((64, 64),) * 9, always=1, group_length=2, active_share=0.5
)


def run(device: VirtualBenchDevice, workload: Workload, settings: BenchSettings) -> BenchResult:
    return run_bench(settings, workload, device, say=lambda name: None)


def test_figures_of_every_contender_agree_with_one_another(open_device: OpenDevice) -> None:
    device = open_device("h200")
    result = run(device, SMALL, SETTINGS)
    assert [row.name for row in result.rows] == [entry.name for entry in OWN]
    transfer = SMALL.state_nbytes / 53e9
    assert result.demand.nbytes == SMALL.state_nbytes
    assert result.floor_seconds == transfer
    for row in result.rows:
        assert row.idle_nbytes - 2 * SMALL.nbytes < SMALL.state_nbytes + 2**15
        # Equal steps take equal times, but for the one synchronisation with the step before.
        assert max(row.step_seconds) - min(row.step_seconds) <= 1.001e-6
        assert 0 < row.returns <= row.step
        if row.name != "plain .to()":
            assert row.pinned_nbytes == row.host_nbytes
        if row.name != "native":
            assert row.host_nbytes == SMALL.state_nbytes
            assert row.step > result.floor_seconds
            assert result.exposed_seconds(row) == row.step - result.native.step
    packed, plain = result.row("packed"), result.row("plain .to()")
    # The memory of two batches; each arena may be larger by what a cut leaves empty.
    grain_nbytes = 4 * CUT_NUMEL * 8
    assert packed.working_nbytes <= 2 * SMALL.state_nbytes // 4 + grain_nbytes
    assert plain.working_nbytes == SMALL.state_nbytes
    assert not packed.python_seconds, "the updates are computed by this machine"
    assert result.optimum.seconds > result.floor_seconds


def test_a_training_step_hides_what_is_under_way_at_the_end(open_device: OpenDevice) -> None:
    device = open_device("h200")
    result = run(device, SMALL, replace(SETTINGS, training_seconds=0.05))
    native, packed, reference = map(result.row, ("native", "packed", "RFC's order"))
    assert native.training == pytest.approx(native.step + 0.05, abs=1e-5)
    # The reference waits for its last copy; a packed step does not, and its last offload,
    # a piece at least, runs while the model does.
    assert reference.training == pytest.approx(reference.step + 0.05, abs=1e-5)
    smallest_piece_seconds = SMALL.state_nbytes / 64 / 53e9
    assert packed.training < packed.step + 0.05 - smallest_piece_seconds


def test_the_same_run_gives_the_same_figures(open_device: OpenDevice) -> None:
    results = [run(open_device("ascend-910b"), CHANGING, SETTINGS) for _ in range(2)]
    assert results[0].rows == results[1].rows
    assert results[0].demand == results[1].demand
    assert results[0].optimum == results[1].optimum


def test_the_floor_counts_the_states_that_steps_move(open_device: OpenDevice) -> None:
    result = run(open_device("h200"), CHANGING, SETTINGS)
    # One parameter always, and two of the four groups of two.
    assert result.demand.nbytes == 5 * 64 * 64 * 2 * 4


def test_updates_alone_are_what_a_list_of_tensors_costs_to_launch(
    open_device: OpenDevice,
) -> None:
    result = run(open_device("ascend-910b"), find_workload("rfc"), replace(SETTINGS, rounds=1))
    # The RFC's figure, from which the profile's cost of a launch is.
    assert result.demand.update_seconds == pytest.approx(42.75e-3, rel=0.005)
    assert result.floor_seconds == result.demand.update_seconds


class Logged(Contender):
    def __init__(self, scene: Scene, name: str, log: list[str]) -> None:
        super().__init__(scene)
        self._name, self._log = name, log

    def step(self) -> None:
        self._log.append(self._name)

    def host_nbytes(self) -> int:
        return 0


@pytest.mark.parametrize("measures_host", [False, True])
def test_contenders_take_turns_where_time_is_measured(
    open_device: OpenDevice, measures_host: bool
) -> None:
    accelerator = open_device("h200").accelerator
    device = VirtualBenchDevice(accelerator, measures_host=measures_host)
    log: list[str] = []

    def entry(name: str) -> Entry:
        return Entry(name, lambda scene: Logged(scene, name, log))

    entries = [Entry("native", Native), entry("a"), entry("b")]
    result = run_bench(SETTINGS, CHANGING, device, lambda name: None, entries)
    turns = "".join(name for index, name in enumerate(log) if log[index - 1] != name or index == 0)
    # Both are warmed before the first round, or one is done before the other begins.
    assert turns == ("ababab" if measures_host else "ab")
    assert bool(result.row("a").python_seconds) is measures_host
    assert result.absent == ()


def test_nothing_is_left_when_a_benchmark_ends(open_device: OpenDevice) -> None:
    device = open_device("h200")
    before = device.idle_nbytes(), virtual.host_memory().registered_bytes
    run(device, CHANGING, SETTINGS)
    assert (device.idle_nbytes(), virtual.host_memory().registered_bytes) == before


def test_parameters_of_another_dtype(open_device: OpenDevice) -> None:
    half = replace(CHANGING, dtype=torch.bfloat16)
    result = run(open_device("h200"), half, SETTINGS)
    assert result.demand.nbytes == 5 * 64 * 64 * 2 * 2
    assert result.row("packed").host_nbytes >= half.state_nbytes
