"""The command line: help, versions, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import swapopt_mindspore
from swapopt_mindspore import cli
from swapopt_mindspore.demo import mindformers_adamw
from swapopt_mindspore.demo.settings import MODEL_SIZES, OPTIMIZERS, ModelSize, parse_model_size
from swapopt_mindspore.emulated import PROFILES


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
    assert "usage: python -m swapopt_mindspore" in output
    assert "demo" in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"swapopt-mindspore {swapopt_mindspore.__version__}\n"


def test_help_of_the_demo_names_options_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    options = [f"--{name}" for name in ("steps", "model-size", "optimizer", "swap-times", "seed")]
    options += ["--profile", "--output"]
    defaults = ("(16)", "(ascend-910b)", "(swapopt-report-mindspore)")
    for expected in (*options, *MODEL_SIZES, *OPTIMIZERS, *PROFILES, *defaults):
        assert expected in output
    assert max(map(len, output.splitlines())) <= 100


def test_as_a_module_it_imports_neither_rich_nor_matplotlib() -> None:
    code = (
        "import sys, runpy; sys.argv = ['swapopt_mindspore']\n"
        "try: runpy.run_module('swapopt_mindspore', run_name='__main__')\n"
        "except SystemExit as error: assert error.code == 0\n"
        "assert not {'rich', 'matplotlib', 'mindformers', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m swapopt_mindspore" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "2"], "at least 3, got 2"),
        (["--steps", "many"], "at least 1, got 'many'"),
        (["--swap-times", "0"], "at least 1, got '0'"),
        (["--model-size", "huge"], "'huge' is neither a size (tiny, small, medium)"),
        (["--model-size", "width=100,heads=3"], "width must be a multiple of heads"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--profile", "abacus"], "invalid choice: 'abacus'"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert expected in fail(["demo", "--output", str(tmp_path), *arguments], capsys)


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"rich": None, "matplotlib": object()}
    monkeypatch.setattr(cli, "find_spec", found.__getitem__)
    assert fail(["demo"], capsys) == (
        "swapopt demo: the demo needs rich: pip install rich (or install swapopt-mindspore[cli])"
    )


def test_missing_mindformers_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mindformers_adamw, "is_installed", lambda: False)
    message = fail(["demo", "--optimizer", "mindformers-adamw", "--output", str(tmp_path)], capsys)
    assert "needs MindFormers: pip install --no-deps mindformers==2.0.0" in message


def test_a_report_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    taken = tmp_path / "report"
    taken.write_text("not a folder")
    message = fail(["demo", "--output", str(taken)], capsys)
    assert f"The report folder {taken} cannot be written" in message
    assert taken.read_text() == "not a folder"


def test_an_interruption_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_demo(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("swapopt_mindspore.demo.main.run_demo", run_demo)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "swapopt demo: interrupted\n"


def test_model_size_by_dimensions() -> None:
    small = MODEL_SIZES["small"]
    size = parse_model_size("layers=6,heads=2")
    assert size == ModelSize(6, small.width, 2, small.context, small.batch)
    assert parse_model_size(str(size)) == size
