"""The whole demo, small: what it prints, what it writes, and that it says no where runs differ."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from mindspore import nn
from rich.console import Console

from swapopt_mindspore import cli
from swapopt_mindspore.demo import main as demo_main
from swapopt_mindspore.demo import mindformers_adamw
from swapopt_mindspore.demo.settings import MODEL_SIZES, DemoSettings
from swapopt_mindspore.demo.training import train

RUNS = ["native", "per-tensor", "packed"]


@dataclass
class Done:
    """A demo that ran."""

    status: int
    output: str
    folder: Path

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found

    def words(self) -> str:
        return " ".join(self.output.split())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("demo") / "deep" / "report"
    with pytest.MonkeyPatch.context() as patch:
        output = io.StringIO()
        patch.setattr("rich.console.Console", lambda: Console(file=output, width=80))
        arguments = ["--steps", "3", "--swap-times", "4", "--output", str(folder)]
        arguments += ["--model-size", "tiny", "--optimizer", "mindformers-adamw"]
        status = cli.main(["demo", *arguments])
    return Done(status, output.getvalue(), folder)


@pytest.fixture(scope="module")
def rows(done: Done) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in done.report()["rows"]}


def test_it_says_where_it_runs_and_what_it_found(done: Done) -> None:
    assert done.status == 0
    assert "emulated on the CPU, with the speeds of the ascend-910b profile" in done.words()
    assert "virtual time of the ascend-910b profile, mean of 2 steps" in done.words()
    assert "Every loss, parameter and state is equal to native, bit for bit." in done.words()
    assert "those of fewer than 1024 elements stay" in done.words()
    for run in RUNS:
        assert f"{run:<10}  step    3 of 3  loss" in done.output
    assert [line for line in done.output.splitlines() if line != line.rstrip()] == []


def test_it_says_what_swapping_costs(done: Done, rows: dict[str, dict[str, Any]]) -> None:
    for run in ("per-tensor", "packed"):
        longer = rows[run]["step_seconds"] / rows["native"]["step_seconds"] - 1
        assert longer > 0
        assert f"{longer:+.2%} {run}".replace("%", " %") in done.words()
        assert rows[run]["against_native"]["step_seconds"] == pytest.approx(longer)


def test_swapped_runs_are_equal_to_native(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == RUNS
    assert [rows[run]["equal_to_native"] for run in RUNS] == [None, "yes", "yes"]
    assert len({json.dumps(rows[run]["fingerprints"]) for run in RUNS}) == 1
    assert len({json.dumps(rows[run]["losses"]) for run in RUNS}) == 1
    assert len(rows["native"]["losses"]) == len(set(rows["native"]["losses"])) == 3


def test_swapping_takes_the_states_off_the_device(rows: dict[str, dict[str, Any]]) -> None:
    native, per_tensor, packed = (rows[run] for run in RUNS)
    moved = packed["transfers"]["h2d_nbytes"]
    assert per_tensor["transfers"]["h2d_nbytes"] == packed["transfers"]["d2h_nbytes"] == moved
    assert native["transfers"] is None
    assert native["pinned_nbytes"] == 0
    # Nothing but the swapped states leaves; each was a block of whole 512 bytes.
    assert native["idle_nbytes"] - packed["idle_nbytes"] == moved
    assert packed["idle_nbytes"] == per_tensor["idle_nbytes"]
    assert packed["pinned_nbytes"] >= moved
    assert max(packed["peak_nbytes"], per_tensor["peak_nbytes"]) < native["peak_nbytes"]


def test_small_states_cost_one_copy_per_batch_and_direction_in_either_movement(
    done: Done, rows: dict[str, dict[str, Any]]
) -> None:
    native, per_tensor, packed = (rows[run]["step_seconds"] for run in RUNS)
    assert native < packed
    # A copy costs the host a launch, and is the only thing that swapping adds to its time.
    assert per_tensor == pytest.approx(packed)
    longer = rows["per-tensor"]["iteration_seconds"] - rows["native"]["iteration_seconds"]
    assert longer == pytest.approx(per_tensor - native)
    events = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    for process, run in enumerate(RUNS, start=1):
        copies = [e["cat"] for e in events if e["ph"] == "X" and e["pid"] == process]
        batches = 0 if run == "native" else 4
        assert (copies.count("h2d"), copies.count("d2h")) == (batches, batches)
    for run in ("per-tensor", "packed"):
        transfers = rows[run]["transfers"]
        assert 0 < transfers["exposed_seconds"] < transfers["seconds"]


def test_it_writes_the_report(done: Done) -> None:
    names = {path.name for path in done.folder.iterdir()}
    assert names == {"loss.png", "memory.png", "timeline.png", "report.json", "trace.json"}
    for name in ("loss.png", "memory.png", "timeline.png"):
        height, width, _ = image.imread(done.folder / name).shape
        assert height > 500
        assert width > 1000
    report = done.report()
    assert report["settings"] == {
        "steps": 3,
        "model": str(MODEL_SIZES["tiny"]),
        "swap_times": 4,
        "optimizer": "MindFormers AdamW",
        "seed": 0,
    }
    assert report["reported"]["native"]["step_seconds"] == 0.366


def test_the_trace_shows_a_lane_for_each_stream_of_each_run(
    done: Done, rows: dict[str, dict[str, Any]]
) -> None:
    events = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    lanes = ["host to device", "update", "device to host"]
    assert names == [name for run in RUNS for name in (f"{run} step", *lanes)]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    for process, run in enumerate(RUNS, start=1):
        transfers = rows[run]["transfers"] or {"h2d_nbytes": 0, "d2h_nbytes": 0}
        for lane in ("h2d", "d2h"):
            copies = [s for s in spans if s["pid"] == process and s["cat"] == lane]
            assert sum(copy["args"]["bytes"] for copy in copies) == transfers[f"{lane}_nbytes"]
        assert any(s["pid"] == process and s["cat"] == "compute" for s in spans)


def test_a_run_that_differs_is_named_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(kind: object, *arguments: object) -> object:
        result = train(kind, *arguments)  # type: ignore[arg-type]
        if kind == "per-tensor":
            result = replace(result, losses=[*result.losses[:-1], result.losses[-1] + 1e-6])
        return result

    monkeypatch.setattr(demo_main, "train", disturbed)
    monkeypatch.setattr(mindformers_adamw, "is_installed", lambda: False)
    output = io.StringIO()
    settings = DemoSettings(
        steps=3,
        swap_times=2,
        profile="half-duplex",
        model_size=MODEL_SIZES["tiny"],
        output=tmp_path,
    )
    console = Console(file=output, width=80, force_terminal=True)
    assert demo_main.run_demo(settings, console) is False
    words = " ".join(output.getvalue().split())
    assert "The per-tensor run differs from the native one in losses." in words
    assert "mindspore.nn.Adam, since MindFormers is not here" in words
    (native, per_tensor) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (native["equal_to_native"], per_tensor["equal_to_native"]) == (None, "no")
    assert per_tensor["differences"] == ["losses"]
    assert native["fingerprints"] == per_tensor["fingerprints"]


def test_mindformers_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, mindformers_adamw.HOME, raising=False)
    before = set(sys.modules)
    adamw = mindformers_adamw.load_adamw()
    assert isinstance(adamw, type)
    assert issubclass(adamw, nn.Optimizer)
    assert adamw.__module__ == mindformers_adamw.HOME
    stand_ins = {"hyper_parallel", "mindformers", "mindformers.tools.logger"}
    assert not stand_ins & (set(sys.modules) - before)
