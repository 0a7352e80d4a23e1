"""Models under FSDP2 (fully_shard), built in the ways that people build them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from models import OPTIMIZERS, Transformer, loss_of, tokens
from parallel import Training
from pool import Rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and trained.

    Attributes:
        optimizer: a key of `OPTIMIZERS`.
        nested: whether every block is sharded for itself, or the whole model at once.
        reshard: fully_shard's ``reshard_after_forward``.
        stored: what parameters, and so states, are held in.
        computed: what parameters are computed with, where it is not ``stored``; gradients are
            reduced in fp32 then.
        replicas: how many times every shard is there, where the mesh has two dimensions (HSDP).
        backward_passes: how many a step has; gradients are reduced in the last one.
        max_norm: what the norm of the gradients is clipped to, if at all.
        scale: what a GradScaler multiplies the loss with at first, if there is one.
    """

    optimizer: str = "AdamW"
    nested: bool = True
    reshard: bool | None = None
    stored: torch.dtype = torch.float32
    computed: torch.dtype | None = None
    replicas: int | None = None
    backward_passes: int = 1
    max_norm: float | None = None
    scale: float | None = None


def sharded(rank: Rank, setting: Setting) -> Training:
    """Build a sharded model and its optimizer; every rank trains on its own part of the data."""
    model = Transformer().to(rank.device, setting.stored)
    policy = MixedPrecisionPolicy(setting.computed, reduce_dtype=torch.float32)
    shard = partial(
        fully_shard,
        mesh=_mesh(rank, setting.replicas),
        reshard_after_forward=setting.reshard,
        mp_policy=MixedPrecisionPolicy() if setting.computed is None else policy,
    )
    for block in model.blocks if setting.nested else ():
        shard(block)
    shard(model)
    scaler = None
    if setting.scale is not None:
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=setting.scale)

    def give_gradients(step: int) -> torch.Tensor:
        losses = []
        for number in range(setting.backward_passes):
            model.set_requires_gradient_sync(number == setting.backward_passes - 1)
            batch = tokens(10 * step + number, rank.device, rank.index, rank.size)
            loss = loss_of(model, batch) / setting.backward_passes
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss)
        return torch.stack(losses).sum()

    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    return Training(model, [optimizer], give_gradients, setting.max_norm, scaler)


def _mesh(rank: Rank, replicas: int | None) -> DeviceMesh:
    if replicas is None:
        return rank.mesh()
    return rank.mesh(replicas, rank.size // replicas, names=("replicate", "shard"))
