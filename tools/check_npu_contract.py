"""Show that torch_npu has everything swapopt-torch asks of an Ascend device.

python tools/check_npu_contract.py [VERSION ...]

Nothing of torch_npu can be imported without Ascend's CANN, so this reads: our own sources for what
they ask, and a torch_npu wheel (downloaded with pip, without dependencies) for what there is. A
name that our sources begin to use fails here until it stands in the contract below, and one they
no longer use fails until it is taken out. Prints a line per thing shown and a count at the end.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from device_module_uses import DEVICE_MODULE, Use, called_names, find_uses, subscripts_of
from npu_wheel import (
    GUARD_HEADER,
    HOOKS_HEADER,
    STREAM_HEADER,
    NpuWheel,
    download,
    method_signature,
    signature,
)

SOURCES: Final = Path(__file__).resolve().parents[1] / "packages/swapopt-torch/src/swapopt_torch"
VERSION: Final = "2.10.0.post7"

# What we ask of torch.npu, and what for.
DEVICE_MODULE_NAMES: Final = {
    "current_stream": "updates and allocations run on the caller's stream",
    "current_device": "what is current is current again after a failure",
    "set_device": "what is current is current again after a failure",
    "set_stream": "what is current is current again after a failure",
    "synchronize": "before pinned memory is given back; in the demo",
    "device": "to ask about the stream of a device that is not current",
    "is_current_stream_capturing": "a step under graph capture is refused",
    "device_count": "the demo's choice of a device",
    "get_device_name": "what the demo calls the device",
    "memory_stats": "device memory in the demo's table",
    "reset_peak_memory_stats": "device memory in the demo's table",
    "empty_cache": "between the demo's runs",
}
# What we ask for with hasattr, and the version that brought it.
NEWER_NAMES: Final = {"npurt": "2.10.0.post7"}
# What only the virtual accelerator is asked for.
VIRTUAL_NAMES: Final = frozenset({"now", "host_register", "host_unregister", "host_mapping_flags"})
# What we ask of the result of a function of torch.npu; these live in the compiled library.
RESULT_NAMES: Final = {"npurt": frozenset({"npuHostRegister", "npuHostUnregister"})}
STREAM_METHODS: Final = ("query", "record_event", "synchronize", "wait_event", "wait_stream")


class Native(NamedTuple):
    """A call of torch's own that ends in torch_npu's C++.

    Attributes:
        call: how our sources spell it.
        methods: the methods of torch_npu's device guard behind it.
        hooks: the methods of its hooks behind it.
        kernels: its kernels behind it.
    """

    call: str
    methods: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


NATIVE_CALLS: Final = (
    Native("torch.Stream", methods=("getNewStream", "exchangeStream", "exchangeDevice")),
    Native("torch.Event", methods=("destroyEvent",)),
    Native(".record", methods=("record",)),
    Native(".wait_event", methods=("block",)),
    Native(".synchronize", methods=("synchronizeStream", "synchronizeEvent", "synchronizeDevice")),
    Native(".elapsed_time", methods=("elapsedTime",)),
    Native("torch.accelerator.set_device_index", methods=("setDevice",)),
    Native("torch.accelerator.is_available", hooks=("isAvailable",)),
    Native(".record_stream", methods=("recordDataPtrOnStream",), kernels=("record_stream",)),
    Native(".resize_", hooks=("resizePrivateUse1Bytes",)),
    Native(".set_", kernels=("set_.source_Storage_storage_offset",)),
    Native(".copy_", kernels=("copy_",)),
    Native("torch.empty", kernels=("empty.memory_format",)),
    Native("torch.zeros", kernels=("zero_", "_pin_memory", "is_pinned")),
    Native("torch.zeros_like", kernels=("empty_like", "zero_")),
    Native("torch.full", kernels=("full",)),
    Native("torch._foreach_add_", kernels=("_foreach_add_.Scalar",)),
    Native("torch._foreach_sub_", kernels=("_foreach_sub_.Scalar", "_foreach_sub_.List")),
    Native("torch._fused_adamw_", kernels=("_fused_adamw_",)),
)
# Calls of torch that ask nothing of a device.
HOST_CALLS: Final = frozenset(
    {
        "torch.OutOfMemoryError",
        "torch.autograd.graph.increment_version",
        "torch.cuda.cudart",
        "torch.device",
        "torch.empty_like",  # on meta
        "torch.frombuffer",
        "torch.get_default_dtype",
        "torch.get_device_module",
        "torch.inference_mode",
        "torch.no_grad",
        "torch.optim.Optimizer.profile_hook_step",
        "torch.tensor",
    }
)
# What is no part of training: it may call of torch what it likes.
EXTRAS: Final = ("bench", "demo", "cli.py", "command_line.py", "__main__.py")
# What no NPU ever runs.
VIRTUAL_ONLY: Final = ("virtual", "plan")
# What torch.optim.AdamW(fused=True) and ours call, and with what.
FUSED_KERNEL: Final = "_fused_adamw_"
FUSED_ARGUMENTS: Final = (
    *("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
    *("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"),
    *("grad_scale", "found_inf"),
)


class Shown(NamedTuple):
    """One thing that was looked at; ``fault`` is empty where all is well."""

    what: str
    fault: str = ""


class OurSources:
    """What swapopt-torch asks, read from its sources; what no NPU runs is left out."""

    def __init__(self, root: Path) -> None:
        texts = {
            str(path.relative_to(root)): path.read_text(encoding="utf-8")
            for path in sorted(root.rglob("*.py"))
            if path.relative_to(root).parts[0] not in VIRTUAL_ONLY
        }
        results = frozenset(RESULT_NAMES)
        self.uses = [u for file, text in texts.items() for u in find_uses(text, file, results)]
        self.calls = {name for text in texts.values() for name in called_names(text)}
        self.training_calls = {
            (name, file)
            for file, text in texts.items()
            if not file.startswith(EXTRAS)
            for name in called_names(text)
            if name.startswith("torch.")
        }
        self.statistics = {
            key for text in texts.values() for key in subscripts_of(text, "memory_stats")
        }


def check_contract(ours: OurSources) -> Iterator[Shown]:
    """Compare what our sources ask with what the contract lists."""
    for use in ours.uses:
        if use.name is None:
            yield Shown(
                f"{use.where} keeps its device module to itself",
                "a device module goes where this check cannot follow; ask it by name, in the "
                "function or class that called torch.get_device_module",
            )
    listed = {*DEVICE_MODULE_NAMES, *NEWER_NAMES, *VIRTUAL_NAMES}
    listed_results = {name for names in RESULT_NAMES.values() for name in names}
    for known, used in (
        (listed, {use.name for use in ours.uses if use.root == DEVICE_MODULE and use.name}),
        (listed_results, {use.name for use in ours.uses if use.root != DEVICE_MODULE and use.name}),
    ):
        places = {use.name: use.where for use in ours.uses}
        for name in sorted(used - known):
            yield Shown(f"{name} is in the contract", f"{places[name]} uses it: add it")
        for name in sorted(known - used):
            yield Shown(f"{name} is in use", "our sources use it no longer: take it out")
    for native in NATIVE_CALLS:
        used_still = "" if native.call in ours.calls else "our sources call it no longer"
        yield Shown(f"{native.call} is in use", used_still)
    known_calls = HOST_CALLS | {native.call for native in NATIVE_CALLS}
    for call, file in sorted(ours.training_calls):
        unknown = (
            ""
            if call in known_calls
            else ("add it to NATIVE_CALLS with what it needs of torch_npu, or to HOST_CALLS")
        )
        yield Shown(f"{call} in {file} is in the contract", unknown)


def check_device_module(ours: OurSources, wheel: NpuWheel, version: str) -> Iterator[Shown]:
    """Look up every name we ask of torch.npu, and every call's arguments."""
    registered = "" if wheel.registers_device_module() else "no such registration"
    yield Shown("torch.get_device_module finds torch_npu.npu for npu", registered)
    for name, why in DEVICE_MODULE_NAMES.items():
        yield Shown(f"torch.npu.{name}: {why}", "" if wheel.definition(name) else "does not exist")
    for name, since in NEWER_NAMES.items():
        exists = wheel.definition(name) is not None
        if _parts(version) < _parts(since):
            yield Shown(f"torch.npu.{name} came with {since}; we ask before we use it")
        else:
            yield Shown(f"torch.npu.{name}, since {since}", "" if exists else "does not exist")
    for use in ours.uses:
        if use.name in DEVICE_MODULE_NAMES and use.positional is not None:
            yield _shown_call(use, wheel)
    for key in sorted(ours.statistics):
        documented = "" if key in wheel.statistics() else "is not among the documented keys"
        yield Shown(f"memory_stats()[{key!r}]", documented)
    if all(_parts(version) >= _parts(NEWER_NAMES[name]) for name in RESULT_NAMES):
        for function, names in RESULT_NAMES.items():
            found = wheel.names_in_library(tuple(names))
            for name in sorted(names):
                missing = "" if name in found else "is not in the library"
                yield Shown(f"torch.npu.{function}().{name}", missing)


