"""
A strategy: the styles of the modules of a model, by globs of their names.

    Strategy({
        "layers.*.attn.w[qkv]": col("tp"),
        "layers.*.attn.wo": row("tp"),
        "layers.*.attn": heads("tp"),
        "emb|head": vocab("tp"),
    })

A plan is made first. It checks the strategy against the model without changing the model, and finds
every mistake.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import EXPERT_AXIS, FIXED_AXES
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.model.shards import Shard, full_shard, set_shard
from pdrun.parallel.tensor.attention import HeadsStyle
from pdrun.parallel.tensor.linear import ColStyle, SharedColStyle, is_linear
from pdrun.parallel.tensor.sequence_parallel import ReplicateStyle, SeqStyle
from pdrun.parallel.tensor.style import (
    STRATEGY_API,
    AxisNames,
    GridPosition,
    ModuleStyle,
    SharedInput,
    axis_names,
    style_error,
)
from pdrun.parallel.tensor.vocabulary import VocabStyle

WEIGHT_STYLES = (ReplicateStyle, SeqStyle, ColStyle, VocabStyle)
"""Styles of single weights."""


@dataclass(frozen=True)
class ModuleSite:
    """A module, or a single weight, and its style."""

    name: str
    style: ModuleStyle
    module: nn.Module | None


@dataclass(frozen=True)
class ModulePlan:
    """
    What a strategy does to a model.

    Attributes:
        sites: the matched modules and weights, in the model's order.
        shards: this rank's shard of each matched weight, by its full name.
        unmatched: weights without a style; they are replicated.
    """

    sites: tuple[ModuleSite, ...]
    shards: dict[str, Shard]
    unmatched: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the plan as text, one kind of sharding per line."""
        names_by_style: dict[str, list[str]] = {}
        for site in self.sites:
            names_by_style.setdefault(str(site.style), []).append(site.name)
        for style, names in names_by_style.items():
            yield f"{style}: {', '.join(fold_names(names))}"
        if self.unmatched:
            yield f"not matched, replicated: {', '.join(fold_names(self.unmatched))}"


class Strategy:
    """
    Styles by globs of module names.

    Args:
        rules: a style by glob, or by several globs with ``|`` between them. ``*`` matches anything,
            including dots. A glob that matches no module can name weights: for ``replicate`` and
            ``seq``, for ``col`` inside an attention (a weight with one entry per head), and for
            ``vocab`` if the weight is tied to that of a head.
    """

    def __init__(self, rules: Mapping[str, ModuleStyle]) -> None:
        if not isinstance(rules, Mapping) or not all(isinstance(glob, str) for glob in rules):
            raise UsageError(
                f"rules must be a dict of styles by glob, got {rules!r}",
                where=STRATEGY_API,
                hint='{"blocks.*.up": col("tp")}',
            )
        for glob, style in rules.items():
            if not isinstance(style, ModuleStyle):
                raise UsageError(
                    f"the value of {glob!r} must be a style, got {style!r}",
                    where=STRATEGY_API,
                    hint="col, row, vocab, heads, seq or replicate of pdrun.parallel.tensor",
                )
        self.rules = dict(rules)

    def plan(self, model: nn.Module, grid: Grid, rank: int = 0) -> ModulePlan:
        """
        Return what the strategy does to a model. The model does not change.

        Raises:
            UsageError: a glob matches nothing, a module has two styles or one that it cannot have,
                tied weights would be sharded differently, heads do not divide, or a weight needs a
                style.
        """
        for style in self.rules.values():
            for axis in axis_names(style.axis):
                grid.degree(axis)
                if axis in FIXED_AXES and not (axis == EXPERT_AXIS and style.cuts_experts):
                    raise UsageError(
                        f"{axis} is not a tensor axis: weights cannot be sharded over it",
                        where=STRATEGY_API,
                    )
        position = GridPosition(grid, rank)
        sites = _style_attentions(_match_globs(self.rules, model), position)
        shards: dict[str, Shard] = {}
        for site in sites:
            shards.update(_shard_site(site, model, position))
        _check_weights(sites, model)
        _check_ties(model, shards)
        unmatched = tuple(name for name, _ in model.named_parameters() if name not in shards)
        _check_unmatched(sites, unmatched)
        return ModulePlan(tuple(sites), shards, unmatched)

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any = None) -> nn.Module:
        """
        Shard a model in place: its weights become shards, its modules compute with them. Return the
        model.

        Args:
            model: full, with the same weights on all ranks; weights can be on the meta device.
            axes: this rank's groups.
            sample: not used here; strategies that shard by operators need it.

        Raises:
            UsageError: see `plan`.
        """
        plan = self.plan(model, axes.grid, axes.rank)
        sharded: set[int] = set()
        with torch.no_grad():
            for name, shard in plan.shards.items():
                owner, _, key = name.rpartition(".")
                param = model.get_submodule(owner)._parameters[key]
                if param is None or id(param) in sharded:
                    continue  # a tied weight has one shard
                sharded.add(id(param))
                if not shard.is_full:
                    param.grad = None
                    param.data = shard.take_from(param.data)
                set_shard(param, shard)
        inputs = _shared_inputs(plan.sites, axes)
        for site in plan.sites:
            if site.module is not None:
                site.style.apply_to(
                    site.name, site.module, axes[axis_names(site.style.axis)], inputs[site.name]
                )
        return model


