"""Tensor parallel plans of the transformers library (``base_model_tp_plan``) as module styles."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.tensor.head_counts import HEAD_COUNT_NAMES, find_head_count
from pdrun.parallel.tensor.presets.any_model import style_any_model
from pdrun.parallel.tensor.style import (
    STRATEGY_API,
    AxisNames,
    GridPosition,
    ModuleStyle,
    axis_names,
)
from pdrun.parallel.tensor.styles import col, heads, replicate, row, vocab
from pdrun.parallel.tensor.vocabulary import VocabStyle

ATTENTION_WORDS = ("attn", "attention")
"""Parts of the names of attentions."""
REPLICATED_STYLES = frozenset(
    (
        *("replicated", "replicated_with_grad_allreduce", "mla_kv_a_proj", "packed_colwise"),
        *("packed_rowwise", "moe_tp_experts", "moe_identity_expert", "ep_router", "grouped_gemm"),
    )
)
"""
Styles of transformers whose modules stay on every rank here: experts, routers and what an attention
computes for all heads.
"""


def find_tp_plan(model: nn.Module) -> dict[str, str]:
    """
    Return the plan of a model by globs of its module names; empty without one.

    The plan of a configuration names modules of the base model, that of a model its own.
    """
    found: dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if isinstance(plan, Mapping):
        inside = bool(prefix) and isinstance(getattr(model, prefix, None), nn.Module)
        found.update(
            {f"{prefix}.{glob}" if inside else glob: str(style) for glob, style in plan.items()}
        )
    own = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        found.update({glob: str(style) for glob, style in own.items()})
    return found


def translate_tp_plan(
    model: nn.Module, plan: Mapping[str, str], axis: AxisNames, gather: bool
) -> dict[str, ModuleStyle]:
    """
    Return the rules of a plan. Names are those of modules, without globs.

    Attentions get the style heads if a linear module inside is sharded on its input. Weights inside
    that the plan does not name belong to a rank's heads, or are computed on every rank for them.

    Raises:
        UsageError: the plan has a style that is not known here.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    rules: dict[str, ModuleStyle] = {}
    for glob, style in plan.items():
        for name in fnmatch.filter(modules, glob):
            found = _translate_style(style, modules[name], axis, gather)
            if found is not None:
                rules[name] = found
    _share_ties(model, rules)
    attentions = {
        name.rpartition(".")[0]
        for name, style in rules.items()
        if style == row(axis)
        and any(word in name.rpartition(".")[0].rpartition(".")[2] for word in ATTENTION_WORDS)
    }
    for name in attentions:
        if not _divides_by_heads(name, modules[name], rules, axis):
            # such as a gate in the output of q: computed on every rank, from gathered outputs
            _drop_inside(name, rules)
            rules.update(style_any_model(model, axis, inside=name))
            continue
        count = find_head_count(name, modules[name], None, HEAD_COUNT_NAMES)
        rules[name] = heads(axis)
        _style_rest(modules[name], name, rules, axis, count or 0)
    return rules


def _divides_by_heads(
    name: str, module: nn.Module, rules: Mapping[str, ModuleStyle], axis: AxisNames
) -> bool:
    """Whether the linear modules that a plan names in an attention are by heads."""
    names = axis_names(axis)
    position = GridPosition(Grid(names, (1,) * len(names)), 0)
    prefix = f"{name}."
    inside = {key[len(prefix) :]: rules[key] for key in rules if key.startswith(prefix)}
    try:
        heads(axis).style_inner_modules(name, module, inside, position)
    except UsageError:
        return False
    return True


def _drop_inside(name: str, rules: dict[str, ModuleStyle]) -> None:
    for key in [key for key in rules if key.startswith(f"{name}.")]:
        del rules[key]


def _translate_style(
    style: str, module: nn.Module, axis: AxisNames, gather: bool
) -> ModuleStyle | None:
    """Return the style for a module; None: it stays on every rank."""
    if style in REPLICATED_STYLES:
        return None
    if style == "embedding_rowwise" and isinstance(module, nn.Embedding):
        return vocab(axis, gather=gather)
    if not isinstance(module, nn.Linear):
        return None
    styles: dict[str, ModuleStyle] = {
        "colwise": col(axis),
        "rowwise": row(axis),
        "colwise_gather_output": col(axis, gather=True),
        "colwise_rep": col(axis, gather=True),
        "rowwise_split_input": row(axis, cut=True),
        "rowwise_rep": row(axis, cut=True),
    }
    if style not in styles:
        raise UsageError(
            f"the plan of transformers has the style {style!r}, which is not known here",
            where=STRATEGY_API,
            hint=f"write a Strategy({{...}}); known are {', '.join(styles)}",
        )
    return styles[style]


def _share_ties(model: nn.Module, rules: dict[str, ModuleStyle]) -> None:
    """Give an embedding and its head one style: vocab, whose shards are the same."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        other = first.setdefault(id(param), module)
        if other == module or not (other in rules or module in rules):
            continue
        known = [rules[one] for one in (module, other) if one in rules]
        by_vocabulary = [style for style in known if isinstance(style, VocabStyle)]
        rules[other] = rules[module] = (by_vocabulary or [vocab(known[0].axis)])[0]


def _style_rest(
    attention: nn.Module, name: str, rules: dict[str, ModuleStyle], axis: AxisNames, count: int
) -> None:
    """Give the other weights of an attention their styles."""
    for inner, module in attention.named_modules():
        full = f"{name}.{inner}" if inner else name
        weights = dict(module.named_parameters(recurse=False))
        if not weights or (inner and full in rules):
            continue
        if not inner:
            for key, param in weights.items():
                is_by_head = param.shape[0] == count
                rules[f"{name}.{key}"] = col(axis) if is_by_head else replicate(axis)
        elif isinstance(module, nn.Embedding) and module.embedding_dim == count:
            rules[full] = col(axis)
        else:
            rules[full] = replicate(axis)
