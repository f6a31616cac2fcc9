"""
The stage of each module, by name.

A model is seen as a sequence of *units*, in the order in which its forward calls them: the members
of its outermost lists (``ModuleList``, ``Sequential``), and the modules with weights next to these.
The sequence is split into stages by number of list members, by cost, or by the user's map.

Modules without weights and buffers belong to no stage and run wherever they are called. Weights
directly on a module around the units (a position embedding on the model itself) are on every stage,
since their users are unknown, and so are embeddings that have several names (of an encoder and a
decoder).
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.pipeline.balance import API_NAME, count_flops, split_by_cost, split_evenly
from pdrun.parallel.pipeline.call_order import find_weight_reads, sort_by_call

Globs = Mapping[str, int]

BALANCE_HINT = '"layers", "parameters", "flops" or {glob: cost}'


@dataclass
class StageSplit:
    """
    A model split into stages.

    Attributes:
        stage_count: number of stages.
        unit_stages: stage of each unit, in the order of the model.
        costs: of each unit, in the unit of the balance.
        loose_weights: weights outside of units: names, and the stages of each.
        free_modules: modules that run wherever they are called.
    """

    stage_count: int
    unit_stages: dict[str, int]
    costs: dict[str, float]
    loose_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    free_modules: tuple[str, ...] = ()

    @property
    def cost_shares(self) -> tuple[float, ...]:
        """Share of the cost of each stage; they add up to 1."""
        total = sum(self.costs.values()) or 1.0
        sums = [
            sum(self.costs[name] for name, at in self.unit_stages.items() if at == stage)
            for stage in range(self.stage_count)
        ]
        return tuple(value / total for value in sums)

    def holders_of(self, weight: str) -> tuple[int, ...]:
        """Return the stages that have a weight under this name."""
        if weight in self.loose_weights:
            return self.loose_weights[weight]
        return tuple(
            stage for unit, stage in self.unit_stages.items() if weight.startswith(f"{unit}.")
        )

    def modules_of(self, stage: int) -> list[str]:
        """Return the names of a stage's units."""
        return [name for name, at in self.unit_stages.items() if at == stage]


def split_model(
    model: nn.Module,
    stages: int,
    by: Globs | None = None,
    balance: str | Mapping[str, float] = "layers",
    shared: Mapping[str, Sequence[int]] | Sequence[str] = (),
    sample: Any = None,
) -> StageSplit:
    """
    Split a model into stages.

    Args:
        by: stage of modules or loose weights, by glob; other units go with the unit before them.
        balance: "layers": members of lists, evenly; "parameters" or "flops": smallest possible
            largest number of weights or operations; or the cost of units by glob, 0 for those that
            match none.
        shared: weights that other modules than their own use, by glob: stages that have them, too
            (of a
            sequence: the last).
        sample: a batch, for "flops".

    Raises:
        UsageError: names that match nothing, stages that do not exist or get nothing, or fewer
        units
            than stages.
    """
    if by is not None and balance != "layers":
        raise UsageError(
            "stages= and balance= cannot be combined: stages= sets the stage of each module",
            where=API_NAME,
        )
    stage_map = _StageMap(by or {}, model)
    names, free, loose = _find_units(model, stage_map)
    costs = _unit_costs(model, names, balance, sample)
    if by is not None:
        units, pinned = _assign_by_map(model, names, loose, stages, stage_map)
    else:
        units = _assign_by_cost(model, names, stages, costs, balance)
        pinned = {}
    for stage in range(stages):
        if stage not in units.values():
            raise UsageError(
                f"stage {stage} of {stages} has no module",
                where=API_NAME,
                hint="every stage needs one",
            )
    every = tuple(range(stages))
    held = {name: (pinned[name],) if name in pinned else every for name in loose}
    found = StageSplit(stages, units, costs, held, tuple(free))
    _add_shared(model, found, shared)
    if not shared:
        # read beside its module, as the logits of h @ self.emb.weight.T do: most often at the end
        for name in find_weight_reads(model, list(units)):
            if name not in found.loose_weights:
                own = units[next(unit for unit in units if name.startswith(f"{unit}."))]
                found.loose_weights[name] = tuple(sorted({own, stages - 1}))
    return found


