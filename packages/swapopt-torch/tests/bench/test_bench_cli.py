"""`python -m swapopt_torch bench`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swapopt_torch import cli
from swapopt_torch.bench import command, report
from swapopt_torch.demo import accelerator

WET = ["bench", "--device", "virtual", "--no-dry"]  # as this process has the device
SMALL = [*WET, "--workload", "uniform-64MiB", "--rounds", "1"]


def bench(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run the command; return its status, and what it wrote to standard output and error."""
    try:
        status = cli.main([*arguments, "--output", str(folder)])
    except SystemExit as error:
        assert isinstance(error.code, int)
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_prints_a_table_and_writes_figures_and_a_picture(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del device
    folder = tmp_path / "new" / "folder"
    status, output, progress = bench([*SMALL, "--profile", "h200"], folder, capsys)
    assert status == 0
    for expected in (
        "8,388,608 parameters in 6 tensors",
        "Link (profile h200)  53.0 GB/s to the device, 53.0 GB/s to the host, both at once",
        "Optimizer step",
        "over the floor",
        "Copies, launches per piece",
        "plain .to(): all states with .to() before a native step, and back after it",
    ):
        assert expected in output
    assert "measuring packed" in progress
    content = json.loads((folder / "bench.json").read_text())
    rows = {row["name"]: row for row in content["contenders"]}
    assert content["floor_seconds"] == 64 * 2**20 / 53e9
    assert rows["packed"]["floor_ratio"] == rows["packed"]["step"] / content["floor_seconds"]
    # What is printed is what is written.
    line = next(line for line in output.splitlines() if "over the floor" in line)
    ratios = [f"{rows[name]['floor_ratio']:.3f}" for name in rows if name != "native"]
    assert line.split()[3:] == ["-", *ratios]
    picture = (folder / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_columns_are_whole_however_narrow_the_terminal(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del device
    monkeypatch.setenv("COLUMNS", "40")
    _, output, _ = bench(SMALL, tmp_path, capsys)
    assert any(
        line.split()[:4] == ["native", "per-tensor", "packed", "RFC's"]
        for line in output.splitlines()
    )


def test_without_rich_and_matplotlib_the_same_figures_are_plain(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del device
    _, with_rich, _ = bench(SMALL, tmp_path, capsys)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    (tmp_path / "bench.png").unlink()
    status, plain, progress = bench(SMALL, tmp_path, capsys)
    assert status == 0
    assert "No picture: matplotlib is not installed." in progress
    assert not (tmp_path / "bench.png").exists()
    words = [word for word in with_rich.split() if set(word) != {"─"}]
    assert plain.split() == words


def test_markdown_is_a_table_of_the_same_lines(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del device
    _, output, _ = bench([*SMALL, "--markdown"], tmp_path, capsys)
    table = [line for line in output.splitlines() if line.startswith("|")]
    assert table[0] == "| | native | per-tensor | packed | RFC's order | plain .to() |"
    assert table[1] == "|---|---:|---:|---:|---:|---:|"
    assert len({line.count("|") for line in table}) == 1
    assert len(table) > 15
    assert "- Workload: uniform-64MiB: transformer of 1 equal layers, width 1024" in output


def test_needs_torch_alone(tmp_path: Path) -> None:
    """As on a machine where neither rich nor matplotlib can be imported."""
    code = (
        "import sys\n"
        "sys.modules['rich'] = sys.modules['matplotlib'] = None\n"
        "from swapopt_torch.cli import main\n"
        f"sys.exit(main({[*SMALL, '--output', str(tmp_path)]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Optimizer step" in done.stdout
    assert (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workload", "resnet"], "choose one of rfc, llama-1b, moe, embedding"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--swap-times", "0"], "at least 1, got '0'"),
        (["--rounds", "none"], "at least 1, got 'none'"),
        (["--training-ms", "-1"], "a number of at least 0, got '-1'"),
        (["--training-ms", "long"], "a number of at least 0, got 'long'"),
        (["--device", "cpu"], "the bench runs on auto, virtual, cuda, npu, xpu"),
        (["--device", "virtual", "--profile", "abacus"], "the profiles are ascend-910b, h200"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, message = bench(["bench", *arguments], tmp_path, capsys)
    assert status == 2
    assert expected in " ".join(message.split())


def test_a_card_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_find_card", lambda: None)
    status, _, message = bench(["bench", "--device", "cuda"], tmp_path, capsys)
    assert status == 2
    assert "torch finds no CUDA, NPU or XPU device here" in message


def test_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    status, _, message = bench(SMALL, taken, capsys)
    assert status == 2
    assert f"The folder {taken} cannot be written" in message


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "swapopt bench: interrupted"),
        (torch.OutOfMemoryError("8 GiB"), 2, "try a smaller --workload. (8 GiB)"),
    ],
)
def test_what_ends_a_benchmark_is_told_in_one_line(
    error: BaseException,
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "_bench", run)
    found, _, text = bench(["bench"], tmp_path, capsys)
    assert found == status
    assert message in text
    assert len(text.splitlines()) == 1


def test_help_says_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    output = capsys.readouterr().out
    for expected in ("--workload", "--training-ms", "80.43", "floor  ", "optimum  ", "(16)"):
        assert expected in output
    assert max(map(len, output.splitlines())) <= 100
    # The names stand in both, so that the help needs no torch optimizers.
    from swapopt_torch.bench.contenders import OPTIMIZERS

    assert tuple(OPTIMIZERS) == command._OPTIMIZER_NAMES
