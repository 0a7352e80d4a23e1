"""The pictures: what they name, in which order, and how their time is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from swapopt_mindspore.demo import figures
from swapopt_mindspore.demo.observe import Lane, MemorySample, Phase, StepRow
from swapopt_mindspore.demo.results import ResultRow, RunKind, RunResult, StepTime, compare

PHASES: tuple[Phase, ...] = ("forward", "backward", "update", "between steps")
SWAPPED: tuple[Lane, ...] = ("h2d", "h2d", "compute", "d2h", "d2h")


def make_run(kind: RunKind, seconds: float) -> RunResult:
    """A run whose drawn step takes ``seconds``."""
    lanes = ("compute",) if kind is RunKind.NATIVE else SWAPPED
    return RunResult(
        kind=kind,
        losses=[2.0, 1.0],
        fingerprints={},
        state_nbytes=800,
        peak_nbytes=(4 if kind is RunKind.NATIVE else 3) << 20,
        idle_nbytes=1 << 20,
        pinned_nbytes=0,
        step_times=[StepTime(seconds, 2 * seconds)],
        transfers=None,
        step_rows=[StepRow(lane, "copy", 100, i, i + 1) for i, lane in enumerate(lanes)],
        memory=[
            MemorySample(place * seconds / 3, 1 << 20, phase, 0)
            for place, phase in enumerate(PHASES)
        ],
        wall_seconds=1.0,
    )


ROWS = compare([make_run(kind, 1.0 + index / 4) for index, kind in enumerate(RunKind)])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    return saved


def titles_of(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["three runs", "two runs"])
def test_each_swapped_run_has_a_timeline(
    drawn: list[Figure], rows: Sequence[ResultRow], tmp_path: Path
) -> None:
    figures.draw_timeline(tmp_path / "timeline.png", rows, "virtual time")
    (figure,) = drawn
    assert (
        titles_of(figure)
        == [
            "per-tensor: 1,250.000 ms, +25.00 % against native",
            "packed: 1,500.000 ms, +50.00 % against native",
        ][: len(rows) - 1]
    )
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label.partition("\n")[0] for label in labels] == [
        "host to device",
        "update",
        "device to host",
    ]
    assert figures.GAPS_NOTE in figure.axes[-1].get_xlabel()


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["three runs", "two runs"])
def test_every_run_fills_its_panel_of_the_memory(
    drawn: list[Figure], rows: Sequence[ResultRow], tmp_path: Path
) -> None:
    figures.draw_memory(tmp_path / "memory.png", rows, "virtual time")
    (figure,) = drawn
    expected = ["native", "per-tensor: peak -25 %", "packed: peak -25 %"]
    assert titles_of(figure) == expected[: len(rows)]
    widths = [(0.0, 1000.0), (0.0, 1250.0), (0.0, 1500.0)]
    assert [axes.get_xlim() for axes in figure.axes] == widths[: len(rows)]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_losses_that_differ_are_called_so(drawn: list[Figure], tmp_path: Path) -> None:
    figures.draw_losses(tmp_path / "loss.png", ROWS)
    figures.draw_losses(tmp_path / "loss.png", [replace(ROWS[1], differences=["losses"])])
    assert [titles_of(figure) for figure in drawn] == [
        ["The same loss to the last bit"],
        ["The losses differ"],
    ]
