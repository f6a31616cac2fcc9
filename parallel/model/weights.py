"""
The weights of a model as the runtime sees them, and the buckets in which they are communicated.

Each parameter is one weight, however often it is used. A *bucket* is reduced, gathered and sharded
together. Below level 3 buckets are filled by size in the expected order of gradients (the reverse
of registration). At level 3 a bucket is one *unit* of the model: a module whose weights are
gathered just before it runs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.comm.mesh import EXPERT_AXIS
from pdrun.parallel.model.shards import Shard, shard_of

API_NAME = "pdrun.parallelize"
MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 32 * MIB
"""Default size of a bucket; DDP has 25 MiB, MindSpore 64 MB."""
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that communication starts early."""
UNLIMITED_BYTES = 1 << 60
"""At level 3 a bucket has all weights of a unit, which is gathered as a whole."""
ANY_INDEX = -1
HOST_MARK = "_pdrun_on_host"
"""Attribute of parameters whose module is computed on the host."""


@dataclass(eq=False)
class Weight:
    """One parameter of the model; tied ones are one."""

    name: str
    """The first of its names."""
    param: nn.Parameter
    index: int
    """Position in registration order, in the whole model."""
    shape: tuple[int, ...]
    """Shape of this rank's shard."""
    dtype: torch.dtype
    is_trained: bool
    unsynced: bool = False
    """Excluded from all communication: each rank has its own values."""
    keep_dtype: bool = False
    """Computes in its own type, independent of the precision policy."""
    unit: str = ""
    """Name of the module with which it is gathered at level 3; empty: the model itself."""
    sum_axes: tuple[str, ...] = ()
    """Axes over which its gradients are summed in addition to the data axes."""
    stages: tuple[int, ...] = ()
    """Stages that share it, if there are several: its gradients are summed over them."""
    chunk: int = 0
    """Number of its part of a pipeline stage."""
    chunks: tuple[int, ...] = (0,)
    """The parts of the stage that compute with it."""
    counts_in_norm: bool = True
    """Whether this rank's shard counts in norms: only the first of several equal shards does."""
    needs_full: bool = False
    """Its optimizer needs the full weight: optimizer levels do not shard it."""
    opts_out: bool = False
    """Its ``parallel_optimizer`` is False, MindSpore's attribute: levels do not shard it."""
    shard: Shard = field(init=False)
    """The shard of the full weight on this rank."""

    def __post_init__(self) -> None:
        self.shard = shard_of(self.param)

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """Properties that all weights of a bucket share, in addition to their type."""
        return (
            self.sum_axes,
            self.stages,
            self.chunk,
            self.keep_dtype,
            self.is_expert,
            self.is_on_host,
        )

    @property
    def is_on_host(self) -> bool:
        """Whether it is on the host, where its module computes."""
        return getattr(self.param, HOST_MARK, False)

    @property
    def is_expert(self) -> bool:
        """Whether ranks along ep have other parts of it: its gradients are not summed over ep."""
        return is_on_experts_axis(self.shard)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in its own type."""
        return self.numel * int(self.dtype.itemsize)


def is_on_experts_axis(shard: Shard) -> bool:
    """Whether ranks along ep have other parts of a weight."""
    return EXPERT_AXIS in (*shard.layout.axes, *shard.own_axes)


def collect_weights(
    model: nn.Module, layerwise: Sequence[str] = (), wide: Collection[int] = ()
) -> list[Weight]:
    """
    Return the weights in registration order.

    Args:
        layerwise: globs of weights that are not communicated.
        wide: ids of parameters that compute in their own type.

    Raises:
        UsageError: a glob that matches nothing, or a model without weights to train.
    """
    found = []
    for index, (name, param) in enumerate(model.named_parameters()):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"{name} has no shape yet", where=API_NAME, hint="run the lazy module once before"
            )
        made = Weight(
            name,
            param,
            index,
            tuple(param.shape),
            param.dtype,
            param.requires_grad,
            keep_dtype=id(param) in wide,
            opts_out=getattr(param, "parallel_optimizer", True) is False,
        )
        found.append(made)
    for glob in layerwise:
        hits = [weight for weight in found if fnmatch.fnmatchcase(weight.name, glob)]
        if not hits:
            hint = did_you_mean(glob, [weight.name for weight in found])
            raise UsageError(f"layerwise={glob!r} matches no weight", where=API_NAME, hint=hint)
        for weight in hits:
            weight.unsynced = True
    if not any(weight.is_trained for weight in found):
        raise UsageError("the model has no weight that requires a gradient", where=API_NAME)
    return found


# ---- fusion -----------------------------------------------------------------


@dataclass(frozen=True)
class BucketPolicy:
    """
    How weights are put into buckets: by ``nbytes``, before each of ``first_indices``, or by
    ``module_ids``.
    """

    nbytes: int = DEFAULT_BUCKET_BYTES
    first_indices: tuple[int, ...] | None = None
    is_auto: bool = True
    module_ids: tuple[tuple[str, int], ...] = ()
    """Globs of modules, and the number of the bucket of their weights; 0: one bucket per weight."""

    def id_of(self, name: str) -> int | None:
        """Return the number of a weight's bucket; None: the size decides."""
        parts = name.split(".")
        paths = [".".join(parts[: stop + 1]) for stop in range(len(parts))]
        for glob, number in self.module_ids:
            if fnmatch.filter(paths, glob):
                return number
        return None


