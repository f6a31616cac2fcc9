"""
Prepares the model before it is partitioned: on its device, checked, with the same values on every
rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.arguments import LOCAL_NORMS, Arguments, sequence_slices_of
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.comm.rank_groups import RankGroups, make_rank_groups
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.comm.watchdog import start_watchdog as start_watch
from pdrun.parallel.experts.moe import check_experts, describe_routers, router_params
from pdrun.parallel.model import param_hooks, sync_batchnorm
from pdrun.parallel.model.meta_init import move_model
from pdrun.parallel.model.weights import Weight, check_module_ids, collect_weights
from pdrun.parallel.startup.init import Context
from pdrun.parallel.training.rank_agreement import RankAgreement, describe_model, describe_optimizer
from pdrun.parallel.zero.offload import HostModules, parse_offload
from pdrun.parallel.zero.optimizer import build_optimizer
from pdrun.parallel.zero.settings import PARALLELIZE, Settings

MAX_GROUP_BYTES = 8 << 20
"""Bytes of weights and buffers that are broadcast together when a run is made."""
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Class names of torch's own wrappers; by name, so that they need not be imported."""


@dataclass(frozen=True)
class PreparedModel:
    """The full model's weights and optimizer, and this rank's groups."""

    weights: list[Weight]
    optimizer: torch.optim.Optimizer
    names: dict[int, str]
    """Name of each weight by the identity of its parameter."""
    group_members: list[list[str]]
    """Names of the weights of each optimizer group."""
    place: RankGroups
    is_empty: bool
    """Whether some weights have no memory yet."""
    on_host: HostModules


def prepare_model(
    arguments: Arguments,
    mesh: Mesh,
    settings: Settings,
    job: Context,
    agreement: RankAgreement,
    seconds: float,
) -> PreparedModel:
    """
    Move the model to its device, build the optimizer and the groups, and broadcast rank 0's values.

    Args:
        seconds: limit of each collective.

    Raises:
        UsageError: the result could not equal that of one process, or ranks differ.
    """
    model = arguments.model
    ranks = mesh.row_parts * mesh.cp
    device = torch.device(job.device)
    _check_model(model)
    on_host = _find_host_modules(arguments)
    is_empty = _move_model(model, device, ranks, arguments.sync_batchnorm, on_host.modules)
    if arguments.sync_batchnorm == LOCAL_NORMS and ranks > 1 and job.rank == 0:
        _report_local_norms(model)
    precision = settings.precision
    if ranks > 1 or settings.level or precision.compute or settings.master_device is not None:
        _check_forwards(model)
    keep_own_type: set[int] = set()
    if precision.input_dtype:
        keep_own_type = sync_batchnorm.running_stat_params(model) | set(router_params(model))
    weights = collect_weights(model, settings.layerwise, keep_own_type)
    check_module_ids(settings.fusion, [weight.name for weight in weights])
    optimizer = build_optimizer(arguments.optimizer, [w.param for w in weights if w.is_trained])
    names = {id(weight.param): weight.name for weight in weights}
    members = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    param_hooks.check_hooks(weights, [0] * len(weights), PARALLELIZE)
    check_experts(model, mesh.cp * sequence_slices_of(arguments))
    described = describe_model(model, weights), describe_routers(model)
    agreement.check_equal(chain(*described, describe_optimizer(optimizer)))
    axes = _build_axes(job, mesh, device, seconds)
    place = make_rank_groups(mesh, axes, settings.shard_group, settings.level)
    sync_batchnorm.set_batch_axis(place.axes[mesh.data_axes])
    _broadcast_values(model, weights, place.job)
    return PreparedModel(weights, optimizer, names, members, place, is_empty, on_host)


def store_of(job: Context) -> Any:
    """Return torch's store of the job; None if there is one rank."""
    if job.world_size > 1:
        return dist.distributed_c10d._get_default_store()
    return None


@contextmanager
def claim_model(model: Any) -> Iterator[Callable[[], None]]:
    """
    Mark a model as belonging to a run; inside, an error gives it back.

    Yields a function to call before the model is partitioned: a model that is partially partitioned
    is of no use after an error, and a later call says so.

    Raises:
        UsageError: it belongs to a run, or a call has failed after it began to partition it.
    """
    owner = getattr(model, "_pdrun", "")
    if owner:
        raise UsageError(owner, where=PARALLELIZE, hint="make a new model")
    is_module = isinstance(model, nn.Module)
    if is_module:
        model._pdrun = "model already belongs to a run"

    def begin_partitioning() -> None:
        model._pdrun = "an earlier call has failed while it partitioned this model"

    try:
        yield begin_partitioning
    except BaseException:
        if is_module and model._pdrun == "model already belongs to a run":
            del model._pdrun
        raise
    model._pdrun = "model already belongs to a run"


def _find_host_modules(arguments: Arguments) -> HostModules:
    """
    Return the modules that are computed on the host.

    Raises:
        UsageError: another option cannot be combined with them.
    """
    found = HostModules(arguments.model, parse_offload(arguments.offload).module_globs)
    if not found.names:
        return found
    empty = [param for each in found.modules for param in each.parameters() if param.is_meta]
    refused = {
        "strategy=": arguments.strategy is not None,
        "pipeline=": arguments.pipeline is not None,
        "compile=": bool(arguments.compile),
        "weights made inside pdrun.empty_init()": bool(empty),
    }
    for name, given in refused.items():
        if given:
            what = f"{found.names[0]} is on the host, which {name} does not support"
            raise UsageError(what, where="offload", hint="use one of both")
    return found


