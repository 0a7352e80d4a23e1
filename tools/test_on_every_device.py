"""Run the tests of swapopt-torch on the virtual accelerator and on the accelerator torch finds.

One process per device type: the virtual accelerator and torch_npu share one door into torch.
Arguments are passed on to pytest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "packages" / "swapopt-torch" / "tests"
# These are about the virtual accelerator itself, or choose their device by themselves.
ONLY_VIRTUAL = ("virtual", "bench", "demo")


def real_device_type() -> str | None:
    """Return the type of the accelerator torch finds, asked in a process of its own."""
    code = (
        "import torch; found = torch.accelerator.is_available(); "
        "print(torch.accelerator.current_accelerator().type if found else '')"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return answer.stdout.strip() or None


def run_tests(device_type: str, arguments: list[str]) -> int:
    """Run pytest for one device type; return its exit status."""
    if device_type != "virtual":
        arguments = [*arguments, *(f"--ignore={TESTS / name}" for name in ONLY_VIRTUAL)]
    command = [sys.executable, "-m", "pytest", f"--device={device_type}", *arguments]
    print(f"tests on {device_type}", flush=True)
    return subprocess.run(command, check=False).returncode


def main(arguments: list[str]) -> int:
    """Test on every device type there is; return the worst exit status."""
    found = real_device_type()
    device_types = ["virtual", *([found] if found else [])]
    return max(run_tests(device_type, arguments) for device_type in device_types)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
