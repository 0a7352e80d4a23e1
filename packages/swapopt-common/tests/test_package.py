"""The package as a whole: its public names, what it imports, how large it is."""

import subprocess
import sys
from pathlib import Path

import swapopt_common

SOURCES = Path(swapopt_common.__file__).parent

LIST_IMPORTS = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import swapopt_common
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_public_names() -> None:
    assert swapopt_common.__all__ == [
        "STATE_KEYS",
        "DeviceRoom",
        "HostMemoryError",
        "OptimizerSwapAdapter",
        "SlotState",
        "SwapConfigError",
        "SwapOptimizerConfig",
        "SwapSlot",
        "SwapStepError",
        "UpdateUnit",
        "first_fit",
        "frugal_swap_times",
        "move_slots",
        "partition",
        "window_of",
    ]
    assert all(hasattr(swapopt_common, name) for name in swapopt_common.__all__)


def test_imports_the_standard_library_only() -> None:
    # -I and -S: neither the user's nor the site's packages can be found.
    command = [sys.executable, "-I", "-S", "-c", LIST_IMPORTS, str(SOURCES.parent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    foreign = set(run.stdout.split()) - set(sys.stdlib_module_names)
    assert foreign == {"swapopt_common"}


def test_stays_small() -> None:
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCES.rglob("*.py")
    }
    assert sum(lines.values()) < 650, lines


def test_says_that_it_is_typed() -> None:
    assert (SOURCES / "py.typed").is_file()


def test_errors_carry_what_they_promise() -> None:
    error = swapopt_common.SwapStepError("batch 2 failed", (0, 1), 2)
    assert str(error) == "batch 2 failed"
    assert error.updated_batches == (0, 1)
    assert error.interrupted_batch == 2
    assert isinstance(error, RuntimeError)
    assert issubclass(swapopt_common.HostMemoryError, RuntimeError)
