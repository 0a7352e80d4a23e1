"""The whole demo, small: what it prints, what it writes, and that it says no where runs differ."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from matplotlib import image
from rich.console import Console

from swapopt_torch import cli
from swapopt_torch.demo import accelerator
from swapopt_torch.demo import main as demo_main
from swapopt_torch.demo.accelerator import CardAccelerator
from swapopt_torch.demo.sentences import notes
from swapopt_torch.demo.settings import DemoError, DemoSettings, parse_model_size
from swapopt_torch.demo.training import train

SIZE = "layers=2,width=64,heads=2,context=16,batch=2"
RUNS = ["native", "per-tensor", "packed"]


@dataclass
class Done:
    """A demo that ran."""

    status: int
    output: str
    folder: Path

    def report(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "report.json").read_text())
        return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("demo") / "deep" / "report"
    with pytest.MonkeyPatch.context() as patch:
        output = io.StringIO()
        patch.setattr("rich.console.Console", lambda: Console(file=output, width=80))
        arguments = ["--steps", "6", "--swap-times", "4", "--output", str(folder)]
        status = cli.main(["demo", "--device", "virtual", "--model-size", SIZE, *arguments])
    return Done(status, output.getvalue(), folder)


@pytest.fixture(scope="module")
def rows(done: Done) -> dict[str, dict[str, float]]:
    found = done.report()["rows"]
    assert isinstance(found, list)
    return {row["run"]: row for row in found}


def test_it_says_where_it_runs_and_what_it_found(done: Done) -> None:
    assert done.status == 0
    assert "virtual accelerator (h200): as --device asks" in done.output
    assert "Every loss, parameter and state is equal to native, bit for bit." in done.output
    assert "virtual time of the h200 profile" in done.output
    for line in ("Device memory, peak", "Host memory, pinned", "Share of transfer time hidden"):
        assert line in done.output
    assert "nvidia-smi" not in done.output
    for run in RUNS:
        assert f"{run:<10}  step    3 of 6  loss" in done.output


def words(done: Done) -> str:
    return " ".join(done.output.split())


def test_it_says_what_swapping_costs_and_where_it_pays(
    done: Done, rows: dict[str, dict[str, float]]
) -> None:
    native, packed = rows["native"], rows["packed"]
    factor = packed["step_seconds"] / native["step_seconds"]
    longer = packed["iteration_seconds"] / native["iteration_seconds"] - 1
    assert f"{factor:.1f} times the native one" in words(done)
    assert f"({longer:+.0%}".replace("%", " %") in words(done)
    assert "large models, large batches, gradient accumulation" in words(done)
    assert factor > 1
    assert longer > 0


def test_it_says_what_its_figures_leave_out(done: Done) -> None:
    assert "mean of 2 steps. Left out are the first step" in words(done)
    assert "those of fewer than 1024 elements stay" in words(done)


def test_no_line_ends_in_spaces(done: Done) -> None:
    assert [line for line in done.output.splitlines() if line != line.rstrip()] == []


def test_that_the_device_is_being_built_is_said_among_the_demos_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(_: object) -> None:
        logging.getLogger("swapopt_torch.virtual.build").warning("building [now]")
        raise DemoError("enough")

    monkeypatch.setattr(demo_main, "choose_accelerator", choose)
    output = io.StringIO()
    with pytest.raises(DemoError, match="enough"):
        demo_main.run_demo(DemoSettings(output=tmp_path), Console(file=output, width=80))
    assert output.getvalue() == "building [now]\n"
    assert logging.getLogger("swapopt_torch.virtual").handlers == []


def test_it_writes_the_report(done: Done) -> None:
    names = {path.name for path in done.folder.iterdir()}
    assert names == {"loss.png", "memory.png", "timeline.png", "report.json", "trace.json"}
    for name in ("loss.png", "memory.png", "timeline.png"):
        height, width, _ = image.imread(done.folder / name).shape
        assert height > 500
        assert width > 1000


def test_swapped_runs_are_equal_to_native(rows: dict[str, dict[str, object]]) -> None:
    assert list(rows) == RUNS
    assert [rows[run]["equal_to_native"] for run in RUNS] == [None, "yes", "yes"]
    assert len({json.dumps(rows[run]["fingerprints"]) for run in RUNS}) == 1
    assert len({json.dumps(rows[run]["losses"]) for run in RUNS}) == 1
    assert len(rows["native"]["losses"]) == 6  # type: ignore[arg-type]


def test_swapping_takes_the_states_off_the_device(rows: dict[str, dict[str, float]]) -> None:
    native, packed, per_tensor = rows["native"], rows["packed"], rows["per-tensor"]
    assert packed["peak_nbytes"] < native["peak_nbytes"]
    assert per_tensor["peak_nbytes"] < native["peak_nbytes"]
    moved = packed["h2d_nbytes"]
    assert packed["d2h_nbytes"] == moved
    assert per_tensor["h2d_nbytes"] == moved
    assert native["h2d_nbytes"] == native["pinned_nbytes"] == 0
    # Nothing but the swapped states leaves; each was a block of whole 512 bytes.
    assert native["idle_nbytes"] - packed["idle_nbytes"] == moved
    assert packed["idle_nbytes"] == per_tensor["idle_nbytes"]
    assert packed["pinned_nbytes"] >= moved


def test_times_are_consistent(rows: dict[str, dict[str, float]]) -> None:
    native = rows["native"]
    assert native["transfer_seconds"] == 0
    assert native["hidden_share"] is None
    for run in ("per-tensor", "packed"):
        row = rows[run]
        assert 0 < row["tail_seconds"] < row["step_seconds"]
        extra = row["step_seconds"] - native["step_seconds"]
        assert row["iteration_seconds"] - native["iteration_seconds"] == pytest.approx(extra)
        assert row["hidden_share"] == pytest.approx(1 - extra / row["transfer_seconds"])


def test_settings_and_versions_are_reported(done: Done) -> None:
    report = done.report()
    assert report["settings"] == {
        "steps": 6,
        "model": SIZE,
        "swap_times": 4,
        "optimizer": "torch.optim.AdamW(fused=True)",
        "seed": 0,
    }
    assert report["device"] == {
        "name": "virtual accelerator (h200)",
        "type": "virtual",
        "chosen": "as --device asks",
        "times": "virtual time of the h200 profile",
    }
    versions = report["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"] == torch.__version__


def test_the_trace_shows_a_lane_for_each_stream_of_each_run(
    done: Done, rows: dict[str, dict[str, float]]
) -> None:
    events = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    lanes = ["host to device", "update", "device to host"]
    assert names == [name for run in RUNS for name in (f"{run} step", *lanes)]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    for process, run in enumerate(RUNS, start=1):
        for lane in ("h2d", "d2h"):
            copies = [s for s in spans if s["pid"] == process and s["cat"] == lane]
            assert sum(copy["args"]["bytes"] for copy in copies) == rows[run][f"{lane}_nbytes"]
        assert any(s["pid"] == process and s["cat"] == "compute" for s in spans)


def test_a_run_that_differs_is_named_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_train = train

    def disturbed(kind: object, *arguments: object) -> object:
        result = real_train(kind, *arguments)  # type: ignore[arg-type]
        if kind == "packed":
            result = replace(result, losses=[*result.losses[:-1], result.losses[-1] + 1e-6])
        return result

    monkeypatch.setattr(demo_main, "train", disturbed)
    output = io.StringIO()
    settings = DemoSettings(
        steps=5,
        swap_times=2,
        device="virtual",
        optimizer="adam",
        profile="half-duplex",
        model_size=parse_model_size(SIZE),
        output=tmp_path,
    )
    assert demo_main.run_demo(settings, Console(file=output, width=80)) is False
    assert "The packed run differs from the native one in losses." in output.getvalue()
    assert "virtual time of the half-duplex profile" in output.getvalue()
    (_, per_tensor, packed) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (per_tensor["equal_to_native"], packed["equal_to_native"]) == ("yes", "no")
    assert packed["differences"] == ["losses"]


def test_the_way_of_a_card_leads_through(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The virtual accelerator stands in for a card: wall time, events around every operator.
    monkeypatch.setattr(accelerator, "_find_card", lambda: torch.device(device.type, 0))
    settings = DemoSettings(
        steps=5, swap_times=4, model_size=parse_model_size(SIZE), output=tmp_path
    )
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True)
    assert demo_main.run_demo(settings, console) is True
    assert "torch finds it" in output.getvalue()
    assert "caching allocator" in output.getvalue()
    assert not torch.are_deterministic_algorithms_enabled()
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rows[2]["pinned_nbytes"] == rows[2]["h2d_nbytes"] > 0
    assert rows[2]["transfer_seconds"] > 0


def test_a_card_is_told_why_its_tool_shows_no_saving(device: torch.device) -> None:
    card = CardAccelerator(device, "a card", "for a test", "wall time")
    card.device = torch.device("cuda", 0)
    output = io.StringIO()
    Console(file=output, width=200).print(*notes([], card))
    for expected in ("nvidia-smi", "torch.cuda.max_memory_allocated()", "torch.cuda.empty_cache()"):
        assert expected in output.getvalue()