# ---- inside -----------------------------------------------------------------


def _match_globs(rules: Mapping[str, ModuleStyle], model: nn.Module) -> list[ModuleSite]:
    """Return the sites in the model's order."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matches: dict[str, tuple[str, ModuleStyle]] = {}
    for rule, style in rules.items():
        for glob in rule.split("|"):
            names = fnmatch.filter(modules, glob)
            if not names and isinstance(style, WEIGHT_STYLES):
                names = fnmatch.filter(params, glob)
            if not names:
                candidates = list(modules)
                if "*" in glob:
                    # layers.3.attn -> layers.*.attn
                    candidates = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules]
                raise UsageError(
                    f"{glob!r} matches no module",
                    where=STRATEGY_API,
                    hint=did_you_mean(glob, candidates),
                )
            for name in names:
                other = matches.setdefault(name, (glob, style))
                if other[1] != style:
                    raise style_error(
                        name,
                        f"it has two styles: {other[0]!r} ({other[1]}) and {glob!r} ({style})",
                        "make one of the globs narrower",
                    )
    sites: list[ModuleSite] = []
    seen: dict[int, ModuleSite] = {}
    for name in [*modules, *params]:
        if name not in matches:
            continue
        site = ModuleSite(name, matches[name][1], modules.get(name))
        first = site
        if site.module is not None:
            first = seen.setdefault(id(site.module), site)
        if first.style != site.style:
            raise style_error(
                name, f"it is the same module as {first.name}, which has another style"
            )
        if first is site:
            sites.append(site)
    return sites


def _style_attentions(sites: list[ModuleSite], position: GridPosition) -> list[ModuleSite]:
    """Return the sites with the styles that attentions give to their linear modules."""
    changed: dict[str, ModuleStyle] = {}
    for site in sites:
        if isinstance(site.style, HeadsStyle) and site.module is not None:
            prefix = f"{site.name}."
            inside = {
                other.name[len(prefix) :]: other.style
                for other in sites
                if other.name.startswith(prefix)
            }
            styles = site.style.style_inner_modules(site.name, site.module, inside, position)
            changed.update({(prefix + key).rstrip("."): style for key, style in styles.items()})
    return [
        ModuleSite(site.name, changed.get(site.name, site.style), site.module) for site in sites
    ]


def _shard_site(site: ModuleSite, model: nn.Module, position: GridPosition) -> dict[str, Shard]:
    """Return the shards of a site's weights, by their full names."""
    if site.module is not None:
        shards = site.style.shard_weights(site.name, site.module, position)
        return {f"{site.name}.{key}": shard for key, shard in shards.items()}
    shape = tuple(model.get_parameter(site.name).shape)
    if isinstance(site.style, (ColStyle, VocabStyle)):
        return {site.name: position.shard_weight(site.name, shape, 0, site.style.axis)}
    return {site.name: position.keep_full(shape, site.style.axis)}


