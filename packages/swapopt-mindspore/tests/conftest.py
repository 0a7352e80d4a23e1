"""One thread and few log lines, for every test of this package; both movements for many."""

import os

import pytest

# Read when mindspore is imported: 3 leaves out its warnings of deprecated calls inside itself.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(params=[True, False], ids=["packed", "per_tensor"])
def packed(request: pytest.FixtureRequest) -> bool:
    """Whether states move through the staging arenas: a test that asks for this runs twice."""
    return bool(request.param)


@pytest.fixture
def no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MindFormers' fused operator, for which a CPU has no kernel, do nothing."""
    import mindformers_adamw

    home = mindformers_adamw.home()
    monkeypatch.setattr(home.gen, "AdamW", lambda: lambda *operands: None)


@pytest.fixture(params=[2, 4])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batches may be on the device at a time: small states take two by themselves."""
    monkeypatch.setattr(
        "swapopt_mindspore.division.window_of", lambda total_bytes, swap_times: request.param
    )
    return int(request.param)