def parse_bucket_policy(value: Any, level: int) -> BucketPolicy:
    """
    Return the policy of a user's ``comm_fusion``.

    Args:
        value: "auto"; a number of MiB; a list of indices, each the first weight of a bucket; False
            for one bucket per weight; or MindSpore's form ``{"openstate": True, "allreduce":
            {"mode": "size", "config": 64}}`` with the keys allreduce, reducescatter and allgather
            and the modes auto, size and index; or a dict of globs of modules and the number of
            their bucket (MindSpore's ``set_comm_fusion``): ``{"blocks.[01]": 1, "head": 2}``.
        level: optimizer level: 0 reads ``allreduce``, the others ``reducescatter`` and
            ``allgather``, which must agree.

    Raises:
        UsageError: the value has another form.
    """
    if isinstance(value, Mapping) and value and all(type(each) is int for each in value.values()):
        if not all(isinstance(glob, str) for glob in value) or min(value.values()) < 0:
            raise UsageError(f"{value!r}: globs of modules and numbers from 0", where="comm_fusion")
        base = parse_bucket_policy("auto", level)
        return replace(base, module_ids=tuple(value.items()))
    if isinstance(value, Mapping):
        return _parse_openstate(value, level)
    if value is None or value == "auto":
        return BucketPolicy() if level < 3 else BucketPolicy(nbytes=UNLIMITED_BYTES, is_auto=False)
    if value is False:
        return BucketPolicy(nbytes=0, is_auto=False)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return BucketPolicy(nbytes=int(value * MIB), is_auto=False)
    if isinstance(value, Sequence) and not isinstance(value, str):
        cuts = tuple(value)
        if all(isinstance(cut, int) and cut > 0 for cut in cuts) and list(cuts) == sorted(
            set(cuts)
        ):
            return BucketPolicy(first_indices=cuts, is_auto=False)
        raise UsageError(f"{value!r}: indices must be above 0 and grow", where="comm_fusion")
    raise UsageError(
        f"comm_fusion must be 'auto', MiB, a list of indices or False, got {value!r}",
        where="comm_fusion",
        hint="'auto', MiB, a list of indices or False",
    )


