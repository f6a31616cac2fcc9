"""
Fills a model that is cut already: each rank reads its shards, one after the other.

On the host there is never more than the rank's own shards and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from pdrun.errors import ConfigError
from pdrun.parallel.inference.expert_files import SplitExpertsSource
from pdrun.parallel.inference.sources import WeightSource
from pdrun.parallel.model.shards import Shard, full_shard, set_shard, shard_of
from pdrun.text import escape_text

NARROWEST_BYTES = 2
"""Of weights that are their own values; narrower ones have scales in other tensors."""
MAX_NAMED = 5
"""Tensors that an error names."""
MAX_SHAPE_LENGTH = 80
"""Characters of a shape in an error."""


@dataclass(frozen=True)
class _Target:
    """A weight or buffer of the model, and its name in the source."""

    name: str
    tensor: torch.Tensor
    shard: Shard
    stored: str


def load_weights(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype | None,
    original: nn.Module | None = None,
) -> list[str]:
    """
    Fill this rank's shards from a source.

    Args:
        model: cut; weights can be on the meta device.
        original: the full model, if this rank has not all of its weights.
        dtype: of floating-point weights; None: the model's.

    Returns:
        The names of tensors that the model has no place for.

    Raises:
        ConfigError: a tensor is missing, or has another shape or kind of type.
    """
    names = list(_all_names(model))
    all_names = names if original is None else list(_all_names(original))
    source = SplitExpertsSource(source, [name for tied in all_names for name in tied])
    targets = _match_names(model, source, names, all_names)
    _check_shapes(targets, source)
    with torch.no_grad():
        for target in targets:
            _fill(target, source, device, dtype)
    used = {target.stored for target in targets}
    prefix = _base_prefix(model)
    spare = [_variants(name, prefix) for tied in all_names for name in tied]
    known = used.union(*spare) if spare else used
    return sorted(set(source.names()) - known)


def _all_names(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of each weight and of each buffer that is saved; tied ones are one."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    yield from names.values()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield [f"{prefix}.{key}" if prefix else key]


def _base_prefix(model: nn.Module) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _variants(name: str, prefix: str) -> list[str]:
    """Return the names that a weight can have in a file: models are saved with and without head."""
    if not prefix:
        return [name]
    return [name, name[len(prefix) :] if name.startswith(prefix) else prefix + name]


def _match_names(
    model: nn.Module, source: WeightSource, all_own: list[list[str]], all_names: list[list[str]]
) -> list[_Target]:
    """
    Return where each weight comes from.

    Args:
        all_own: the names of each of this rank's weights.
        all_names: of those of the full model.
    """
    stored = set(source.names())
    prefix = _base_prefix(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tied = {name: names for names in all_names for name in names}
    targets = []
    missing = []
    for names in all_own:
        # a stage may have one of two weights that are tied in the full model
        known = [*names, *(name for name in tied.get(names[0], ()) if name not in names)]
        candidates = [variant for name in known for variant in _variants(name, prefix)]
        hit = next((name for name in candidates if name in stored), None)
        if hit is None:
            missing.append(names[0])
            continue
        tensor = tensors[names[0]]
        shard = shard_of(tensor) if isinstance(tensor, nn.Parameter) else full_shard(tensor)
        targets.append(_Target(names[0], tensor, shard, hit))
    if missing:
        total = len(missing) + len(targets)
        raise ConfigError(
            f"lacks {len(missing)} of the model's {total} tensors: {_name_some(missing)}",
            where=source.place,
            hint="the weights are those of another model, or of another version of it",
        )
    return targets


def _check_shapes(targets: Iterable[_Target], source: WeightSource) -> None:
    wrong = [
        f"{escape_text(target.stored)} in {source.file_of(target.stored)} has the shape"
        f" {str(list(source.shape_of(target.stored)))[:MAX_SHAPE_LENGTH]}, the model's has"
        f" {list(target.shard.shape)}"
        for target in targets
        if source.shape_of(target.stored) != tuple(target.shard.shape)
    ]
    if wrong:
        hint = "the weights are those of a model with another configuration"
        raise ConfigError("; ".join(_first(wrong)), where=source.place, hint=hint)


def _fill(
    target: _Target, source: WeightSource, device: torch.device, dtype: torch.dtype | None
) -> None:
    value = source.read_shard(target.stored, target.shard)
    wanted = target.tensor.dtype
    is_fp8 = value.is_floating_point() and value.itemsize < min(NARROWEST_BYTES, wanted.itemsize)
    if is_fp8 or value.is_floating_point() != wanted.is_floating_point:
        raise ConfigError(
            f"{escape_text(target.stored)} in {source.file_of(target.stored)} has the type"
            f" {value.dtype}, the model's has {wanted}",
            where=source.place,
            hint="quantised weights are not supported",
        )
    if not isinstance(target.tensor, nn.Parameter):
        target.tensor.copy_(value)
        return
    if dtype is not None and wanted.is_floating_point:
        wanted = dtype
    if target.tensor.device.type != "meta" and target.tensor.dtype == wanted:
        target.tensor.copy_(value)
        return
    filled = nn.Parameter(value.to(device, wanted), requires_grad=False)
    torch.utils.swap_tensors(target.tensor, filled)
    set_shard(target.tensor, target.shard)


def _name_some(names: list[str]) -> str:
    return ", ".join(_first([escape_text(name) for name in names]))


def _first(texts: list[str]) -> list[str]:
    more = len(texts) - MAX_NAMED
    return texts[:MAX_NAMED] + ([f"and {more} more"] if more > 0 else [])
