"""Rehearses a shard as planned and as FSDP2 makes it, as one rank of 64; prints both as JSON.

torch's fake process group lets one process be a rank of as many as it likes.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from swapopt_torch import virtual
from swapopt_torch.plan.case import Case
from swapopt_torch.plan.rehearsal import rehearse

SHARDS = 64
CASE = Case(params=1_000_000_000, shards=SHARDS)


def fully_sharded(case: Case) -> list[torch.nn.Parameter]:
    module = torch.nn.Module()
    for number, size in enumerate(case.model().sizes):
        parameter = torch.nn.Parameter(torch.empty(size, device="virtual"))
        module.register_parameter(f"weight{number}", parameter)
    fully_shard(module, mesh=init_device_mesh("virtual", (SHARDS,)))
    return list(module.parameters())


if __name__ == "__main__":
    virtual.enable("ascend-910b", device_count=1, dry=True)
    backend = "cpu:fake,virtual:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=SHARDS)
    found = rehearse(CASE, 16), rehearse(CASE, 16, fully_sharded)
    print(json.dumps([[asdict(each) for each in found]]))
