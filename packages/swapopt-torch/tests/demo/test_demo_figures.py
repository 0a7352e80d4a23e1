"""The pictures: what they name, in which order, and how their time is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from swapopt_torch.demo import figures
from swapopt_torch.demo.accelerator import CardAccelerator
from swapopt_torch.demo.observe import MemorySample, Phase, StepRow
from swapopt_torch.demo.results import ResultRow, RunKind, RunResult, StepTime
from swapopt_torch.demo.sentences import NOTHING_HIDDEN, notes
from swapopt_torch.demo.table import hidden_percent

PHASES: tuple[Phase, ...] = ("forward", "backward", "update", "between steps")
KINDS = (RunKind.NATIVE, RunKind.PER_TENSOR, RunKind.PACKED)


def make_row(kind: RunKind, seconds: float, hidden_share: float | None) -> ResultRow:
    """A run whose sampled step takes ``seconds``."""
    lanes = ("compute",) if kind is RunKind.NATIVE else ("h2d", "h2d", "compute", "d2h", "d2h")
    run = RunResult(
        kind=kind,
        losses=[2.0, 1.0],
        fingerprints={},
        state_nbytes=800,
        peak_nbytes=2 << 20,
        idle_nbytes=1 << 20,
        pinned_nbytes=0,
        step_times=[StepTime(seconds, 0.0, 2 * seconds)],
        h2d_nbytes=0,
        d2h_nbytes=0,
        step_rows=[StepRow(lane, "copy", 100, i, i + 1) for i, lane in enumerate(lanes)],  # type: ignore[arg-type]
        memory=[
            MemorySample(place * seconds / 3, 1 << 20, phase, 0)
            for place, phase in enumerate(PHASES)
        ],
        wall_seconds=1.0,
    )
    return ResultRow(run, None, hidden_share, ())


ROWS = [
    make_row(kind, 1.0 + i, share)
    for i, (kind, share) in enumerate(zip(KINDS, (None, -4.19, 0.4), strict=True))
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    return saved


@pytest.fixture
def card(device: torch.device) -> CardAccelerator:
    return CardAccelerator(device, "a card", "for a test", "wall time")


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def titles_of(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_the_timeline_explains_shades_and_gaps(
    drawn: list[Figure], card: CardAccelerator, tmp_path: Path
) -> None:
    figures.draw_timeline(tmp_path / "timeline.png", ROWS, card)
    (figure,) = drawn
    assert titles_of(figure) == [
        "per-tensor: none of the transfer time hidden",
        "packed: 40 % of the transfer time hidden",
    ]
    assert legend_of(figure)[0] == "copies to the device, dark and light in turn"
    assert len(legend_of(figure)) == 3
    assert figures.GAPS_NOTE in figure.axes[-1].get_xlabel()


def test_every_run_fills_its_panel_of_the_memory(
    drawn: list[Figure], card: CardAccelerator, tmp_path: Path
) -> None:
    figures.draw_memory(tmp_path / "memory.png", ROWS, card)
    (figure,) = drawn
    assert [title.split(":")[0] for title in titles_of(figure)] == [kind.value for kind in KINDS]
    assert [axes.get_xlim() for axes in figure.axes] == [(0.0, 1e3), (0.0, 2e3), (0.0, 3e3)]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert "update, and waiting for its copies" in legend_of(figure)


def test_only_losses_that_differ_are_called_so(drawn: list[Figure], tmp_path: Path) -> None:
    for differences in ((), ("a state",), ("losses",)):
        rows = [replace(row, differences=differences) for row in ROWS]
        figures.draw_losses(tmp_path / "loss.png", rows)
    same = "The same loss to the last bit"
    assert [titles_of(figure) for figure in drawn] == [[same], [same], ["The losses differ"]]


def test_no_phase_has_the_hue_of_a_run() -> None:
    for phase_color in figures.PHASE_COLORS.values():
        red, green, blue = to_rgb(figures.RUN_COLORS[RunKind.PACKED])
        assert blue > green > red  # what the packed run is drawn in
        red, green, blue = to_rgb(phase_color)
        assert not blue > green > red


def test_a_share_below_zero_is_none_and_explained(card: CardAccelerator) -> None:
    assert [hidden_percent(share) for share in (None, -0.004, 0.0, 1.0)] == [
        "-",
        "none",
        "0 %",
        "100 %",
    ]
    assert NOTHING_HIDDEN in map(str, notes(ROWS, card))
    above = [replace(row, hidden_share=0.5) for row in ROWS]
    assert NOTHING_HIDDEN not in map(str, notes(above, card))
