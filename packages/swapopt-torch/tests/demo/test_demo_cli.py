"""The command line: help, versions, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import swapopt_torch
from swapopt_torch import cli, command_line
from swapopt_torch.demo import accelerator
from swapopt_torch.demo.settings import MODEL_SIZES, OPTIMIZERS, ModelSize, parse_model_size


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that cannot; return what it says on standard error."""
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        assert isinstance(error.code, int)
        status = error.code
    assert status == 2
    return " ".join(capsys.readouterr().err.split())


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    output = capsys.readouterr().out
    assert "usage: python -m swapopt_torch" in output
    assert "demo" in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"swapopt-torch {swapopt_torch.__version__}\n"


def test_help_of_the_demo_names_options_defaults_and_definitions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    options = "--steps --model-size --optimizer --swap-times --seed --device --profile --output"
    for expected in (*options.split(), *MODEL_SIZES, *OPTIMIZERS, "(16)", "(swapopt-report)"):
        assert expected in output
    assert "1 - (optimizer step - native optimizer step) / transfer time" in output
    assert max(map(len, output.splitlines())) <= 100


def test_as_a_module_it_imports_neither_rich_nor_matplotlib() -> None:
    code = (
        "import sys, runpy; sys.argv = ['swapopt_torch']\n"
        "try: runpy.run_module('swapopt_torch', run_name='__main__')\n"
        "except SystemExit as error: assert error.code == 0\n"
        "assert not {'rich', 'matplotlib', 'swapopt_torch.virtual'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m swapopt_torch" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "4"], "at least 5, got 4"),
        (["--steps", "many"], "at least 1, got 'many'"),
        (["--swap-times", "0"], "at least 1, got '0'"),
        (["--model-size", "huge"], "'huge' is neither a size (tiny, small, medium)"),
        (["--model-size", "width=100,heads=3"], "width must be a multiple of heads"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--device", "cpu"], "the demo runs on auto, virtual, cuda, npu, xpu"),
        (["--device", "nonsense"], "the demo runs on auto, virtual, cuda, npu, xpu"),
        (["--device", "cuda:one"], "the demo runs on auto, virtual, cuda, npu, xpu"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert expected in fail(["demo", "--output", str(tmp_path), *arguments], capsys)


def test_unknown_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["demo", "--device", "virtual", "--profile", "abacus", "--output", str(tmp_path)]
    message = fail(arguments, capsys)
    assert "--profile abacus: the profiles are ascend-910b, h200, half-duplex" in message


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"rich": None, "matplotlib": object()}
    monkeypatch.setattr(command_line, "find_spec", found.__getitem__)
    message = fail(["demo"], capsys)
    assert message == (
        "swapopt demo: the demo needs rich: pip install rich (or install swapopt-torch[cli])"
    )


def test_a_missing_compiler_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from swapopt_torch import virtual

    def enable(*_: object, **__: object) -> None:
        raise virtual.VirtualUnavailableError("no C++ compiler; install g++")

    monkeypatch.setattr(virtual, "enable", enable)
    message = fail(["demo", "--device", "virtual", "--output", str(tmp_path)], capsys)
    assert message == "swapopt demo: no C++ compiler; install g++"


def test_a_card_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accelerator, "_find_card", lambda: None)
    message = fail(["demo", "--device", "cuda:1", "--output", str(tmp_path)], capsys)
    assert "--device cuda:1: torch finds no CUDA, NPU or XPU device here" in message


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_an_npu_without_torch_npu(
    device: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(accelerator, "_find_card", lambda: None)
    arguments = ["demo", "--device", device, "--output", str(tmp_path)]
    monkeypatch.setattr(accelerator, "find_spec", {"torch_npu": None}.__getitem__)
    message = fail(arguments, capsys)
    assert f"--device {device}: torch_npu, which brings NPU devices to torch, is not" in message
    assert "the demo runs on" not in message
    monkeypatch.setattr(accelerator, "find_spec", {"torch_npu": object()}.__getitem__)
    message = fail(arguments, capsys)
    assert f"--device {device}: torch finds no CUDA, NPU or XPU device here" in message


def test_a_profile_on_a_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accelerator, "_find_card", lambda: torch.device("cuda", 0))
    message = fail(["demo", "--profile", "h200", "--output", str(tmp_path)], capsys)
    assert "Drop --profile, or add --device virtual" in message


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    # In a process of its own: in this one the virtual accelerator may be loaded already.
    taken = tmp_path / "cache"
    taken.write_text("not a folder")
    command = [sys.executable, "-m", "swapopt_torch", "demo", "--device", "virtual"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "report")],
        env={**os.environ, "SWAPOPT_VIRTUAL_CACHE": str(taken)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (message,) = done.stderr.splitlines()
    assert f"the folder {taken} (SWAPOPT_VIRTUAL_CACHE), which cannot be written" in message


def test_a_report_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    taken = tmp_path / "report"
    taken.write_text("not a folder")
    message = fail(["demo", "--output", str(taken)], capsys)
    assert f"The report folder {taken} cannot be written" in message
    assert taken.read_text() == "not a folder"


def test_model_size_by_dimensions() -> None:
    small = MODEL_SIZES["small"]
    size = parse_model_size("layers=6,heads=4")
    assert size == ModelSize(6, small.width, 4, small.context, small.batch)
    assert parse_model_size(str(size)) == size


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "swapopt demo: interrupted"),
        (torch.OutOfMemoryError("8 GiB"), 2, "ran out of memory; try a smaller --model-size. (8 G"),
    ],
)
def test_what_ends_a_demo_is_told_in_one_line(
    error: BaseException,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_demo(*_: object) -> bool:
        raise error

    monkeypatch.setattr("swapopt_torch.demo.main.run_demo", run_demo)
    assert cli.main(["demo"]) == status
    found = capsys.readouterr().err
    assert message in found
    assert len(found.splitlines()) == 1
