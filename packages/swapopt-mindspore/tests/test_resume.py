"""Training that goes on in another process (C3)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mindspore as ms

import resuming
from training import assert_same_bytes, copy_of


def test_c3_update_59_in_a_new_process(tmp_path: Path) -> None:
    """58 steps, a file, a new process, one step: equal to 59 native steps in one go.

    Learning rates, weight decay and bias corrections differ in every step.
    """
    expected = {}
    for name in resuming.CASES:
        swapped = resuming.Training(name, swapped=True)
        swapped.proceed(range(resuming.STEPS))
        swapped.save(str(tmp_path / f"{name}-{resuming.STEPS}.ckpt"))
        native = resuming.Training(name, swapped=False)
        native.proceed(range(resuming.STEPS + 1))
        expected[name] = native.optimizer.parameters_dict()
    program = [sys.executable, resuming.__file__, str(tmp_path)]
    finished = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for name, values in expected.items():
        found = ms.load_checkpoint(str(tmp_path / f"{name}-{resuming.STEPS + 1}.ckpt"))
        # A saved parameter is called by its own name, not by its place in the cell.
        by_name = {param.name: param for param in values.values()}
        assert set(found) == set(by_name)
        for key, value in by_name.items():
            assert_same_bytes(copy_of(found[key]), copy_of(value), f"{name}: {key}")
