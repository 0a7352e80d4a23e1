"""Who may import whom; read from the sources, so that no framework is needed."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
COMMON = PACKAGES / "swapopt-common" / "src" / "swapopt_common"
TORCH = PACKAGES / "swapopt-torch" / "src" / "swapopt_torch"

# The modules of swapopt_torch from the bottom up: each may import those of earlier floors only.
FLOORS = [
    {"streams", "guard", "device_traits", "optim.step_counts"},
    {"cutting", "pinning", "optim.adamw"},
    {"host_memory"},
    {"layout"},
    {"residency", "movement", "stats", "optim"},
    {"per_tensor", "packed"},
    {"schedule"},
    {"pipeline"},
    {"adapters.registration"},
    {"adapters.base", "delegation"},
    {"adapters.adam"},
    {"adapters.hyper_adamw"},
    {"adapters"},
    {"announce", "checkpoint"},
    {"engine"},
    {"optimizer"},
    {""},
]
# What users of the command line need, and nobody else.
EXTRAS = {"virtual", "cli", "demo", "__main__"}


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


def training_modules() -> list[Path]:
    return [
        source
        for source in sorted(TORCH.rglob("*.py"))
        if module_name(source, TORCH).split(".")[0] not in EXTRAS
    ]


def test_common_imports_the_standard_library_only() -> None:
    for source in COMMON.rglob("*.py"):
        for name in imports_of(source):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "swapopt_common", f"{source}: {name}"


@pytest.mark.parametrize("source", training_modules(), ids=lambda path: module_name(path, TORCH))
def test_training_code_imports_torch_and_common_only(source: Path) -> None:
    allowed = {"torch", "swapopt_common", "swapopt_torch"}
    for name in imports_of(source):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top in allowed, f"{source.name} imports {name}"


@pytest.mark.parametrize("source", training_modules(), ids=lambda path: module_name(path, TORCH))
def test_modules_import_downwards(source: Path) -> None:
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    own = module_name(source, TORCH)
    assert own in floor_of, f"give {own} a floor"
    known = {module_name(path, TORCH) for path in training_modules()} | EXTRAS
    for name in imports_of(source):
        if not name.startswith("swapopt_torch"):
            continue
        imported = name.removeprefix("swapopt_torch").removeprefix(".")
        if imported not in known or imported == "":
            continue  # a name inside a module; the module itself is yielded, too
        assert imported not in EXTRAS, f"{own} imports {imported}"
        assert floor_of[imported] < floor_of[own], f"{own} imports {imported}"


def test_virtual_imports_nothing_of_the_rest() -> None:
    for source in (TORCH / "virtual").rglob("*.py"):
        for name in imports_of(source):
            if name.startswith("swapopt_torch"):
                assert name.startswith("swapopt_torch.virtual") or name == "swapopt_torch", (
                    f"{source.name} imports {name}"
                )
