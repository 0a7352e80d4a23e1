"""Where device types differ, and nowhere else; docs/ascend.md says what is known of Ascend."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

logger = logging.getLogger("swapopt_torch")

# cudaHostRegisterPortable: pinned for every context of the process.
_CUDA_PORTABLE = 1
# ACL_HOST_REG_MAPPED: pinned and known to the copy engine. Registered with ACL_HOST_REG_PINNED
# alone, large buffers are copied at less than half the speed.
_ASCEND_MAPPED = 0x2
# Up to Linux 5.10, CANN may register memory from its own allocator only.
_ASCEND_FIRST_KERNEL = (5, 11)


class HostRegistrar(NamedTuple):
    """How one device pins memory that is mapped already.

    Attributes:
        register: pins (address, bytes), both whole pages; raises RuntimeError if it cannot.
        unregister: undoes it, for an address.
        mapping_flags: how to map what is to be registered.
    """

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]
    mapping_flags: int = mmap.MAP_SHARED

    @property
    def has_pages(self) -> bool:
        """Whether what it registers exists; that of a dry device need not."""
        return self.mapping_flags == mmap.MAP_SHARED


def _own_registrar(device: torch.device) -> HostRegistrar | None:
    """Return the registrar of a device module that has one under plain names."""
    module = torch.get_device_module(device)
    if hasattr(module, "host_register") and hasattr(module, "host_unregister"):
        registrar = HostRegistrar(module.host_register, module.host_unregister)
        if hasattr(module, "host_mapping_flags"):
            return registrar._replace(mapping_flags=module.host_mapping_flags())
        return registrar
    return None


def _cuda_registrar(device: torch.device) -> HostRegistrar:
    del device
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return HostRegistrar(
        lambda address, nbytes: _check(
            "cudaHostRegister", cudart.cudaHostRegister(address, nbytes, _CUDA_PORTABLE)
        ),
        lambda address: _check("cudaHostUnregister", cudart.cudaHostUnregister(address)),
    )


@functools.cache
def _ascend_registrar(device: torch.device) -> HostRegistrar | None:
    """Return torch_npu's, if registering one page with it succeeds."""
    try:
        registrar = _ascend_runtime(device)
        _try_one_page(registrar)
    except RuntimeError as error:
        logger.info(
            "%s cannot register host memory (%s). Pinned memory comes from torch's allocator, "
            "which may round it up to powers of two.",
            device,
            error,
        )
        return None
    return registrar


def _ascend_runtime(device: torch.device) -> HostRegistrar:
    module = torch.get_device_module(device)
    if not hasattr(module, "npurt"):
        raise RuntimeError("torch_npu before 2.10.0.post7 has no torch.npu.npurt")
    if linux_version() < _ASCEND_FIRST_KERNEL:
        raise RuntimeError("CANN needs a Linux kernel later than 5.10 for that")
    runtime = module.npurt()
    return HostRegistrar(
        lambda address, nbytes: _check(
            "npuHostRegister", runtime.npuHostRegister(address, nbytes, _ASCEND_MAPPED)
        ),
        lambda address: _check("npuHostUnregister", runtime.npuHostUnregister(address)),
    )


def _check(function: str, code: int) -> None:
    if int(code) != 0:
        raise RuntimeError(f"{function} failed with error {int(code)}")


def _try_one_page(registrar: HostRegistrar) -> None:
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    registrar.register(page.data_ptr(), page.nbytes)
    registrar.unregister(page.data_ptr())


def linux_version() -> tuple[int, ...]:
    """Return major and minor version of the running kernel."""
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


@dataclass(frozen=True)
class DeviceTraits:
    """What is special about a type of device; the defaults hold where nothing is known.

    Attributes:
        fused_step_dtype: the dtype of the step count that its fused AdamW kernel is called with.
        find_registrar: returns how a device registers host memory; None where it cannot, and
            memory is then taken from torch's pinned allocator.
    """

    fused_step_dtype: torch.dtype = torch.float32
    find_registrar: Callable[[torch.device], HostRegistrar | None] = _own_registrar


_ORDINARY = DeviceTraits()
TRAITS: dict[str, DeviceTraits] = {
    "cuda": DeviceTraits(find_registrar=_cuda_registrar),
    "npu": DeviceTraits(fused_step_dtype=torch.int64, find_registrar=_ascend_registrar),
}


def traits_of(device: torch.device) -> DeviceTraits:
    """Return what is special about the type of a device."""
    return TRAITS.get(device.type, _ORDINARY)


def pinned_block_nbytes(nbytes: int) -> int:
    """Return what torch's pinned allocators take for a request: the next power of two.

    CUDA's, torch_npu's and the virtual accelerator's do, unless they are configured otherwise.
    """
    return 1 << max(nbytes - 1, 0).bit_length()


def is_capturing(device: torch.device) -> bool:
    """Say whether work on the caller's current stream goes into a graph instead of running."""
    if device.type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device)
    if not hasattr(module, "is_current_stream_capturing"):
        return False
    with module.device(device):
        return bool(module.is_current_stream_capturing())
