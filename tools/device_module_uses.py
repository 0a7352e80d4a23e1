"""Finds, without importing anything, what Python sources ask of a torch device module.

A device module is what ``torch.get_device_module(device)`` returns (``torch.cuda``, ``torch.npu``).
Sources may keep it in a local name or in an attribute of ``self``; anything else that happens to
it is reported as an escape, because then nobody could say any more what is asked of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

DEVICE_MODULE = "device module"


class Use(NamedTuple):
    """One place where sources ask something of a device module, or of what it returned.

    Attributes:
        root: `DEVICE_MODULE`, or the function of the module whose result is asked.
        name: the attribute; None if the module escapes here.
        where: file and line.
        positional: how many positional arguments a call has; None where it is not called.
        keywords: the keyword arguments of a call.
        asked_first: the use is itself the question (hasattr, getattr) whether the name exists.
    """

    root: str
    name: str | None
    where: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    asked_first: bool = False


def find_uses(source: str, file: str, results: frozenset[str] = frozenset()) -> list[Use]:
    """Return all uses of device modules in one file.

    Args:
        source: the text of the file.
        file: its name, for messages.
        results: functions of a device module whose results are followed in the same way.
    """
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    held = _held_names(tree, results)
    return [
        _use_at(node, root, parents, f"{file}:{node.lineno}")
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and (root := _root_of(node, held, results)) is not None
        if not _is_binding(node, parents)
    ]


def called_names(source: str) -> Iterator[str]:
    """Yield what a file calls: ``torch.Stream`` for functions of torch, ``.copy_`` for methods."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            dotted = dotted_name(node.func)
            yield f".{node.func.attr}"
            if dotted.startswith("torch."):
                yield dotted


def subscripts_of(source: str, function: str) -> Iterator[str]:
    """Yield the constant keys that a file looks up in what calls of ``.function`` return."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == function
            and isinstance(node.slice, ast.Constant)
        ):
            yield str(node.slice.value)


def dotted_name(node: ast.expr) -> str:
    """Return ``a.b.c`` for such an expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def _held_names(tree: ast.Module, results: frozenset[str]) -> dict[str, str]:
    """Return the names of a file, ``self.`` ones too, that a device module is assigned to."""
    held: dict[str, str] = {}
    while True:
        found = dict(held)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                root = _root_of(node.value, held, results)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if root is not None:
                    found |= {dotted_name(target): root for target in targets}
        if found == held:
            return held
        held = found


def _root_of(node: ast.expr, held: Mapping[str, str], results: frozenset[str]) -> str | None:
    """Return what an expression stands for, if it is a device module or a followed result."""
    dotted = dotted_name(node)
    if dotted == "torch.npu":
        return DEVICE_MODULE
    if dotted in held and isinstance(getattr(node, "ctx", None), ast.Load):
        return held[dotted]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if dotted_name(node.func) == "torch.get_device_module":
            return DEVICE_MODULE
        if node.func.attr in results and _root_of(node.func.value, held, results) is not None:
            return node.func.attr
    return None


def _is_binding(node: ast.expr, parents: Mapping[ast.AST, ast.AST]) -> bool:
    parent = parents.get(node)
    return isinstance(parent, (ast.Assign, ast.AnnAssign)) and parent.value is node


def _use_at(node: ast.expr, root: str, parents: Mapping[ast.AST, ast.AST], where: str) -> Use:
    parent = parents.get(node)
    if isinstance(parent, ast.Attribute):
        call = parents.get(parent)
        if isinstance(call, ast.Call) and call.func is parent:
            keywords = tuple(keyword.arg or "**" for keyword in call.keywords)
            return Use(root, parent.attr, where, len(call.args), keywords)
        return Use(root, parent.attr, where)
    if (
        isinstance(parent, ast.Call)
        and dotted_name(parent.func) in ("hasattr", "getattr")
        and parent.args[0] is node
        and isinstance(parent.args[1], ast.Constant)
    ):
        return Use(root, str(parent.args[1].value), where, asked_first=True)
    return Use(root, None, where)