def _is_list(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0
    return is_list and not isinstance(module, ParametrizationList)


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _StageMap:
    """A user's map from globs to stages; the stage of a module applies to all modules inside it."""

    def __init__(self, by: Globs, model: nn.Module) -> None:
        self.by = by
        self._known: dict[str, tuple[str | None, bool, frozenset[str]]] = {}
        self._names = (
            [name for name, _ in model.named_modules(remove_duplicate=False) if name] if by else []
        )

    def stage_of(self, name: str) -> int | None:
        """
        Return the stage of a module or weight, by its own name or that of a module around it.

        An exact name has priority over a glob, an earlier glob over a later one. A glob that
        matches a module around it as well (the ``*`` of "blocks.*" matches "0.attn", too) applies
        there only.
        """
        glob, _, _ = self._match_globs(name)
        return None if glob is None else self.by[glob]

    def _match_globs(self, name: str) -> tuple[str | None, bool, frozenset[str]]:
        """
        Return the glob of a module, whether it is an exact name, and all globs that match it or a
        module around it.
        """
        if not name:
            return None, False, frozenset()
        if name not in self._known:
            glob, spelt, seen = self._match_globs(name.rpartition(".")[0])
            new = [
                other for other in self.by if other not in seen and fnmatch.fnmatchcase(name, other)
            ]
            order = list(self.by)
            if name in self.by:
                glob = name
                spelt = True
            elif new and (glob is None or spelt or order.index(new[0]) < order.index(glob)):
                glob = new[0]
                spelt = False
            self._known[name] = glob, spelt, seen.union(new)
        return self._known[name]

    def splits_module(self, name: str) -> bool:
        """Whether modules inside this one have other stages than it does itself."""
        inside = [other for other in self._names if other.startswith(f"{name}.")]
        return len({self.stage_of(other) for other in [name, *inside]}) > 1


def _find_units(model: nn.Module, by: _StageMap) -> tuple[list[str], list[str], list[str]]:
    """Return the names of units, of free modules, and of weights outside of both."""
    units: list[str] = []
    free: list[str] = []
    loose: list[str] = []
    repeated = _repeated_embeddings(model)

    def walk(module: nn.Module, name: str, inside: bool) -> None:
        is_mapped = by.stage_of(name) is not None
        if not is_mapped and id(module) in repeated:
            free.append(name)
            loose.extend(f"{name}.{own}" for own, _ in module.named_parameters())
            return
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and not is_mapped:
            # never called: weights of the module around it
            loose.extend(f"{name}.{own}" for own, _ in module.named_parameters())
            return
        callable_ = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if is_mapped and callable_ and not by.splits_module(name):
            units.append(name)
        elif not _has_state(module) and not (is_mapped and by.splits_module(name)):
            free.append(name)
        elif (
            not name
            or not callable_
            or by.splits_module(name)
            or (not inside and _holds_list(module))
        ):
            loose.extend(
                f"{name}.{own}" if name else own
                for own, _ in module.named_parameters(recurse=False)
            )
            # next to the lists of the layers, a module is one unit, whatever it has inside
            is_beside = _has_layer_lists(module)
            for child, each in module._modules.items():
                if each is not None:
                    is_inside = inside or _is_list(module) or (is_beside and not _is_list(each))
                    walk(each, f"{name}.{child}" if name else child, is_inside)
        else:
            units.append(name)

    walk(model, "", False)
    return sort_by_call(model, units), free, loose


def _has_layer_lists(module: nn.Module) -> bool:
    """Whether most weights of a module are in lists that it has itself."""
    sizes = [
        (isinstance(child, nn.ModuleList), sum(param.numel() for param in child.parameters()))
        for child in module.children()
    ]
    in_lists = sum(size for is_list, size in sizes if is_list)
    return bool(2 * in_lists > sum(size for _, size in sizes))


def _repeated_embeddings(model: nn.Module) -> set[int]:
    """Return the ids of embeddings that the model has under several names."""
    counts = Counter(
        id(module)
        for _, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    )
    return {key for key, count in counts.items() if count > 1}


def _holds_list(module: nn.Module) -> bool:
    """Whether a module is a list with weights, or has one below it."""
    return any(_is_list(each) and _has_state(each) for each in module.modules())


def _unit_costs(
    model: nn.Module, names: Sequence[str], balance: str | Mapping[str, float], sample: Any
) -> dict[str, float]:
    if balance == "flops":
        return count_flops(model, names, sample)
    sizes = {
        name: float(sum(param.numel() for param in model.get_submodule(name).parameters()))
        for name in names
    }
    if isinstance(balance, str):
        if balance not in ("layers", "parameters"):
            raise UsageError(f"balance={balance!r}", where=API_NAME, hint=BALANCE_HINT)
        return sizes
    missing = [glob for glob in balance if not fnmatch.filter(names, glob)]
    if missing:
        raise _unknown_names("balance", missing, names)
    return {
        name: float(
            next((cost for glob, cost in balance.items() if fnmatch.fnmatchcase(name, glob)), 0.0)
        )
        for name in names
    }


def _assign_by_cost(
    model: nn.Module,
    names: list[str],
    stages: int,
    costs: dict[str, float],
    balance: str | Mapping[str, float],
) -> dict[str, int]:
    if balance != "layers":
        parts = split_by_cost([costs[name] for name in names], stages)
        return {names[i]: stage for stage, part in enumerate(parts) for i in part}
    layers = [name for name in names if _is_list(model.get_submodule(name.rpartition(".")[0]))]
    if not layers and len(names) >= stages:
        parts = split_by_cost([costs[name] for name in names], stages)
        return {names[i]: stage for stage, part in enumerate(parts) for i in part}
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no ModuleList or Sequential to split into stages, and"
            f" {len(names)} modules with weights",
            where=API_NAME,
            hint='set the stage of each module with stages={"module": stage, ...}',
        )
    at = {
        layers[i]: stage
        for stage, part in enumerate(split_evenly(len(layers), stages))
        for i in part
    }
    found = {}
    stage = 0
    for name in names:
        stage = found[name] = at.get(name, stage)
    return found


