"""MindFormers' AdamW for the demo, without the rest of MindFormers.

Importing the package whole takes several hundred megabytes of dependencies, not all of them
public. Its AdamW needs one logger and two names of HyperParallel: while its module is imported,
light modules stand in for everything around it. The module itself is the installed one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mindspore import Parameter, nn

from swapopt_mindspore.demo.settings import MINDFORMERS_ADAMW, DemoError

HOME = "mindformers.pynative.optimizer.adamw"
INSTALL = "pip install --no-deps mindformers==2.0.0"

AdamW = Callable[[list[Parameter], float], nn.Optimizer]
"""Makes the optimizer of parameters and a learning rate."""


class _NoDTensor:
    """HyperParallel's name; no tensor of the demo is one."""


def is_installed() -> bool:
    """Say whether MindFormers is installed; imports nothing of it."""
    return HOME in sys.modules or find_spec("mindformers") is not None


def load_adamw() -> AdamW:
    """Return the class of MindFormers' PyNative AdamW.

    Raises:
        DemoError: MindFormers is not installed, or is of a version that has no such optimizer.
    """
    if not is_installed():
        raise DemoError(f"--optimizer {MINDFORMERS_ADAMW} needs MindFormers: {INSTALL}")
    try:
        if HOME not in sys.modules:
            with _standing_in(_stand_ins()):
                import_module(HOME)
        adamw: AdamW = sys.modules[HOME].AdamW
    except (ImportError, AttributeError) as error:
        raise DemoError(
            f"The MindFormers installed here does not give its AdamW ({error}). The demo was "
            f"tried with 2.0.0: {INSTALL}"
        ) from error
    return adamw


def _stand_ins() -> dict[str, ModuleType]:
    spec = find_spec("mindformers")
    assert spec is not None, "it is installed"
    (root, *_) = map(Path, spec.submodule_search_locations or ())
    folders = {
        "mindformers": root,
        "mindformers.tools": root / "tools",
        "mindformers.pynative": root / "pynative",
        "mindformers.pynative.optimizer": root / "pynative" / "optimizer",
    }
    return {
        **{name: _module(name, __path__=[str(folder)]) for name, folder in folders.items()},
        "mindformers.tools.logger": _module(
            "mindformers.tools.logger", logger=logging.getLogger("mindformers")
        ),
        "hyper_parallel": _module(
            "hyper_parallel", SkipDTensorDispatch=nullcontext, DTensor=_NoDTensor
        ),
    }


def _module(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


@contextmanager
def _standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Let imports find these modules inside the block, and what was there before after it."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