def _check_weights(sites: list[ModuleSite], model: nn.Module) -> None:
    """Raise UsageError if a single weight is sharded whose module would not know."""
    attentions = [site.name for site in sites if isinstance(site.style, HeadsStyle)]
    params = dict(model.named_parameters(remove_duplicate=False))
    owners = {
        id(params[name])
        for site in sites
        if site.module is not None and isinstance(site.style, VocabStyle)
        for name in (f"{site.name}.weight", f"{site.name}.bias")
        if name in params
    }
    for site in sites:
        if site.module is not None:
            continue
        if isinstance(site.style, VocabStyle) and id(params[site.name]) not in owners:
            raise style_error(
                site.name,
                "it is not tied to a weight of a head or an embedding with the style vocab",
                "vocab is for modules; of weights, for other names of theirs",
            )
        is_inside = any(site.name.startswith(f"{name}.") for name in attentions)
        if isinstance(site.style, ColStyle) and not is_inside:
            raise style_error(
                site.name,
                "it is a weight outside of an attention with the style heads",
                "col is for linear modules and embeddings; of weights, for those with one entry per"
                " head",
            )


def _check_ties(model: nn.Module, shards: dict[str, Shard]) -> None:
    """Raise UsageError if a tied weight would be sharded differently under its names."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if shards.get(name, full_shard(param)) != shards.get(other, full_shard(param)):
            raise style_error(
                name,
                f"it is tied to {other}, which is sharded differently",
                "use one style for both: vocab(axis) for an embedding and its head",
            )


def _check_unmatched(sites: list[ModuleSite], unmatched: tuple[str, ...]) -> None:
    """Raise UsageError if a weight without a style could have partial gradients."""
    attentions = [site for site in sites if isinstance(site.style, HeadsStyle)]
    for name in unmatched:
        for site in attentions:
            if name.startswith(f"{site.name}."):
                raise style_error(
                    name,
                    f"it has no style, but {site.name} is sharded by heads",
                    f"replicate({site.style.axis!r}) if it works on a rank's heads, replicate() if"
                    " it works on all",
                )
    region = next((site for site in sites if _shards_sequence(site.style)), None)
    if region is not None and unmatched:
        raise style_error(
            unmatched[0],
            f"it has no style, but {region.name} shards the sequence",
            "seq(axis) if it works on shards of the sequence, replicate() if on full sequences",
        )


def _shards_sequence(style: ModuleStyle) -> bool:
    return getattr(style, "sequence", None) is not None or (
        isinstance(style, SeqStyle) and style.cut
    )


def _shared_inputs(sites: tuple[ModuleSite, ...], axes: MeshGroups) -> dict[str, SharedInput]:
    """
    Return the input of each site: linear modules of one parent with equal sharding share one.

    Modules whose attention brings in the input use none. They must not be counted: a shared input
    keeps its result until its last member has used it.
    """
    groups: dict[tuple[str, AxisNames, int | None], list[str]] = {}
    for site in sites:
        style = site.style
        parent = site.name.rpartition(".")[0]
        is_column_style = isinstance(style, (ColStyle, SharedColStyle)) and is_linear(site.module)
        sequence: int | None = getattr(style, "sequence", None)
        if getattr(style, "is_input_gathered", False):
            group = site.name
        elif is_column_style:
            group = parent
        else:
            group = f"{site.name}."
        groups.setdefault((group, style.axis, sequence), []).append(site.name)
    inputs = {}
    for (_, axis, dim), members in groups.items():
        inputs.update(
            dict.fromkeys(members, SharedInput(axes, axis_names(axis), dim, len(members)))
        )
    return inputs


def fold_names(found: Iterable[str]) -> list[str]:
    """Return names in which the first number is a range: layers.0-3.wq."""
    ranges: dict[tuple[str, str], list[str]] = {}
    for name in found:
        pieces = name.split(".")
        digits = [index for index, piece in enumerate(pieces) if piece.isdigit()]
        position = (digits or [len(pieces)])[0]
        ranges.setdefault(
            (".".join(pieces[:position]), ".".join(pieces[position + 1 :])), []
        ).extend(pieces[position : position + 1])
    folded = []
    for (head, tail), numbers in ranges.items():
        number_range = "-".join(dict.fromkeys(numbers[:1] + numbers[-1:]))
        folded.append(".".join(piece for piece in (head, number_range, tail) if piece))
    return folded
