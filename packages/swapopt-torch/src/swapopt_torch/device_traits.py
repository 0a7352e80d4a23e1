"""Where device types differ, and nowhere else."""

from __future__ import annotations

import torch

# What the fused update wants its step count as; float32 where nothing is said.
_FUSED_STEP_DTYPES = {"npu": torch.int64}


def fused_step_dtype(device_type: str) -> torch.dtype:
    """Return the dtype of the step tensors that the fused Adam kernels of a device type take."""
    return _FUSED_STEP_DTYPES.get(device_type, torch.float32)


def is_capturing(device: torch.device) -> bool:
    """Say whether work on the caller's current stream goes into a graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