def _parse_openstate(value: Mapping[str, Any], level: int) -> BucketPolicy:
    keys = ("openstate", "allreduce", "reducescatter", "allgather")
    for key in value:
        if key not in keys:
            raise UsageError(
                f"there is no key {key!r}", where="comm_fusion", hint=did_you_mean(key, keys)
            )
    if not value.get("openstate", True):
        return BucketPolicy(nbytes=0, is_auto=False)
    parsed = {}
    for key in keys[1:]:
        entry = value.get(key, {"mode": "auto"})
        mode = entry.get("mode")
        if mode not in ("auto", "size", "index") or (mode == "index" and key != "allreduce"):
            raise UsageError(
                f"{key} has no mode {mode!r}",
                where="comm_fusion",
                hint="auto, size; index for allreduce",
            )
        setting = "auto" if mode == "auto" else entry.get("config")
        parsed[key] = parse_bucket_policy(setting, level)
    if level == 0:
        return parsed["allreduce"]
    if parsed["reducescatter"] != parsed["allgather"] and {"reducescatter", "allgather"} <= set(
        value
    ):
        raise UsageError(
            "reducescatter and allgather must agree: a shard is gathered as it was reduced",
            where="comm_fusion",
        )
    return parsed["reducescatter" if "reducescatter" in value else "allgather"]


def make_buckets(weights: Iterable[Weight], fusion: BucketPolicy) -> list[list[Weight]]:
    """
    Put weights of one type that are summed over the same ranks into buckets, in gradient order.
    """
    kinds: dict[tuple[Any, ...], list[Weight]] = {}
    for weight in weights:
        key = (*weight.bucket_key, fusion.id_of(weight.name))
        kinds.setdefault(key, []).append(weight)
    found = [
        group
        for key, kind in kinds.items()
        for group in _fill_buckets(kind, _policy_of_id(fusion, key[-1]))
    ]
    return sorted(
        found, key=lambda group: -group[-1].index
    )  # a bundle is there with the last of its gradients


def _policy_of_id(fusion: BucketPolicy, number: int | None) -> BucketPolicy:
    """Return how weights with a number of `BucketPolicy.module_ids` are put into buckets."""
    if number is None:
        return fusion
    return BucketPolicy(nbytes=UNLIMITED_BYTES if number else 0, is_auto=False)


def check_module_ids(fusion: BucketPolicy, names: Sequence[str]) -> None:
    """
    Check the globs of ``comm_fusion`` against the names of the full model's weights.

    Raises:
        UsageError: a glob that matches no module with weights.
    """
    for glob, number in fusion.module_ids:
        only = BucketPolicy(module_ids=((glob, number),))
        if all(only.id_of(name) is None for name in names):
            modules = sorted({name.rpartition(".")[0] for name in names})
            hint = did_you_mean(glob, modules)
            what = f"{glob!r} matches no module with weights"
            raise UsageError(what, where="comm_fusion", hint=hint)


def _fill_buckets(weights: Iterable[Weight], fusion: BucketPolicy) -> list[list[Weight]]:
    found: list[list[Weight]] = []
    size = 0
    key = None
    for weight in sorted(weights, key=lambda weight: -weight.index):
        limit = FIRST_BUCKET_BYTES if fusion.is_auto and len(found) == 1 else fusion.nbytes
        if fusion.first_indices is not None:
            now = (weight.dtype, sum(cut <= weight.index for cut in fusion.first_indices))
            fits = now == key
        else:
            now = (weight.dtype, ANY_INDEX)
            fits = now == key and size + weight.nbytes <= limit
        if not found or not fits:
            found.append([])
            size = 0
        found[-1].append(weight)
        size = size + weight.nbytes
        key = now
    return found


# ---- units ------------------------------------------------------------------


def assign_units(model: nn.Module, weights: list[Weight], units: Sequence[str]) -> None:
    """
    Set the unit of each weight.

    A weight of two units belongs to the model as a whole. So does one that several stages share:
    all of them must use the same unit.
    """
    owners: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(unit + ".")), "")
        owners.setdefault(id(param), set()).add(unit)
    for weight in weights:
        mine = owners[id(weight.param)]
        weight.unit = ""
        if len(mine) == len(weight.chunks) == 1 and not weight.stages:
            weight.unit = next(iter(mine))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names of one parameter."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [group for group in names.values() if len(group) > 1]
