"""The real AdamW of MindFormers, without the rest of it.

Importing the package whole takes several hundred megabytes of dependencies. Its AdamW needs one
logger and two names of HyperParallel, so light modules with those names stand in for everything
around it, with the real paths, and the module itself is the real one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from dtensor import DTensor


def home() -> ModuleType:
    """Return the module mindformers.pynative.optimizer.adamw; skip where it is not installed.

    With SWAPOPT_REQUIRE_MINDFORMERS=1 its absence is an error.
    """
    found = importlib.util.find_spec("mindformers")
    if found is None or not found.submodule_search_locations:
        if os.environ.get("SWAPOPT_REQUIRE_MINDFORMERS") == "1":
            raise ModuleNotFoundError("pip install --no-deps mindformers==2.0.0")
        pytest.skip("mindformers is not installed")
    root = Path(found.submodule_search_locations[0])
    _stand_in("hyper_parallel", SkipDTensorDispatch=nullcontext, DTensor=DTensor)
    for name, folder in {
        "mindformers": root,
        "mindformers.tools": root / "tools",
        "mindformers.pynative": root / "pynative",
        "mindformers.pynative.optimizer": root / "pynative" / "optimizer",
    }.items():
        _stand_in(name, __path__=[str(folder)], __spec__=_package(name, folder))
    _stand_in("mindformers.tools.logger", logger=logging.getLogger("mindformers"))
    return importlib.import_module("mindformers.pynative.optimizer.adamw")


def _stand_in(name: str, **contents: object) -> None:
    if name not in sys.modules:
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


def _package(name: str, folder: Path) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


class FusedOperator:
    """Stands in for MindSpore's ``AdamW`` operator, which has a kernel on Ascend only.

    What is shown with it is that an adapter calls the operator with native's arguments on the
    right tensors, not the operator's own arithmetic: native steps of the tests call it, too.

    Attributes:
        maxima_are_second_moments: for every call, whether it got one tensor for both.
    """

    def __init__(self) -> None:
        self.maxima_are_second_moments: list[bool] = []

    def __call__(  # noqa: PLR0913, PLR0917 - the operator's own signature
        self,
        var: Tensor,
        m: Tensor,
        v: Tensor,
        max_v: Tensor,
        gradient: Tensor,
        step: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        decay: float,
        eps: float,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.maxima_are_second_moments.append(max_v is v)
        count = step.astype(mstype.float32) + 1.0
        gradient = -gradient if maximize else gradient
        m.copy_(m * beta1 + gradient * (1.0 - beta1))
        v.copy_(v * beta2 + gradient * gradient * (1.0 - beta2))
        if amsgrad:
            max_v.copy_(ops.maximum(max_v, v))
        denominator = ops.sqrt((max_v if amsgrad else v) / (1.0 - beta2**count)) + eps
        var.copy_(var * (1.0 - lr * decay) - m / denominator * (lr / (1.0 - beta1**count)))
