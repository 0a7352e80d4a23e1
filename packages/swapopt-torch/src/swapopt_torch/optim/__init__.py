"""The AdamW of HyperParallel: one step count per parameter group."""

from swapopt_torch.optim.adamw import AdamW, adamw

__all__ = ["AdamW", "adamw"]
