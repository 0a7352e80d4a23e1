"""Rehearses small cases, `python rehearsals.py dry|wet`; prints the figures as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import product

import torch

from swapopt_torch import virtual
from swapopt_torch.plan.case import OPTIMIZERS, Case, Host
from swapopt_torch.plan.rehearsal import rehearse

CASES = [
    Case(params=3_000_000, shards=2, optimizer=optimizer, packed=packed)
    for optimizer, packed in product(OPTIMIZERS, (True, False))
]
CASES += [
    Case(params=3_000_000, dtype="bf16"),
    Case(params=2_000_000, shape="uniform"),
    Case(params=2_000_000, shape="embedding", packed=False),
]
SWAP_TIMES = (None, 1, 4, 16)

if __name__ == "__main__":
    torch.set_num_threads(1)
    profile = Host(ranks=8).limit(virtual.PROFILES["h200"])
    virtual.enable(profile, device_count=1, races="raise", dry=sys.argv[1] == "dry")
    print(json.dumps([[asdict(rehearse(case, n)) for n in SWAP_TIMES] for case in CASES]))
