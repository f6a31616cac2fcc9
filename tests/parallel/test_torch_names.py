"""
Every name of torch that pdrun uses is in the torch that is installed, with the keywords that calls
have, and none of them is deprecated.

This also reads code that needs devices, or that runs rarely; scripts/matrix runs it with each
version of torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "parallel", "pdrun", "rendezvous")
OLD_NAMES = {"all_gather_into_tensor", "reduce_scatter_tensor", "_set_pg_timeout"}
"""What `torch_compat` uses where torch has not the new name."""
MISSING = object()


def read_imports(tree: ast.Module) -> tuple[dict[str, str], set[str]]:
    """Return what local names mean, and all dotted names of torch that are imported."""
    meanings: dict[str, str] = {}
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    meanings[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    imported.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                imported.add(f"{node.module}.{alias.name}")
    return meanings, imported


def name_of(node: ast.expr, meanings: dict[str, str]) -> str:
    """Return the dotted name of an expression in torch, or an empty string."""
    if isinstance(node, ast.Name):
        return meanings.get(node.id, "")
    if isinstance(node, ast.Attribute) and (front := name_of(node.value, meanings)):
        return f"{front}.{node.attr}"
    return ""


@functools.cache
def resolve(name: str) -> Any:
    """Return what a dotted name is, MISSING if torch has no such thing."""
    found: Any = torch
    front = "torch"
    for part in name.split(".")[1:]:
        front = f"{front}.{part}"
        try:
            if not hasattr(found, part):
                importlib.import_module(front)
            found = getattr(found, part)
        except (ImportError, AttributeError):
            return MISSING
    return found


@functools.cache
def list_keywords(name: str) -> set[str] | None:
    """Return the keywords of a function; None: any, or it is not known."""
    try:
        parameters = inspect.signature(resolve(name)).parameters
    except (TypeError, ValueError):  # a function of C, or there is none
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    return set(parameters)


def find_faults(text: str) -> Iterator[str]:
    """Yield what is wrong with the names of torch in a source."""
    tree = ast.parse(text)
    meanings, names = read_imports(tree)
    keywords: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(name_of(node, meanings))
        elif isinstance(node, ast.Call) and (name := name_of(node.func, meanings)):
            keywords |= {(name, keyword.arg) for keyword in node.keywords if keyword.arg}
    for name in sorted(names):
        if not name or name.startswith("torch.ops.pdrun") or name.split(".")[-1] in OLD_NAMES:
            continue
        found = resolve(name)
        if found is MISSING:
            yield f"there is no {name}"
        elif isinstance(reason := getattr(found, "__deprecated__", None), str):
            yield f"{name} is deprecated: {reason}"
    for name, keyword in sorted(keywords):
        known = list_keywords(name)
        if known is not None and keyword not in known:
            yield f"{name} has no {keyword}="


@pytest.mark.parametrize("folder", FOLDERS)
def test_torch_has_every_name(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if "torch" in path.read_text()]
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted(files)
        for fault in find_faults(path.read_text())
    ]
    assert faults == []


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def old() -> None: ...

    monkeypatch.setattr(old, "__deprecated__", "use new_of_this_test", raising=False)
    monkeypatch.setattr(torch, "old_of_this_test", old, raising=False)
    source = """
import torch
from torch.utils import checkpoint as again
from torch.utils.data import Nothing
torch.compiler.nothing_of_this_name(1)
torch.old_of_this_test()
again.set_checkpoint_early_stop(enable=True)
again.set_checkpoint_early_stop(enabled=True)
"""
    assert list(find_faults(source)) == [
        "there is no torch.compiler.nothing_of_this_name",
        "torch.old_of_this_test is deprecated: use new_of_this_test",
        "there is no torch.utils.data.Nothing",
        "torch.utils.checkpoint.set_checkpoint_early_stop has no enabled=",
    ]
