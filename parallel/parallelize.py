"""
`pdrun.parallelize`: a model, its optimizer and its loss become a `Run`, which trains them on every
device of the mesh.

Five phases, in this order: check the arguments, build the settings, prepare the model, apply the
partitioning, build the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.arguments import (
    LOCAL_NORMS,
    Arguments,
    build_settings,
    check_arguments,
    check_mesh,
    sequence_slices_of,
    slice_sequences,
)
from pdrun.parallel.auto.degrees.expert_layers import describe_strategy
from pdrun.parallel.auto.inputs import (
    ParallelChoices,
    PlannedCall,
    describe_searched_plan,
    resolve_choices,
)
from pdrun.parallel.auto.measure import measure_steps, read_request
from pdrun.parallel.comm.mesh import Mesh, solve_mesh
from pdrun.parallel.compiler.compile import check_combination, compile_modules
from pdrun.parallel.data.batch_slicing import (
    BatchSlicing,
    parse_batch_slicing,
    slice_by_layouts,
)
from pdrun.parallel.interfaces import (
    Cutter,
    InputSharder,
    MeshRefiner,
    PipelineCutter,
    SequenceCutter,
)
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model import param_hooks
from pdrun.parallel.model.meta_init import WeightInitializer
from pdrun.parallel.model.recompute import apply_recompute, parse_recompute
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.partition import (
    PartitionedModel,
    PartitionSpec,
    apply_partitioning,
    multiply_in_fp8,
)
from pdrun.parallel.prepare import PreparedModel, claim_model, prepare_model, store_of
from pdrun.parallel.report.plan_facts import report_plan
from pdrun.parallel.rng.step_rng import StepRNG
from pdrun.parallel.run import Run
from pdrun.parallel.servers.settings import Servers
from pdrun.parallel.startup.init import Context
from pdrun.parallel.startup.init import init as init_process
from pdrun.parallel.training.interleave import InterleavedDriver
from pdrun.parallel.training.loss import ForwardFunction, LossFunction, Objective
from pdrun.parallel.training.loss_check import find_own_loss
from pdrun.parallel.training.rank_agreement import RankAgreement, describe_scheduler
from pdrun.parallel.training.state import RunState
from pdrun.parallel.zero.engine import Engine
from pdrun.parallel.zero.full_tensors import weight_storages
from pdrun.parallel.zero.offload import ActivationOffload, parse_offload
from pdrun.parallel.zero.optimizer import (
    check_elementwise,
    keep_full_weights,
    remap_params,
    shard_param_groups,
)
from pdrun.parallel.zero.settings import PARALLELIZE, Settings, check_above_zero, check_scheduler

if TYPE_CHECKING:
    from pdrun.parallel.servers.served_model import ServedModel

TIMEOUT_SECONDS = 600.0
"""Default limit of a collective."""


def parallelize(
    model: nn.Module,
    optimizer: Any,
    loss: LossFunction | None = None,
    *,
    mesh: Mesh | str | None = None,
    strategy: Cutter | str | None = None,
    pipeline: PipelineCutter | None = None,
    context: SequenceCutter | None = None,
    sample: Any = None,
    forward: ForwardFunction | None = None,
    scheduler: Any = None,
    optimizer_level: int | str = 0,
    shard_group: int | None = None,
    threshold: int | str = 0,
    units: Sequence[str] | None = None,
    accumulate: int = 1,
    copies: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    norm: bool = False,
    gather: str | None = None,
    gradients_mean: bool | str = True,
    recompute: Any = None,
    compile: Any = None,
    precision: Any = None,
    compress: str | None = None,
    comm_fusion: Any = "auto",
    layerwise: Sequence[str] = (),
    dataset_strategy: Any = None,
    sync_batchnorm: bool | str = False,
    exact: bool | None = None,
    native_dropout: bool = False,
    offload: Any = None,
    init: Callable[[nn.Module], Any] | None = None,
    servers: Servers | None = None,
    seed: int = 0,
    timeout: float = TIMEOUT_SECONDS,
) -> Run:
    """
    Build a run of a model. Every rank of the job calls this with the same arguments.

    Args:
        model: any module. It is moved to this rank's device. All ranks start with rank 0's weights.
        optimizer: ``lambda params: AdamW(params, 3e-4)``, called with the model's trained
            parameters, or an optimizer of them. A list of optimizers is used as one: each trains
            its own weights.
        loss: ``loss(output, batch) -> (sum, count)``, or a mean over rows; None if the model
            returns that.
        mesh: the devices; default: all of them on the data axis. "auto" searches the degrees,
            and what else a plan decides: optimizer_level, gather, accumulate, recompute and
            pipeline. A plan file gives them. Arguments that are not at their default are fixed.
        strategy: shards operators over the tensor axes of the mesh; "auto": as a search chooses
            (`pdrun.Auto`), or a plan file.
        pipeline: cuts the model into stages over pp, and defines their schedule.
        context: lets attention see full sequences if each rank along cp has a part.
        sample: a batch, for a strategy that needs shapes.
        forward: ``forward(model, batch) -> output``; default: see
            `pdrun.parallel.training.loss.call_model`.
        scheduler: ``lambda optimizer: LRScheduler``. It steps once per step, and is saved and
            loaded with the run. A scheduler whose step needs a number (ReduceLROnPlateau) is made
            of ``run.optimizer`` and called by the loop.
        optimizer_level: 0: every rank trains all weights; 1: optimizer state is sharded over the
            ranks; 2: gradients too; 3: weights too.
        shard_group: ranks that share one set of shards (a divisor of the ranks); default: all.
        threshold: weights of fewer bytes are not sharded; or a text such as "64KB", MindSpore's
            default. Nor is a weight whose attribute ``parallel_optimizer`` is False.
        units: level 3: globs of the modules whose weights are gathered together; default: members
            of lists of modules.
        gather: level 3: "pass" gathers a unit's weights for one forward or backward. "step" gathers
            them from the first forward of a step to the last backward, and sums gradients over the
            ranks once per step: less traffic, more memory. Default: "step" with a pipeline or
            copies, else "pass".
        accumulate: micro-batches per step.
        copies: 2: two micro-batches side by side, of which one computes while the other waits for a
            collective of a tensor axis or of cp (see `interleave`).
        clip: largest norm of the gradients of all weights together.
        clip_value: largest absolute value of an element of a gradient, after ``clip``.
        norm: compute `Metrics.grad_norm` without clipping too.
        gradients_mean: divide gradients by the loss's global count; False: gradients of the sum;
            "accumulated": gradients of the mean times the micro-batches, MindSpore's sum.
        recompute: "full", "selective", globs, (globs, "selective"), or a dict that can keep
            results of collectives (see `pdrun.parallel.model.recompute`).
        compile: True, globs, or a dict of torch.compile's options: the modules to compile (see
            `pdrun.parallel.compiler.compile`).
        precision: None, "bf16", "fp16", "fp8" (bf16, with linear modules that multiply in fp8), a
            `pdrun.Precision` or a `pdrun.Fp8`.
        compress: "bf16" or "fp16": type of gradients on the network.
        comm_fusion: "auto", MiB, a list of indices, False, MindSpore's dict, or a dict of globs of
            modules and the number of their bucket.
        layerwise: globs of weights that each rank trains without communication.
        dataset_strategy: None (global batches, sliced along dim 0), "data_parallel", "full_batch",
            or a dim for each tensor.
        sync_batchnorm: True uses the statistics of all ranks in batch normalisations, "local" those
            of each rank, as DDP does; without it they are refused.
        exact: fp32 results have the same bits for any number of ranks with the same slices, and for
            every level. Default: on CPUs only, because it costs an ordered sum over ranks for each
            micro-batch.
        native_dropout: use torch's generators for dropout: faster on GPUs, equal for equal slices
            only.
        offload: "optimizer", "activations", "all" or a `pdrun.Offload`: what is kept on the host,
            or in files. ``{"emb": "host"}``: modules that are computed on the host, where their
            weights, gradients and optimizer state are.
        init: for weights made inside `pdrun.empty_init`: initialises a module's own parameters;
            default: its reset_parameters.
        servers: which weights are on parameter servers, with their optimizers; the others are
            summed over the ranks. In a process without servers their tables are in its memory.
        seed: of dropout, of the loader's order and of the model's random numbers.
        timeout: seconds that a collective may take.

    Raises:
        UsageError: an argument is wrong, or the result could not equal that of one process; gives
            the reason.
    """
    given = ParallelChoices(
        mesh,
        strategy,
        pipeline,
        optimizer_level,
        shard_group,
        accumulate,
        copies,
        gather,
        recompute,
    )
    call = PlannedCall(model, optimizer, sample, precision, forward, compile)
    choices = resolve_choices(given, call, lambda: init_process().world_size)
    arguments = Arguments(
        model=model,
        optimizer=optimizer,
        loss=loss,
        mesh=choices.mesh,
        strategy=choices.strategy,
        pipeline=choices.pipeline,
        context=context,
        sample=sample,
        forward=forward,
        scheduler=scheduler,
        optimizer_level=choices.optimizer_level,
        shard_group=choices.shard_group,
        threshold=threshold,
        units=units,
        accumulate=choices.accumulate,
        copies=choices.copies,
        clip=clip,
        norm=norm,
        gather=choices.gather,
        gradients_mean=gradients_mean,
        recompute=choices.recompute,
        compile=compile,
        precision=precision,
        compress=compress,
        comm_fusion=comm_fusion,
        layerwise=layerwise,
        dataset_strategy=dataset_strategy,
        sync_batchnorm=sync_batchnorm,
        exact=exact,
        native_dropout=native_dropout,
        offload=offload,
        init=init,
        servers=servers,
        seed=seed,
    )
    check_arguments(arguments)
    job = init_process()
    torch_compat.destroy_unused_groups()
    devices, arguments = _choose_mesh(arguments, job.world_size)
    check_mesh(arguments, devices, job.world_size)
    arguments = slice_sequences(arguments, devices)
    settings = build_settings(arguments, devices, torch.device(job.device))
    slicing = _parse_slicing(arguments, devices)
    seconds = check_above_zero("timeout", timeout) or TIMEOUT_SECONDS
    agreement = RankAgreement(job.rank, store_of(job), seconds)
    agreement.check_equal([("clip_value", clip_value)])
    agreement.check_equal(_describe_arguments(arguments, devices, settings, slicing).items())
    with (
        claim_model(model) as begin_partitioning,
        _serve_weights(model, servers, torch.device(job.device)) as served,
    ):
        prepared = prepare_model(arguments, devices, settings, job, agreement, seconds)
        begin_partitioning()
        cuts = PartitionSpec(
            arguments.strategy, arguments.pipeline, arguments.context, sample, forward
        )
        partitioned = apply_partitioning(model, prepared.weights, prepared.place, cuts)
        searched = describe_searched_plan(arguments.strategy, partitioned.model)
        if searched:
            agreement.check_equal(searched)
        state = _build_state(
            arguments, devices, settings, slicing, job, agreement, prepared, partitioned
        )
        if served is not None:
            served.connect_servers(seed, seconds)
            state.served = served
            served.follow_data(state.feed)
    run = Run(state, clip_value=check_above_zero("clip_value", clip_value))
    run.predicted = choices.predicted
    run.expert_axes = describe_strategy(arguments.strategy)
    run.topology = getattr(arguments.strategy, "topology", None)
    report_plan(state, run.predicted, given, arguments, inspect.signature(parallelize))
    measured = read_request()
    if measured is not None:
        measure_steps(measured, run.step, sample, torch.device(job.device))
    return run


def _choose_mesh(arguments: Arguments, world: int) -> tuple[Mesh, Arguments]:
    """Return the mesh that the strategy needs, and the arguments with the strategy for it."""
    mesh = arguments.mesh
    strategy = arguments.strategy
    inputs = arguments.dataset_strategy
    if isinstance(strategy, InputSharder) and _has_layouts(inputs):
        strategy = strategy.with_inputs(tuple(inputs))
    if isinstance(strategy, MeshRefiner):
        mesh, strategy = strategy.refine_mesh(arguments.model, mesh, world)
    return mesh or solve_mesh(world, {"dp": -1}), replace(arguments, strategy=strategy)


def _has_layouts(dataset_strategy: Any) -> bool:
    """Return whether a dataset strategy has layouts or counts of tensors, not dims of rows."""
    return isinstance(dataset_strategy, Sequence) and any(
        isinstance(entry, (tuple, L, DeviceMatrixLayout)) for entry in dataset_strategy
    )


def _parse_slicing(arguments: Arguments, mesh: Mesh) -> BatchSlicing:
    """Return how a batch is sliced into rows."""
    inputs = arguments.dataset_strategy
    if isinstance(arguments.strategy, InputSharder) and _has_layouts(inputs):
        slicing = slice_by_layouts(inputs, mesh.row_parts)
    else:
        slicing = parse_batch_slicing(inputs, mesh.row_parts)
    return replace(slicing, forward=arguments.forward)


def _serve_weights(
    model: nn.Module, servers: Servers | None, device: torch.device
) -> AbstractContextManager[ServedModel | None]:
    """Return the context manager in which served weights are not in the model."""
    if servers is None:
        return nullcontext()
    from pdrun.parallel.servers.served_model import serve_weights  # with ssl and sockets

    return serve_weights(model, servers, device)


def _describe_arguments(
    arguments: Arguments, mesh: Mesh, settings: Settings, slicing: BatchSlicing
) -> dict[str, Any]:
    """Return what must be equal on all ranks, by the names that the user knows."""
    offload = parse_offload(arguments.offload)
    return {
        "mesh": str(mesh),
        **_settings_by_option(settings),
        "copies": arguments.copies,
        "seed": arguments.seed,
        "strategy": arguments.strategy,
        "pipeline": arguments.pipeline,
        "context": arguments.context,
        "recompute": arguments.recompute,
        "compile": arguments.compile,
        "dataset_strategy": slicing,
        "native_dropout": arguments.native_dropout,
        "sync_batchnorm": arguments.sync_batchnorm,
        "offload": (
            offload.optimizer,
            offload.activations,
            offload.least,
            offload.module_globs,
        ),
        "servers": repr(arguments.servers),
    }


def _recompute_operators(
    arguments: Arguments, model: nn.Module, compiled: Sequence[str], modules: Sequence[str]
) -> list[str]:
    """Recompute the single operators that ``recompute=`` names; return their names."""
    if not isinstance(arguments.recompute, Mapping) or "operators" not in arguments.recompute:
        return []
    engine = find_engine(model)
    refused = {
        "without strategy=pdrun.Operators(...)": engine is None,
        "with compile=": bool(compiled),
        "with activations on the host": parse_offload(arguments.offload).activations,
    }
    for name, is_given in refused.items():
        if is_given:
            what = f"single operators cannot be recomputed {name}"
            raise UsageError(what, where="recompute", hint='name modules: {"modules": "blocks.*"}')
    assert engine is not None
    return engine.recompute_operators(parse_recompute(arguments.recompute).operators, modules)


def _build_state(
    arguments: Arguments,
    mesh: Mesh,
    settings: Settings,
    slicing: BatchSlicing,
    job: Context,
    agreement: RankAgreement,
    prepared: PreparedModel,
    partitioned: PartitionedModel,
) -> RunState:
    """Build the engine, move the optimizer to what this rank trains, and collect the state."""
    device = torch.device(job.device)
    optimizer = prepared.optimizer
    remap_params(optimizer, prepared.names, partitioned.weights)
    fill = _build_filler(arguments, prepared, partitioned)
    if settings.level and mesh.row_parts * mesh.cp > 1:
        keep_full_weights(optimizer, partitioned.weights, device)
    elif partitioned.original is not None:
        check_elementwise(optimizer, device, tiles_only=True)
    # once more, for the weights that are sharded now
    param_hooks.check_hooks(partitioned.weights, [0] * len(partitioned.weights), PARALLELIZE)
    recompute = arguments.recompute
    defers = partitioned.driver.splits_backward
    fp8 = multiply_in_fp8(partitioned, prepared.place, settings.precision.fp8)
    prepared.on_host.wrap_forwards(device)
    compiled = compile_modules(partitioned.model, arguments.compile, defers)
    recomputed = apply_recompute(partitioned.model, recompute, prepared.place.axes)
    recomputed += _recompute_operators(arguments, partitioned.model, compiled, recomputed)
    check_combination(compiled, recompute, recomputed)
    engine = _build_engine(settings, prepared, partitioned, fill)
    shard_param_groups(optimizer, engine.trained_parts)
    scheduler = arguments.scheduler
    if callable(scheduler):
        scheduler = scheduler(optimizer)
    check_scheduler(scheduler)
    agreement.check_equal(describe_scheduler(scheduler))
    offload = parse_offload(arguments.offload)
    saver = None
    if offload.activations:
        saver = ActivationOffload(device, offload.least, weight_storages(engine))
    return RunState(
        job,
        mesh,
        engine,
        optimizer,
        Objective(
            partitioned.model,
            arguments.loss,
            arguments.forward,
            find_own_loss(arguments.model),
            is_split=mesh.row_parts * settings.accumulate > 1,
            checks_form=mesh.size == mesh.row_parts * mesh.pp
            and sequence_slices_of(arguments) == 1,
        ),
        StepRNG(arguments.seed, arguments.native_dropout),
        slicing,
        scheduler,
        original_model=partitioned.original,
        driver=InterleavedDriver(arguments.copies) if arguments.copies > 1 else partitioned.driver,
        copies=arguments.copies,
        sequence_slicer=arguments.context,
        agreement=agreement,
        group_members=prepared.group_members,
        recompute=recompute,
        recomputed_modules=recomputed,
        compiled_modules=compiled,
        fp8=fp8,
        offload=offload,
        activation_offload=saver,
        host_modules=prepared.on_host,
        allows_local_norms=arguments.sync_batchnorm == LOCAL_NORMS,
    )


def _build_engine(
    settings: Settings,
    prepared: PreparedModel,
    partitioned: PartitionedModel,
    fill: Callable[[Sequence[Weight]], None],
) -> Engine:
    units: list[str] = []
    if settings.level == 3:
        units = partitioned.local_units(settings.units)
    return Engine(
        partitioned.model,
        partitioned.weights,
        prepared.place,
        partitioned.holders,
        partitioned.catalogue,
        settings,
        units,
        fill,
    )


def _build_filler(
    arguments: Arguments, prepared: PreparedModel, partitioned: PartitionedModel
) -> Callable[[Sequence[Weight]], None]:
    """Return a function that gives weights without memory their first values."""
    if not prepared.is_empty:
        return lambda weights: None
    model = partitioned.original or arguments.model
    device = prepared.place.data.device
    filler = WeightInitializer(model, device, arguments.seed, arguments.init)
    if partitioned.original is not None:
        filler.use_shards(partitioned.weights)
    return filler.fill_weights


def _settings_by_option(settings: Settings) -> dict[str, Any]:
    """Return the settings by the names of `parallelize`'s arguments."""
    named = {
        "level": "optimizer_level",
        "mean": "gradients_mean",
        "fusion": "comm_fusion",
        "wire_dtype": "compress",
    }
    return {
        named.get(name, name): value
        for name, value in vars(settings).items()
        if name != "master_device"
    }
