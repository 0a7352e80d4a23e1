"""The check of torch_npu's wheel: what it finds in sources, what it reads from a wheel."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from check_npu_contract import (  # noqa: E402
    DEVICE_MODULE_NAMES,
    SOURCES,
    OurSources,
    Shown,
    check_contract,
    check_device_module,
    check_native,
    check_streams,
)
from device_module_uses import DEVICE_MODULE, Use, find_uses  # noqa: E402
from npu_wheel import (  # noqa: E402
    DEVICE_MODULE_FILE,
    GUARD_HEADER,
    HOOKS_HEADER,
    KERNEL_LISTS,
    LIBRARY,
    STREAM_HEADER,
    NpuWheel,
    signature,
)

FUNCTIONS = """
from . import graphs
from .memory import *
from .streams import Stream, Event as Occasion

def current_stream(device=None): ...
def wide(first, second, *, flag): ...
class device:
    def __init__(self, device): ...
"""
MEMORY = '''
__all__ = ["memory_stats"]

def memory_stats(device=None):
    """Figures.

    - ``"active_bytes.{all,large_pool}.{current,peak}"``: bytes.
    - ``"num_ooms"``: a count.
    """

def not_public(): ...
'''
STREAMS = """
class Stream:
    def wait_event(self, event): ...
class Event: ...
"""
REGISTRATION = """
import torch, torch_npu
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", torch_npu.npu)
"""
KERNELS = """
supported:
  - copy_
  - func: record_stream
    op_api: True
