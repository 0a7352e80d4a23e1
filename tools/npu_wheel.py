"""Reads what a torch_npu wheel offers, without importing it: it needs Ascend's CANN to import."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple, TypeAlias

Definition: TypeAlias = "ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign"

# One wheel for every machine this check runs on: it is read, never installed.
PLATFORM = ("--platform", "manylinux_2_28_x86_64", "--python-version", "311", "--abi", "cp311")

DEVICE_MODULE_FILE = "torch_npu/npu/__init__.py"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
GUARD_HEADER = "torch_npu/include/torch_npu/csrc/core/npu/impl/NPUGuardImpl.h"
HOOKS_HEADER = "torch_npu/include/torch_npu/csrc/core/npu/NPUHooksInterface.h"
STREAM_HEADER = "torch_npu/include/torch_npu/csrc/npu/Stream.h"
KERNEL_LISTS = (
    "torch_npu/csrc/aten/npu_native_functions.yaml",
    "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
)


def download(version: str, folder: Path) -> Path:
    """Download the wheel of a version with pip, without dependencies; return its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", *PLATFORM, "-d", str(folder)]
    subprocess.run([*command, f"torch_npu=={version}"], check=True)
    (wheel,) = folder.glob(f"torch_npu-{version}-*.whl")
    return wheel


class Signature(NamedTuple):
    """What a function takes, ``self`` and ``cls`` left out."""

    positional: tuple[str, ...]
    required: int
    keyword_only: tuple[str, ...]
    takes_more: bool
    takes_any_keyword: bool

    def refusal(self, positional: int, keywords: tuple[str, ...]) -> str | None:
        """Return why a call with such arguments would fail; None if it would not."""
        if positional > len(self.positional) and not self.takes_more:
            return f"takes {len(self.positional)} positional arguments, not {positional}"
        known = {*self.positional[positional:], *self.keyword_only}
        unknown = [word for word in keywords if word not in known]
        if unknown and not self.takes_any_keyword:
            return f"knows no {', '.join(unknown)}"
        needed = self.positional[positional : self.required]
        missing = [word for word in needed if word not in keywords]
        return f"needs {', '.join(missing)}" if missing else None


class NpuWheel:
    """A torch_npu wheel, read from its archive."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._files = frozenset(self._archive.namelist())
        self.name = path.name
        self._kernels = "\n".join(self.text(file) for file in KERNEL_LISTS)

    def text(self, file: str) -> str:
        """Return a text file of the wheel."""
        return self._archive.read(file).decode()

    def names_in_library(self, names: tuple[str, ...]) -> set[str]:
        """Return those of the names that the compiled library holds as whole strings."""
        library = self._archive.read(LIBRARY)
        return {name for name in names if b"\0" + name.encode() + b"\0" in library}

    def definition(self, name: str, file: str = DEVICE_MODULE_FILE) -> Definition | None:
        """Return where a name of a module is defined, through the module's imports."""
        package = file.rpartition("/")[0]
        for node in ast.parse(self.text(file)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return node
            if isinstance(node, ast.AnnAssign) and name == ast.unparse(node.target):
                return node
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is not None:
                found = self._imported(name, node, f"{package}/{node.module.replace('.', '/')}")
                if found is not None:
                    return found
        return None

    def _imported(self, name: str, node: ast.ImportFrom, stem: str) -> Definition | None:
        target = f"{stem}.py" if f"{stem}.py" in self._files else f"{stem}/__init__.py"
        for alias in node.names:
            if name == (alias.asname or alias.name):
                return self.definition(alias.name, target)
            if alias.name == "*" and name in self._public_names(target):
                return self.definition(name, target)
        return None

    def _public_names(self, file: str) -> list[str]:
        for node in ast.parse(self.text(file)).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return []

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """Return a method that a class of the device module defines itself."""
        found = self.definition(class_name)
        body = found.body if isinstance(found, ast.ClassDef) else []
        methods = (node for node in body if isinstance(node, ast.FunctionDef))
        return next((node for node in methods if node.name == name), None)

    def registers_device_module(self) -> bool:
        """Say whether the package makes its device module known to torch, as ``npu``."""
        wanted = {
            "torch.utils.rename_privateuse1_backend('npu')",
            "torch._register_device_module('npu', torch_npu.npu)",
        }
        found = set()
        for file in sorted(self._files):
            if file.endswith(".py") and file.count("/") <= 3:
                text = self.text(file)
                if "_register_device_module" in text or "rename_privateuse1_backend" in text:
                    calls = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
                    found |= {ast.unparse(call) for call in calls}
        return wanted <= found

    def statistics(self) -> set[str]:
        """Return the keys that ``memory_stats`` is documented to have."""
        function = self.definition("memory_stats")
        text = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None
        keys: set[str] = set()
        for pattern in re.findall(r'``"([\w.{},]+)"``', text or ""):
            parts = [part.strip("{}").split(",") for part in re.split(r"\.", pattern)]
            keys |= {".".join(choice) for choice in itertools.product(*parts)}
        return keys

    def declares(self, method: str, header: str) -> bool:
        """Say whether a header declares a C++ method of this name."""
        return re.search(rf"[\w*&>] {method}\(", self.text(header)) is not None

    def kernel_arguments(self, operator: str) -> tuple[str, ...] | None:
        """Return an operator's arguments; () if it is listed by name only; None if it is not."""
        listed = rf"^\s*- (?:func: )?{re.escape(operator)}(?:\((?P<arguments>.*)\) -> .*)?$"
        found = list(re.finditer(listed, self._kernels, re.M))
        for match in found:
            if match["arguments"] is not None:
                return tuple(re.findall(r"(\w+)(?:=[^,]+)?(?:, |$)", match["arguments"]))
        return () if found else None


def signature(node: Definition) -> Signature | None:
    """Return what a function, or a class when it is made, takes; None if sources do not say."""
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        makers = [n for n in made if n.name in ("__init__", "__new__")]
        return _signature_of(makers[0], 1) if makers else None
    return _signature_of(node, 0) if isinstance(node, ast.FunctionDef) else None


def method_signature(node: ast.FunctionDef) -> Signature:
    """Return what a method takes."""
    return _signature_of(node, 1)


def _signature_of(node: ast.FunctionDef, skipped: int) -> Signature:
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return Signature(
        positional=tuple(positional[skipped:]),
        required=len(positional) - len(arguments.defaults) - skipped,
        keyword_only=tuple(argument.arg for argument in arguments.kwonlyargs),
        takes_more=arguments.vararg is not None,
        takes_any_keyword=arguments.kwarg is not None,
    )
