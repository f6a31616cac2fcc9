"""
Units: the modules that are gathered, recomputed and compiled as a whole by default.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.model.weights import API_NAME


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; a ModuleList, a ParameterList and their kind have none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def find_units(model: nn.Module, globs: Sequence[str] | None) -> list[str]:
    """
    Return the names of the modules whose weights are gathered together at level 3.

    Args:
        globs: names of modules; of the modules that one glob matches, the outermost ones count.
            None: the members with weights of the outermost ModuleLists, ModuleDicts and
            Sequentials, or the children of a model without such members. Where such a module is
            never called itself (a list in a list), its members take its place.

    Raises:
        UsageError: a glob that matches no module with weights, or units inside one another.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters())
    }
    if globs is None:
        holders = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        lists = [name for name, module in model.named_modules() if isinstance(module, holders)]
        outer = [
            name
            for name in lists
            if not any(
                name.startswith(other + ".") or not other for other in lists if other != name
            )
        ]
        members = {name for holder in outer for name in _called_members(model, holder)}
        chosen = members & set(modules) or set(_called_members(model, ""))
        return [name for name in modules if name in chosen]
    names = [name for name, module in modules.items() if is_called(module)]
    units: list[str] = []
    for glob in globs:
        hits = fnmatch.filter(names, glob)
        if not hits:
            raise _no_units(glob, modules, names)
        units += [name for name in hits if not any(name.startswith(f"{o}.") for o in hits)]
    for name in units:
        if any(other != name and name.startswith(other + ".") for other in units):
            raise UsageError(f"the unit {name} is inside another unit", where=API_NAME)
    return [name for name in names if name in units]


def _called_members(model: nn.Module, holder: str) -> list[str]:
    """Return the children of a module; those that are never called are replaced by their own."""
    found: list[str] = []
    for child, module in model.get_submodule(holder).named_children():
        name = f"{holder}.{child}" if holder else child
        found += [name] if is_called(module) else _called_members(model, name)
    return found


def _no_units(glob: str, modules: Mapping[str, nn.Module], names: Sequence[str]) -> UsageError:
    """Return the error about a glob that matches no unit."""
    passive = fnmatch.filter(modules, glob)
    if passive:
        kind = type(modules[passive[0]]).__name__
        what = f"units={glob!r} matches {passive[0]}, a {kind}, which is never called"
        return UsageError(what, where=API_NAME, hint=f'use its members: "{passive[0]}.*"')
    what = f"units={glob!r} matches no module with weights"
    return UsageError(what, where=API_NAME, hint=did_you_mean(glob, names))
