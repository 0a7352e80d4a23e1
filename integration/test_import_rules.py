"""Who may import whom; read from the sources, so that no framework is needed."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
COMMON = PACKAGES / "swapopt-common" / "src" / "swapopt_common"
TORCH = PACKAGES / "swapopt-torch" / "src" / "swapopt_torch"
MINDSPORE = PACKAGES / "swapopt-mindspore" / "src" / "swapopt_mindspore"

# A backend's modules from the bottom up: each may import those of earlier floors only.
TORCH_FLOORS = [
    {"streams", "guard", "device_traits", "local_tensor", "optim.step_counts"},
    {"cutting", "pinning", "optim.adamw", "division", "schedule"},
    {"host_memory"},
    {"units"},
    {"placing"},
    {"layout"},
    {"residency", "movement", "stats", "optim"},
    {"staging", "room", "homes", "lending", "outcome", "step_plans"},
    {"per_tensor", "packed"},
    {"pipeline"},
    {"adapters.registration", "adapters.operands", "adapters.step_counters"},
    {"adapters.base", "delegation"},
    {"adapters.adam"},
    {"adapters.hyper_adamw"},
    {"adapters"},
    {"announce", "checkpoint"},
    {"engine"},
    {"optimizer"},
    {"wrapping"},
    {""},
]
MINDSPORE_FLOORS = [
    {"streams", "host_buffer", "local_tensor", "guard", "hooks", "schedule", "delegation"},
    {"device"},
    {"ascend", "tail"},
    {"choice"},
    {"slots"},
    {"residency", "division", "sizes", "mirrors", "adapters.gradients", "adapters.hyperparameters"},
    {"layout"},
    {"movement", "stats", "room"},
    {"staging", "outcome"},
    {"per_tensor", "packed"},
    {"pipeline"},
    {"adapters.base"},
    {"adapters.adam", "adapters.adam_weight_decay", "adapters.mindformers_adamw"},
    {"adapters"},
    {"announce"},
    {"engine"},
    {"checkpoint"},
    {"optimizer"},
    {""},
]
# What users of the command line need, and nobody else.
EXTRAS = {"virtual", "emulated", "cli", "command_line", "bench", "demo", "plan", "__main__"}


class Training(NamedTuple):
    """A source file that training uses, and the backend it belongs to."""

    source: Path
    package: Path
    framework: set[str]
    floors: list[set[str]]

    @property
    def name(self) -> str:
        return module_name(self.source, self.package)

    def __str__(self) -> str:
        return f"{self.package.name}.{self.name}"


def imports_of(source: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports, those for type checking left out."""
    tree = ast.parse(source.read_text())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join([*package_above(source, node.level), *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_above(source: Path, level: int) -> tuple[str, ...]:
    """Return the package that so many leading dots stand for; no dots, no package."""
    if level == 0:
        return ()
    root = next(folder for folder in source.parents if folder.name == "src")
    return source.parents[level - 1].relative_to(root).parts


def module_name(source: Path, package: Path) -> str:
    parts = list(source.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def training_modules() -> list[Training]:
    backends = [
        (TORCH, {"torch"}, TORCH_FLOORS),
        (MINDSPORE, {"mindspore", "numpy"}, MINDSPORE_FLOORS),
    ]
    return [
        Training(source, package, framework, floors)
        for package, framework, floors in backends
        for source in sorted(package.rglob("*.py"))
        if module_name(source, package).split(".")[0] not in EXTRAS
    ]


def test_common_imports_the_standard_library_only() -> None:
    for source in COMMON.rglob("*.py"):
        for name in imports_of(source):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "swapopt_common", f"{source}: {name}"


@pytest.mark.parametrize("module", training_modules(), ids=str)
def test_training_code_imports_its_framework_and_common_only(module: Training) -> None:
    allowed = module.framework | {"swapopt_common", module.package.name}
    for name in imports_of(module.source):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", training_modules(), ids=str)
def test_modules_import_downwards(module: Training) -> None:
    floor_of = {name: floor for floor, names in enumerate(module.floors) for name in names}
    assert module.name in floor_of, f"give {module} a floor"
    package = module.package
    known = {module_name(path, package) for path in package.rglob("*.py")} | EXTRAS
    for name in imports_of(module.source):
        if not name.startswith(package.name):
            continue
        imported = name.removeprefix(package.name).removeprefix(".")
        if imported not in known or imported == "":
            continue  # a name inside a module; the module itself is yielded, too
        assert imported.split(".")[0] not in EXTRAS, f"{module} imports {imported}"
        assert floor_of[imported] < floor_of[module.name], f"{module} imports {imported}"


def test_virtual_imports_nothing_of_the_rest() -> None:
    for source in (TORCH / "virtual").rglob("*.py"):
        for name in imports_of(source):
            if name.startswith("swapopt_torch"):
                assert name.startswith("swapopt_torch.virtual") or name == "swapopt_torch", (
                    f"{source.name} imports {name}"
                )


# What the emulated device knows of order and time, which no framework has a part in.
PURE_EMULATED = {"addresses", "clock", "engine", "late", "order", "profiles", "shadow", "timeline"}


@pytest.mark.parametrize("name", sorted(PURE_EMULATED))
def test_order_and_time_of_the_emulated_device_are_pure_python(name: str) -> None:
    for imported in imports_of(MINDSPORE / "emulated" / f"{name}.py"):
        top, *rest = imported.split(".")
        assert top in sys.stdlib_module_names or (
            top == "swapopt_mindspore" and rest[0] == "emulated" and rest[1] in PURE_EMULATED
        ), f"{name} imports {imported}"


def test_the_emulated_device_imports_nothing_above_the_choice_of_a_device() -> None:
    below = {"choice", "device", "emulated", "host_buffer", "streams"}
    for source in (MINDSPORE / "emulated").rglob("*.py"):
        for imported in imports_of(source):
            if imported.startswith("swapopt_mindspore."):
                assert imported.split(".")[1] in below, f"{source.name} imports {imported}"