def _assign_by_map(
    model: nn.Module, names: list[str], loose: list[str], stages: int, stage_map: _StageMap
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the stages of units, and of loose weights that the map names."""
    for glob, stage in stage_map.by.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
            raise UsageError(
                f"{glob!r} has stage {stage!r}, and the stages are 0 to {stages - 1}",
                where=API_NAME,
            )
    known = [*(name for name, _ in model.named_modules(remove_duplicate=False) if name), *loose]
    missing = [glob for glob in stage_map.by if not fnmatch.filter(known, glob)]
    if missing:
        raise _unknown_names("stages", missing, known)
    wanted = [stage_map.stage_of(name) for name in names]
    at = next((stage for stage in wanted if stage is not None), 0)
    found = {}
    for name, mine in zip(names, wanted, strict=True):
        at = found[name] = at if mine is None else mine
    pinned = {name: stage_map.stage_of(name) for name in loose}
    return found, {name: mine for name, mine in pinned.items() if mine is not None}


def _unknown_names(what: str, missing: Sequence[str], known: Sequence[str]) -> UsageError:
    hints = " ".join(filter(None, (did_you_mean(name, known) for name in missing)))
    hints = hints or f"there are, for example, {', '.join(known[:4])}"
    listed = ", ".join(repr(name) for name in missing)
    return UsageError(
        f"{what}: {listed} match{'es' * (len(missing) == 1)} nothing in the model",
        where=API_NAME,
        hint=hints,
    )


def _add_shared(
    model: nn.Module, found: StageSplit, shared: Mapping[str, Sequence[int]] | Sequence[str]
) -> None:
    """Add stages to weights that several stages use."""
    if isinstance(shared, str):
        shared = (shared,)
    wanted = (
        shared if isinstance(shared, Mapping) else dict.fromkeys(shared, (found.stage_count - 1,))
    )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [glob for glob in wanted if not fnmatch.filter(names, glob)]
    if missing:
        raise _unknown_names("shared", missing, names)
    for glob, extra in wanted.items():
        for stage in extra:
            if not 0 <= stage < found.stage_count:
                last = found.stage_count - 1
                what = f"{glob!r} is shared with stage {stage}, and the stages are 0 to {last}"
                raise UsageError(what, where=API_NAME)
        for name in fnmatch.filter(names, glob):
            unit = next((unit for unit in found.unit_stages if name.startswith(f"{unit}.")), None)
            own = found.loose_weights.get(name, ()) if unit is None else (found.unit_stages[unit],)
            found.loose_weights[name] = tuple(sorted({*own, *extra}))
