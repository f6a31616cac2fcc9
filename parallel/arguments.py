"""
The arguments of `parallelize`: checks without a process group, and the settings that they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.fp8.modules import check_device
from pdrun.parallel.interfaces import (
    CallCutter,
    Cutter,
    PipelineCutter,
    SequenceCutter,
    SequencePipeline,
    StagedCutter,
)
from pdrun.parallel.model.weights import parse_bucket_policy
from pdrun.parallel.servers.settings import Servers, check_served
from pdrun.parallel.training.loss import ForwardFunction, LossFunction
from pdrun.parallel.zero.offload import parse_offload
from pdrun.parallel.zero.precision import parse_precision
from pdrun.parallel.zero.settings import (
    ACCUMULATED,
    PARALLELIZE,
    Settings,
    check_above_zero,
    check_callable,
    check_count,
    check_gather,
    check_globs,
    check_group,
    check_level,
    check_mean,
    check_methods,
    check_scheduler,
    parse_compress,
    parse_threshold,
)

LOCAL_NORMS = "local"
"""``sync_batchnorm=`` for normalisations by the rows of one rank."""


@dataclass(frozen=True)
class Arguments:
    """What the user passed to `parallelize`, under the same names; see there for the meaning."""

    model: nn.Module
    optimizer: Any
    loss: LossFunction | None
    mesh: Mesh | None
    strategy: Cutter | None
    pipeline: PipelineCutter | None
    context: SequenceCutter | None
    sample: Any
    forward: ForwardFunction | None
    scheduler: Any
    optimizer_level: int | str
    shard_group: int | None
    threshold: int | str
    units: Sequence[str] | None
    accumulate: int
    copies: int
    clip: float | None
    norm: bool
    gather: str | None
    gradients_mean: bool | str
    recompute: Any
    compile: Any
    precision: Any
    compress: str | None
    comm_fusion: Any
    layerwise: Sequence[str]
    dataset_strategy: Any
    sync_batchnorm: bool | str
    exact: bool | None
    native_dropout: bool
    offload: Any
    init: Callable[[nn.Module], Any] | None
    servers: Servers | None
    seed: int


def check_arguments(arguments: Arguments) -> None:
    """
    Refuse arguments of a wrong kind, before any process group exists.

    Raises:
        UsageError: names the argument and what it must be.
    """
    mesh = arguments.mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise UsageError(
            f"mesh must be a pdrun.Mesh, got {mesh!r}",
            where=PARALLELIZE,
            hint="use mesh=pdrun.mesh(dp=-1, tp=2)",
        )
    for name, value, methods, hint in (
        (
            "strategy",
            arguments.strategy,
            ("apply",),
            "use strategy=pdrun.Strategy({glob: style}) or pdrun.Operators({name: layout})",
        ),
        ("pipeline", arguments.pipeline, ("apply",), "use pipeline=pdrun.Pipeline(microbatches=8)"),
        ("context", arguments.context, ("apply", "part"), "use context=pdrun.ContextParallel()"),
    ):
        if value is not None:
            check_methods(name, value, methods, hint)
    if arguments.sync_batchnorm not in (True, False, LOCAL_NORMS):
        raise UsageError(
            f"sync_batchnorm must be True, False or {LOCAL_NORMS!r}, got"
            f" {arguments.sync_batchnorm!r}",
            where=PARALLELIZE,
            hint=f"{LOCAL_NORMS!r} uses the rows of one rank each, as DDP does",
        )
    check_callable("loss", arguments.loss, "loss(output, batch) -> (sum, count)")
    check_callable("forward", arguments.forward, "forward(model, batch) -> output")
    check_callable("init", arguments.init, "init(module) fills the module's own parameters")
    if arguments.servers is not None:
        _check_servers(arguments.servers, arguments)
    scheduler = arguments.scheduler
    if not callable(scheduler) and scheduler is not None:
        check_methods(
            "scheduler",
            scheduler,
            ("step", "state_dict"),
            "use scheduler=lambda optimizer: StepLR(optimizer, 100)",
        )
        check_scheduler(scheduler)


def _check_servers(servers: Servers, arguments: Arguments) -> None:
    """Refuse options that served weights do not support."""
    mesh = arguments.mesh
    check_served(
        servers,
        {
            f"mesh={mesh}": mesh is not None and mesh.size != mesh.dp,
            "strategy=": arguments.strategy,
            "pipeline=": arguments.pipeline,
            "context=": arguments.context,
            "copies=": arguments.copies != 1,
            "clip=": arguments.clip,
            "norm=True": arguments.norm,
            "recompute=": arguments.recompute,
            "compile=": arguments.compile,
            "precision=": arguments.precision,
            "offload=": arguments.offload,
            f"gradients_mean={ACCUMULATED!r}": arguments.gradients_mean == ACCUMULATED,
        },
    )


def check_mesh(arguments: Arguments, mesh: Mesh, world: int) -> None:
    """
    Refuse a mesh on which ranks would compute the same, and options that the mesh has no ranks for.

    Args:
        world: ranks of the job.
    """
    if mesh.size != world:
        raise UsageError(
            f"{mesh} needs {mesh.size} devices, the job has {world}", where=PARALLELIZE
        )
    tensor = [axis for axis in mesh.tensor_axes if mesh.degree(axis) > 1]
    for axes, value, name in (
        (tensor, arguments.strategy, "strategy"),
        (mesh.ep > 1 and ["ep"], arguments.strategy, "strategy"),
        (mesh.pp > 1 and ["pp"], arguments.pipeline, "pipeline"),
        (mesh.cp > 1 and ["cp"], arguments.context, "context"),
    ):
        if axes and value is None:
            what = f"{mesh}: ranks along {' and '.join(axes)} would compute the same"
            raise UsageError(what, where=PARALLELIZE, hint=f"pass {name}=")
    copies = check_count("copies", arguments.copies)
    if copies > 1 and arguments.pipeline is not None:
        what = f"copies={copies} is not supported with pipeline=: the schedule overlaps already"
        raise UsageError(what, where=PARALLELIZE, hint="use one of both")
    check_count("seed", arguments.seed, 0)
    if arguments.native_dropout and mesh.size > mesh.row_parts * mesh.pp:
        what = f"native_dropout=True is not supported on {mesh}: torch's generators would drop "
        what += "other elements than in one process"
        raise UsageError(
            what, where=PARALLELIZE, hint="leave it out: dropout is then placed by row and element"
        )


def sequence_slices_of(arguments: Arguments) -> int:
    """Return the parts in which a pipeline gets each sequence; 1: sequences are not sliced."""
    pipeline = arguments.pipeline
    return pipeline.slice_count if isinstance(pipeline, SequencePipeline) else 1


def slice_sequences(arguments: Arguments, mesh: Mesh) -> Arguments:
    """
    Return the arguments with a context that slices sequences, if the pipeline does that.

    Raises:
        UsageError: another option cannot be combined with slices.
    """
    pipeline = arguments.pipeline
    if not isinstance(pipeline, SequencePipeline) or sequence_slices_of(arguments) == 1:
        return arguments
    strategy = arguments.strategy
    refused = {
        f"mesh={mesh}": mesh.cp > 1,
        "strategy=pdrun.Operators": isinstance(strategy, (StagedCutter, CallCutter)),
        "native_dropout=True": arguments.native_dropout,
        "compile=": arguments.compile,
    }
    for name, given in refused.items():
        if given:
            what = f"{name} is not supported with {pipeline.slice_count} slices of sequences"
            raise UsageError(what, where=PARALLELIZE, hint='schedule="1f1b", which slices nothing')
    context = arguments.context or ContextParallel()
    if not isinstance(context, ContextParallel):
        what = f"slices of sequences need a pdrun.ContextParallel, got {type(context).__name__}"
        raise UsageError(what, where=PARALLELIZE, hint="leave context= out")
    context = context.sliced(pipeline.slice_count)
    return replace(arguments, context=context, pipeline=pipeline.with_sequences(context))


def build_settings(arguments: Arguments, mesh: Mesh, device: torch.device) -> Settings:
    """
    Return the engine's settings.

    Raises:
        UsageError: an option is out of range, or two options contradict each other.
    """
    level = check_level(arguments.optimizer_level)
    ranks = mesh.row_parts * mesh.cp
    precision = parse_precision(arguments.precision)
    if precision.fp8 is not None:
        check_device(device, precision.fp8.scales)
    offload = parse_offload(arguments.offload)
    staged = arguments.pipeline is not None
    settings = Settings(
        level=level,
        accumulate=_count_microbatches(arguments) * arguments.copies,
        clip=check_above_zero("clip", arguments.clip),
        norm=arguments.norm or precision.compute == "fp16",
        mean=check_mean(arguments.gradients_mean),
        exact=device.type == "cpu" if arguments.exact is None else arguments.exact,
        shard_group=check_group(arguments.shard_group, ranks, level),
        threshold=parse_threshold(arguments.threshold),
        layerwise=check_globs("layerwise", arguments.layerwise),
        units=None if arguments.units is None else check_globs("units", arguments.units),
        fusion=parse_bucket_policy(arguments.comm_fusion, level),
        wire_dtype=parse_compress(arguments.compress),
        precision=precision,
        master_device=torch.device("cpu") if offload.optimizer else None,
        gather=check_gather(arguments.gather, level, arguments.copies, staged),
    )
    parameters = arguments.model.parameters()
    if arguments.init is not None and all(param.device.type != "meta" for param in parameters):
        raise UsageError(
            "init= requires weights made inside pdrun.empty_init(); this model has none",
            where=PARALLELIZE,
        )
    if arguments.units is not None and level < 3:
        raise UsageError("units= requires optimizer_level=3", where=PARALLELIZE)
    return settings


def _count_microbatches(arguments: Arguments) -> int:
    """Return the micro-batches per step of each rank."""
    pipeline = arguments.pipeline
    accumulate = arguments.accumulate
    if pipeline is None:
        return check_count("accumulate", accumulate)
    if accumulate != 1:
        what = f"accumulate={accumulate!r} is not supported with pipeline="
        raise UsageError(what, where=PARALLELIZE, hint="use Pipeline(microbatches=...)")
    return check_count("microbatches", pipeline.microbatches)