- func: _fused_(Tensor(a!)[] self, *, float lr, Tensor? found_inf=None) -> ()
"""
GUARD = """
struct NPUGuardImpl final : public c10::impl::DeviceGuardImplInterface {
    c10::Stream getNewStream(c10::Device d, int priority = 0) const override;
    void record(void **event, const c10::Stream &stream,
                const c10::EventFlag flag) const override;
"""


@pytest.fixture
def wheel(tmp_path: Path) -> NpuWheel:
    path = tmp_path / "torch_npu-0.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(DEVICE_MODULE_FILE, FUNCTIONS)
        archive.writestr("torch_npu/npu/memory.py", MEMORY)
        archive.writestr("torch_npu/npu/streams.py", STREAMS)
        archive.writestr("torch_npu/npu/graphs.py", "")
        archive.writestr("torch_npu/backend.py", REGISTRATION)
        archive.writestr(KERNEL_LISTS[0], KERNELS)
        archive.writestr(KERNEL_LISTS[1], "")
        archive.writestr(GUARD_HEADER, GUARD)
        archive.writestr(HOOKS_HEADER, "")
        archive.writestr(STREAM_HEADER, "struct THNPStream : THPStream {\n")
        archive.writestr(LIBRARY, b"\0npuHostRegister\0_npuHostUnregister\0")
    return NpuWheel(path)


def faults(shown: list[Shown]) -> dict[str, str]:
    return {what: fault for what, fault in shown if fault}


def uses(source: str) -> list[Use]:
    return find_uses(source, "f.py", frozenset({"npurt"}))


def test_the_contract_lists_what_our_sources_use_and_no_more() -> None:
    assert faults(list(check_contract(OurSources(SOURCES)))) == {}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.get_device_module(d).brand_new(1)", "brand_new is in the contract"),
        ("torch.npu.brand_new", "brand_new is in the contract"),
        ("torch._foreach_mul_(d, 1)", "torch._foreach_mul_ in new.py is in the contract"),
        ("print(torch.get_device_module(d))", "new.py:3 keeps its device module to itself"),
    ],
)
def test_a_new_use_fails(tmp_path: Path, line: str, what: str) -> None:
    shutil.copytree(SOURCES, tmp_path / "src")
    (tmp_path / "src" / "new.py").write_text(f"import torch\ndef f(d):\n    {line}\n")
    assert list(faults(list(check_contract(OurSources(tmp_path / "src"))))) == [what]


def test_a_name_that_nobody_uses_any_more_fails(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    found = faults(list(check_contract(OurSources(tmp_path))))
    assert {f"{name} is in use" for name in DEVICE_MODULE_NAMES} <= set(found)
    assert "torch.Stream is in use" in found


def test_uses_are_followed_through_names() -> None:
    source = (
        "module = torch.get_device_module(d)\n"
        "module.synchronize(d)\n"
        "self._m = module\n"
        "self._m.memory_stats(device=d)\n"
        "hasattr(module, 'npurt')\n"
        "runtime = module.npurt()\n"
        "runtime.pin(1, 2)\n"
        "callback = module.later\n"
    )
    assert set(uses(source)) == {
        Use(DEVICE_MODULE, "synchronize", "f.py:2", 1),
        Use(DEVICE_MODULE, "memory_stats", "f.py:4", 0, ("device",)),
        Use(DEVICE_MODULE, "npurt", "f.py:5", asked_first=True),
        Use(DEVICE_MODULE, "npurt", "f.py:6", 0),
        Use("npurt", "pin", "f.py:7", 2),
        Use(DEVICE_MODULE, "later", "f.py:8"),
    }


def test_names_are_found_through_imports(wheel: NpuWheel) -> None:
    for name in ("current_stream", "memory_stats", "Stream", "Occasion", "device"):
        assert wheel.definition(name) is not None, name
    for name in ("Event", "not_public", "graphs"):
        assert wheel.definition(name) is None, name


@pytest.mark.parametrize(
    ("name", "positional", "keywords", "refusal"),
    [
        ("current_stream", 1, (), None),
        ("current_stream", 0, ("device",), None),
        ("current_stream", 2, (), "takes 1 positional arguments, not 2"),
        ("current_stream", 1, ("device",), "knows no device"),
        ("wide", 1, ("flag",), "needs second"),
        ("wide", 1, ("second", "flag"), None),
        ("device", 0, (), "needs device"),
        ("device", 1, (), None),
    ],
)
def test_calls_fit_signatures(
    wheel: NpuWheel, name: str, positional: int, keywords: tuple[str, ...], refusal: str | None
) -> None:
    definition = wheel.definition(name)
    assert definition is not None
    takes = signature(definition)
    assert takes is not None
    assert takes.refusal(positional, keywords) == refusal


def test_the_compiled_half_is_read_from_headers_lists_and_strings(wheel: NpuWheel) -> None:
    assert wheel.statistics() == {
        "active_bytes.all.current",
        "active_bytes.all.peak",
        "active_bytes.large_pool.current",
        "active_bytes.large_pool.peak",
        "num_ooms",
    }
    declared = [name for name in ("getNewStream", "record", "block", "Stream") if
                wheel.declares(name, GUARD_HEADER)]  # fmt: skip
    assert declared == ["getNewStream", "record"]
    assert wheel.kernel_arguments("copy_") == ()
    assert wheel.kernel_arguments("record_stream") == ()
    assert wheel.kernel_arguments("_fused_") == ("self", "lr", "found_inf")
    assert wheel.kernel_arguments("_fused_.tensor_lr") is None
    names = ("npuHostRegister", "npuHostUnregister")
    assert wheel.names_in_library(names) == {"npuHostRegister"}
    assert wheel.registers_device_module()


def test_what_a_wheel_lacks_is_said(wheel: NpuWheel) -> None:
    ours = OurSources(SOURCES)
    module = faults(list(check_device_module(ours, wheel, "2.10.0")))
    assert module["torch.npu.synchronize: before pinned memory is given back; in the demo"] == (
        "does not exist"
    )
    streams = faults(list(check_streams(ours, wheel)))
    assert streams == {"torch.npu.Stream.synchronize": "does not exist"}
    native = faults(list(check_native(wheel)))
    assert native[".resize_ -> resizePrivateUse1Bytes"].endswith("has no such method")
    assert native[".set_ -> aten::set_.source_Storage_storage_offset"] == "has no kernel"
    assert "torch.Stream -> getNewStream" not in native