def _report_local_norms(model: nn.Module) -> None:
    count = sum(map(sync_batchnorm.is_kept_local, model.modules()))
    print(
        f'pdrun: sync_batchnorm="{LOCAL_NORMS}": {count} normalisations use the rows of one rank'
        " each, as DDP does. Results depend on the number of ranks; running statistics are those of"
        " rank 0",
        file=sys.stderr,
        flush=True,
    )


def _move_model(
    model: nn.Module,
    device: torch.device,
    world: int,
    sync_norms: bool | str,
    on_host: Sequence[nn.Module],
) -> bool:
    """
    Move the model to its device; refuse modules whose result would depend on the number of ranks.

    Return whether some of its weights have no memory yet.
    """
    empty = move_model(model, device, on_host)
    if sync_norms == LOCAL_NORMS:
        sync_batchnorm.keep_local(model)
    elif sync_norms:
        sync_batchnorm.sync_batchnorms(model)
    found = sync_batchnorm.find_unsynced(model) if world > 1 else []
    if found:
        raise UsageError(
            f"{found[0]} normalises with each rank's own rows: {world} ranks would differ from one",
            where=PARALLELIZE,
            hint="use sync_batchnorm=True, .eval() on it, a norm without batch statistics, or"
            f' sync_batchnorm="{LOCAL_NORMS}" for what DDP computes',
        )
    if world > 1:
        _check_frequencies(model)
    return empty


def _check_frequencies(model: nn.Module) -> None:
    """
    Refuse gradients that are divided by how often a word is in a batch: each rank counts its own
    rows.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
            what = f"{name or 'model'}: scale_grad_by_freq=True is not supported on several ranks: "
            what += "it counts each rank's own rows"
            raise UsageError(what, where=PARALLELIZE, hint="apply the weights in the loss")


def _check_forwards(model: nn.Module) -> None:
    """Refuse weights that the forward pass changes: by each rank's own rows, or in a copy."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UsageError(
                f"{name}: max_norm={module.max_norm:g} is not supported: the forward pass would "
                "change weights",
                where=PARALLELIZE,
                hint="limit the norm of the looked-up rows in the model",
            )


def _check_model(model: nn.Module) -> None:
    """Refuse what is no model, and a model of which another wrapper makes a part parallel."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model must be a torch.nn.Module, got {type(model).__name__}", where=PARALLELIZE
        )
    for name, module in model.named_modules():
        found = WRAPPERS.intersection(kind.__name__ for kind in type(module).__mro__)
        if found:
            what = f"{name or 'model'} is in a {sorted(found)[0]}, which handles gradients itself"
            hint = "pass the inner model (.module); optimizer_level= shards over the ranks"
            raise UsageError(what, where=PARALLELIZE, hint=hint)


def _build_axes(job: Context, mesh: Mesh, device: torch.device, timeout: float) -> MeshGroups:
    """Return this rank's groups along the axes; every wait has a limit."""
    world = job.world_size
    rank = job.rank
    watch = start_watch(timeout, rank, world, store_of(job), blocking=device.type == "cpu")
    if world > 1:
        torch_compat.set_timeout(timeout)
    return MeshGroups(mesh.grid, rank, device, watch)


def _broadcast_values(model: nn.Module, weights: list[Weight], axis: ShardedGroup) -> None:
    """Give every rank rank 0's weights and buffers, except layerwise weights."""
    if axis.world == 1:
        return
    values = [
        (weight.name, weight.param.detach())
        for weight in weights
        if not weight.unsynced and weight.param.device.type != "meta"
    ]
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            kind = str(buffer.layout).removeprefix("torch.")
            what = f"buffer {name} is {kind} and cannot be broadcast from rank 0"
            raise UsageError(
                what,
                where=PARALLELIZE,
                hint="use a dense buffer, or an attribute that is not a buffer",
            )
        values.append((name, buffer))
    for group in _group_values(values):
        _broadcast_group(group, axis)


def _group_values(
    values: Iterable[tuple[str, torch.Tensor]],
) -> list[list[tuple[str, torch.Tensor]]]:
    """Put small tensors of one type into groups that are sent together, in their order."""
    groups: list[list[tuple[str, torch.Tensor]]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for name, tensor in values:
        kind = tensor.dtype, tensor.device
        place, size = open_groups.get(kind, (-1, 0))
        size += tensor.nbytes
        if place < 0 or size > MAX_GROUP_BYTES:
            groups.append([])
            place, size = len(groups) - 1, tensor.nbytes
        groups[place].append((name, tensor))
        open_groups[kind] = place, size
    return groups


def _broadcast_group(group: list[tuple[str, torch.Tensor]], axis: ShardedGroup) -> None:
    """Give every rank rank 0's values of some tensors, in place."""
    first, tensor = group[0]
    with torch.no_grad():
        if len(group) == 1:
            axis.broadcast_first(tensor, f"rank 0's {first}")
            return
        flat = torch.cat([each.reshape(-1) for _, each in group])
        axis.broadcast_first(flat, f"rank 0's {first} and {len(group) - 1} more")
        if axis.rank:
            parts = flat.split([each.numel() for _, each in group])
            for (_, each), part in zip(group, parts, strict=True):
                each.copy_(part.view(each.shape))