def _shown_call(use: Use, wheel: NpuWheel) -> Shown:
    arguments = [f"{use.positional} positional", *use.keywords]
    what = f"{use.where} calls torch.npu.{use.name} with {', '.join(arguments)}"
    definition = wheel.definition(str(use.name))
    takes = signature(definition) if definition is not None else None
    if takes is None:
        return Shown(what, "its signature cannot be read")
    return Shown(what, takes.refusal(use.positional or 0, use.keywords) or "")


def check_streams(ours: OurSources, wheel: NpuWheel) -> Iterator[Shown]:
    """Look up what we ask of the stream that torch.npu.current_stream returns."""
    is_stream = re.search(r"struct THNPStream : (public )?THPStream\b", wheel.text(STREAM_HEADER))
    yield Shown("torch.npu.Stream is a torch.Stream", "" if is_stream else "it is not")
    for name in STREAM_METHODS:
        if f".{name}" in ours.calls:
            method = wheel.method("Stream", name)
            given = 1 if name.startswith("wait") else 0
            fault = method_signature(method).refusal(given, ()) if method else "does not exist"
            yield Shown(f"torch.npu.Stream.{name}", fault or "")


def check_native(wheel: NpuWheel) -> Iterator[Shown]:
    """Look up the C++ behind torch's own calls."""
    for native in NATIVE_CALLS:
        for header, methods in ((GUARD_HEADER, native.methods), (HOOKS_HEADER, native.hooks)):
            for method in methods:
                fault = "" if wheel.declares(method, header) else f"{header} has no such method"
                yield Shown(f"{native.call} -> {method}", fault)
        for kernel in native.kernels:
            fault = "" if wheel.kernel_arguments(kernel) is not None else "has no kernel"
            yield Shown(f"{native.call} -> aten::{kernel}", fault)
    arguments = wheel.kernel_arguments(FUSED_KERNEL)
    fault = "" if arguments == FUSED_ARGUMENTS else f"takes {arguments}, not {FUSED_ARGUMENTS}"
    yield Shown(f"fused AdamW -> aten::{FUSED_KERNEL} and its arguments", fault)


def check(wheel: NpuWheel, version: str, sources: Path = SOURCES) -> list[Shown]:
    """Run all checks of one wheel."""
    ours = OurSources(sources)
    return [
        *check_contract(ours),
        *check_device_module(ours, wheel, version),
        *check_streams(ours, wheel),
        *check_native(wheel),
    ]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> int:
    """Check the versions asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", default=[VERSION], help=f"default: {VERSION}")
    versions: list[str] = parser.parse_args().versions
    shown: list[Shown] = []
    with tempfile.TemporaryDirectory() as folder:
        for version in versions:
            wheel = NpuWheel(download(version, Path(folder)))
            print(f"{wheel.name}:")
            found = check(wheel, version)
            for what, fault in found:
                print(f"FAILED: {what}: {fault}" if fault else f"ok: {what}")
            shown += found
    failed = sum(bool(one.fault) for one in shown)
    print(f"{len(shown) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
