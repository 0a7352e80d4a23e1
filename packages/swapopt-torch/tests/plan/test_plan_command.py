"""``python -m swapopt_torch plan``: options, tables, files, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swapopt_torch import cli, command_line

SMALL = ["--params", "3e6", "--shards", "2", "--ranks-per-host", "8"]


def run_plan(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, whose device can be dry."""
    command = [sys.executable, "-m", "swapopt_torch", "plan", *SMALL, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as error:
        assert isinstance(error.code, int)
        status = error.code
    assert status == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    done = run_plan("--profile", "ascend-910b", "--swap-times", "5", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["chosen_swap_times"] == 5
    assert content["profile"] == "ascend-910b"
    assert content["case"]["params"] == 3_000_000
    chosen = next(found for found in content["swapped"] if found["swap_times"] == 5)
    assert content["host_bytes_all_ranks"] == 8 * chosen["host_bytes"] > 0
    assert content["native"]["device_peak_bytes"] > chosen["device_idle_bytes"]
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
    for expected in (
        "3.0 million parameters",
        "25.0 GB/s to each of 8 ranks",
        f"{chosen['step_ns'] / 1e6:.3f} ms",
        f"{content['native']['step_ns'] / 1e6:.3f} ms",
        f"{chosen['device_peak_bytes'] / 2**20:,.2f} MiB",
        "chosen",
    ):
        assert expected in done.stdout, done.stdout
    assert max(map(len, done.stdout.splitlines()[3:-1])) <= 80


def test_a_budget_chooses_the_fastest_that_fits(tmp_path: Path) -> None:
    done = run_plan("--device-memory-budget", "4MiB", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "plan.json").read_text())
    fitting = [found for found in content["swapped"] if found["staging_bytes"] <= 4 * 2**20]
    assert 0 < len(fitting) < len(content["swapped"])
    chosen = next(found for found in fitting if found["swap_times"] == content["chosen_swap_times"])
    assert chosen["step_ns"] == min(found["step_ns"] for found in fitting)
    assert content["least_swap_times"] == min(found["swap_times"] for found in fitting)
    assert "over budget" in done.stdout
    assert "is the fewest that keeps" in done.stdout


def test_a_budget_that_no_swap_times_keeps(tmp_path: Path) -> None:
    done = run_plan("--device-memory-budget", "4KiB", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "swapopt plan: no swap_times keeps" in done.stderr
    assert "below 4,096 bytes" in done.stderr


def test_a_slow_host_slows_the_step(tmp_path: Path) -> None:
    steps = {}
    for bandwidth in ("400GB", "40e9"):
        done = run_plan("--host-bandwidth", bandwidth, "--output", str(tmp_path))
        assert done.returncode == 0, done.stderr
        content = json.loads((tmp_path / "plan.json").read_text())
        steps[bandwidth] = content["swapped"][0]["step_ns"]
        assert content["link"]["h2d_bytes_per_second"] == content["host"]["bytes_per_second"] / 16
        assert "this limits the link" in done.stdout
    assert steps["40e9"] > 5 * steps["400GB"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: --params"),
        (["--params", "many"], "expected a number like 70e9, got 'many'"),
        (["--params", "nan"], "expected a number like 70e9, got 'nan'"),
        (["--params", "inf"], "expected a number like 70e9, got 'inf'"),
        (["--params", "1e4"], "at least 100,000 params, found 10,000"),
        (["--params", "1e9", "--shards", "0"], "at least 1, got '0'"),
        (["--params", "1e9", "--profile", "abacus"], "invalid choice: 'abacus'"),
        (["--params", "1e9", "--host-bandwidth", "0"], "like 2GiB, 2e9 or 400GB, got '0'"),
        (["--params", "1e9", "--device-memory-budget", "1.2.3"], "like 2GiB, 2e9 or 400GB"),
        (
            ["--params", "1e9", "--swap-times", "2", "--device-memory-budget", "1GiB"],
            "not allowed with argument",
        ),
        (["--params", "1e9", "--packed", "--per-tensor"], "not allowed with argument"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(arguments, capsys)


def test_a_process_with_a_wet_device_cannot_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from swapopt_torch import virtual

    virtual.enable("h200", device_count=2)
    message = refusal([*SMALL, "--output", str(tmp_path)], capsys)
    assert "fixed by the first enable()" in message


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "find_spec", {"rich": None, "matplotlib": 1}.__getitem__)
    assert refusal(SMALL, capsys) == (
        "swapopt plan: the plan needs rich: pip install rich (or install swapopt-torch[cli])"
    )


def test_a_folder_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = tmp_path / "plan"
    taken.write_text("not a folder")
    assert f"The folder {taken} cannot be written" in refusal(
        [*SMALL, "--output", str(taken)], capsys
    )


def test_help_names_options_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    output = capsys.readouterr().out
    options = "--params --shards --shape --optimizer --dtype --profile --ranks-per-host"
    more = "--host-bandwidth --swap-times --device-memory-budget --packed --per-tensor --output"
    for expected in (*options.split(), *more.split(), "FSDP2", "in both directions"):
        assert expected in output
    assert max(map(len, output.splitlines())) <= 100
