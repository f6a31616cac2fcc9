"""
`pdrun.parallelize`: a model, its optimizer and its loss become a `Run`, which trains them on every
device of the mesh.

The order in which things are put on a model is visible here and nowhere else: checks, equal starts,
cuts (`partition`), recomputation, the engine, the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat as compat
from pdrun.parallel.comm.groups import Axes
from pdrun.parallel.comm.mesh import DATA, Mesh, solve
from pdrun.parallel.comm.rank_groups import place_on
from pdrun.parallel.comm.sharded import Comm
from pdrun.parallel.comm.watchdog import start as start_watch
from pdrun.parallel.compiler import compile as compiling
from pdrun.parallel.data.batch_slicing import parse as parse_strategy
from pdrun.parallel.model import param_hooks as hooks
from pdrun.parallel.model import recompute as recomputing
from pdrun.parallel.model import sync_batchnorm as norm_sync
from pdrun.parallel.model.meta_init import Filler, move
from pdrun.parallel.model.shards import Cutter, SequenceCutter
from pdrun.parallel.model.weights import Weight, collect, parse_fusion
from pdrun.parallel.partition import Cuts, cut_up
from pdrun.parallel.rng.step_rng import StepRNG
from pdrun.parallel.run import Run
from pdrun.parallel.startup.init import Context
from pdrun.parallel.startup.init import init as join
from pdrun.parallel.training.driver import Pipeline
from pdrun.parallel.training.interleave import Interleaved
from pdrun.parallel.training.loss import Forward, Loss, Objective
from pdrun.parallel.training.rank_agreement import Agreement, of_model, of_optimizer, of_scheduler
from pdrun.parallel.zero import optimizer as retarget
from pdrun.parallel.zero import precision as precisions
from pdrun.parallel.zero.engine import Engine
from pdrun.parallel.zero.full_tensors import storages
from pdrun.parallel.zero.offload import Saver
from pdrun.parallel.zero.offload import parse as parse_offload
from pdrun.parallel.zero.settings import (
    WHERE,
    Settings,
    check_above_zero,
    check_callable,
    check_count,
    check_gather,
    check_globs,
    check_group,
    check_has,
    check_level,
    check_scheduler,
    check_wire,
)

WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""What torch makes models parallel with: names of classes, which this way need not be imported."""
TIMEOUT = 600.0
"""Seconds that a collective may take where nothing is said."""


def parallelize(
    model: nn.Module,
    optimizer: Any,
    loss: Loss | None = None,
    *,
    mesh: Mesh | None = None,
    strategy: Cutter | None = None,
    pipeline: Pipeline | None = None,
    context: SequenceCutter | None = None,
    sample: Any = None,
    forward: Forward | None = None,
    scheduler: Any = None,
    optimizer_level: int | str = 0,
    shard_group: int | None = None,
    threshold: int = 0,
    units: Sequence[str] | None = None,
    accumulate: int = 1,
    copies: int = 1,
    clip: float | None = None,
    norm: bool = False,
    gather: str | None = None,
    gradients_mean: bool = True,
    recompute: Any = None,
    compile: Any = None,
    precision: Any = None,
    compress: str | None = None,
    comm_fusion: Any = "auto",
    layerwise: Sequence[str] = (),
    dataset_strategy: Any = None,
    sync_batchnorm: bool = False,
    exact: bool | None = None,
    native_dropout: bool = False,
    offload: Any = None,
    init: Callable[[nn.Module], Any] | None = None,
    seed: int = 0,
    timeout: float = TIMEOUT,
) -> Run:
    """
    Make a run of a model; every rank of the job calls this with the same arguments.

    Args:
        model: any module; it is moved to this rank's device, and all ranks start from rank 0's
            weights.
        optimizer: ``lambda params: AdamW(params, 3e-4)``, called with the model's trained
            parameters, or an optimizer
            of them.
        loss: ``loss(output, batch) -> (sum, count)``, or a mean over rows; None where the model
            itself returns that.
        mesh: the devices; default: all of them on the data axis.
        strategy: how operators are cut over the tensor axes of the mesh.
        pipeline: how the model is cut into stages over pp, and their schedule.
        context: how attention sees the whole sequence where each rank along cp has a part of it.
        sample: a batch, for a strategy that has to see shapes.
        forward: ``forward(model, batch) -> output``; default: see
            `pdrun.parallel.training.loss.call_model`.
        scheduler: ``lambda optimizer: LRScheduler``; steps once a step, and is saved and resumed
            with the run. One
            whose step wants a number (ReduceLROnPlateau) is made of ``run.optimizer`` and called by the loop.
        optimizer_level: 0 every rank trains all weights; 1 the optimizer's state is cut over the
            ranks; 2 gradients
            too; 3 weights too.
        shard_group: ranks that share one set of shards (a divisor of the ranks); default: all.
        threshold: weights of fewer bytes than this are not cut.
        units: level 3: globs of the modules whose weights are gathered together; default: members
            of lists of modules.
        gather: level 3: "pass" has a unit's weights there for one forward or backward; "step" from
            its first forward
            of a step to its last backward, and sums gradients over the ranks once a step: less traffic, more memory;
            default: "step" beside a pipeline or copies, else "pass".
        accumulate: micro-batches a step.
        copies: 2: each micro-batch is cut in two, of which one computes while the other waits for a
            collective of a
            tensor axis or of cp (see `interleave`).
        clip: largest norm of the gradients of all weights together.
        norm: have `Metrics.grad_norm` without clipping.
        gradients_mean: divide gradients by the loss's global count; False leaves them the gradients
            of the sum.
        recompute: "full", "selective", globs, or (globs, "selective").
        compile: True, globs, or a dict of torch.compile's options: modules that torch.compile makes
            kernels for (see
            `compiling`).
        precision: None, "bf16", "fp16" or a `pdrun.Precision`.
        compress: "bf16" or "fp16": type of gradients on the network.
        comm_fusion: "auto", MiB, a list of indices, False, or MindSpore's dict.
        layerwise: globs of weights that each rank trains by itself, without communication.
        dataset_strategy: None (batches are global, cut along dim 0), "data_parallel", "full_batch",
            or a dim for each
            tensor.
        sync_batchnorm: have batch normalisations use the statistics of all ranks; without it they
            are refused.
        exact: fp32 results have the same bits for any number of ranks that work on the same slices,
            and for every
            level;
            default: on CPUs only, since it costs a sum over ranks for each micro-batch and an order.
        native_dropout: leave dropout to torch's generators: faster on GPUs, equal for equal slices
            only.
        offload: "optimizer", "activations", "all" or a `pdrun.Offload`: what is kept on the host,
            or in files.
        init: for weights made inside `pdrun.empty_init`: fills a module's own parameters; default:
            its
            reset_parameters.
        seed: of dropout, of the loader's order and of what the model draws.
        timeout: seconds that a collective may take.

    Raises:
        UsageError: an argument is wrong, or the result could not equal that of one process; says
            why.
    """
    _check_kinds(mesh, strategy, pipeline, context)
    check_callable("loss", loss, "loss(output, batch) -> (sum, count)")
    check_callable("forward", forward, "forward(model, batch) -> output")
    check_callable("init", init, "init(module) fills the module's own parameters")
    if not callable(scheduler) and scheduler is not None:
        check_has(
            "scheduler",
            scheduler,
            ("step", "state_dict"),
            "scheduler=lambda optimizer: StepLR(optimizer, 100)",
        )
        check_scheduler(scheduler)
    job = join()
    compat.end_groups()
    mesh = mesh or solve(job.world_size, {"dp": -1})
    level = check_level(optimizer_level)
    _check_mesh(mesh, job.world_size, strategy, pipeline, context)
    _check_copies(check_count("copies", copies), pipeline)
    check_count("seed", seed, 0)
    if native_dropout and mesh.size > mesh.dp * mesh.pp:
        what = f"native_dropout=True on {mesh}: torch's generators would drop other elements than in one process"
        raise UsageError(
            what, where=WHERE, hint="leave it out: dropout is then placed by row and element"
        )
    ranks = mesh.dp * mesh.cp
    policy = precisions.parse(precision)
    away = parse_offload(offload)
    device = torch.device(job.device)
    settings = Settings(
        level=level,
        accumulate=_micro_batches(accumulate, pipeline) * copies,
        clip=check_above_zero("clip", clip),
        norm=norm or policy.compute == "fp16",
        mean=gradients_mean,
        exact=device.type == "cpu" if exact is None else exact,
        shard_group=check_group(shard_group, ranks, level),
        threshold=check_count("threshold", threshold, 0),
        layerwise=check_globs("layerwise", layerwise),
        units=None if units is None else check_globs("units", units),
        fusion=parse_fusion(comm_fusion, level),
        wire=check_wire(compress),
        precision=policy,
        home=torch.device("cpu") if away.optimizer else None,
        gather=check_gather(gather, level, copies, pipeline is not None),
    )
    if init is not None and not any(param.device.type == "meta" for param in model.parameters()):
        raise UsageError(
            "init= is for weights made inside pdrun.empty_init(); this model has none", where=WHERE
        )
    if units is not None and level < 3:
        raise UsageError("units= are what level 3 gathers", where=WHERE)
    rows = parse_strategy(dataset_strategy, mesh.dp)
    seconds = check_above_zero("timeout", timeout) or TIMEOUT
    agreement = Agreement(job.rank, _store(job), seconds)
    agreement.check(
        {
            "mesh": str(mesh),
            **_named(settings),
            "copies": copies,
            "seed": seed,
            "strategy": strategy,
            "pipeline": pipeline,
            "context": context,
            "recompute": recompute,
            "compile": compile,
            "dataset_strategy": rows,
            "native_dropout": native_dropout,
            "sync_batchnorm": sync_batchnorm,
            "offload": (away.optimizer, away.activations, away.least),
        }.items()
    )
    empty = _prepare(model, device, ranks, sync_batchnorm)
    if ranks > 1 or level or policy.compute or away.optimizer:
        _check_forwards(model)
    weights = collect(
        model, settings.layerwise, norm_sync.own_weights(model) if policy.inputs else ()
    )
    made = retarget.make(optimizer, [weight.param for weight in weights if weight.trained])
    names = {id(weight.param): weight.name for weight in weights}
    members = [[names[id(param)] for param in group["params"]] for group in made.param_groups]
    hooks.check(weights, [0] * len(weights), WHERE)
    agreement.check(of_model(model, weights))
    agreement.check(of_optimizer(made))
    place = place_on(mesh, _axes(job, mesh, device, seconds), settings.shard_group, level)
    norm_sync.place(place.axes[DATA])
    _start_equal(model, weights, place.job)
    cut = cut_up(model, weights, place, Cuts(strategy, pipeline, context, sample))
    retarget.follow(made, names, cut.weights)
    filler = Filler(cut.original or model, device, seed, init) if empty else None
    if filler is not None and cut.original is not None:
        filler.adopt(cut.weights)
    if level and ranks > 1:
        retarget.check_elementwise(made, device)
    elif cut.original is not None:
        retarget.check_elementwise(made, device, tiles_only=True)
    hooks.check(cut.weights, [0] * len(cut.weights), WHERE)  # those that are cut
    compiled = compiling.apply(cut.model, compile)
    recomputed = recomputing.apply(cut.model, recompute)
    compiling.check(compiled, recompute, recomputed, splits=cut.driver.splits)
    engine = Engine(
        cut.model,
        cut.weights,
        place,
        cut.holders,
        cut.catalogue,
        settings,
        cut.units(settings.units) if level == 3 else (),
        filler.fill if filler else lambda weights: None,
    )
    retarget.retarget(made, engine.parts_of)
    schedule = scheduler(made) if callable(scheduler) else scheduler
    check_scheduler(schedule)
    agreement.check(of_scheduler(schedule))
    dice = StepRNG(seed, native_dropout)
    run = Run(job, mesh, engine, made, Objective(cut.model, loss, forward), dice, rows, schedule)
    run.original = cut.original
    run.sequences = context
    run.agreement = agreement
    run.members = members
    run.driver = Interleaved(copies) if copies > 1 else cut.driver
    run.copies = copies
    run.recompute = recompute
    run.recomputed = recomputed
    run.compiled = compiled
    run.offload = away
    if away.activations:
        run.saver = Saver(device, away.least, storages(engine))
    return run


def _named(settings: Settings) -> dict[str, Any]:
    """Return settings by the names that the user knows."""
    named = {
        "level": "optimizer_level",
        "mean": "gradients_mean",
        "fusion": "comm_fusion",
        "wire": "compress",
    }
    return {
        named.get(name, name): value for name, value in vars(settings).items() if name != "home"
    }


def _micro_batches(accumulate: int, pipeline: Pipeline | None) -> int:
    """Return how many micro-batches a step has on each rank."""
    if pipeline is None:
        return check_count("accumulate", accumulate)
    if accumulate != 1:
        what = f"accumulate={accumulate!r} beside pipeline=, whose microbatches are those of a step"
        raise UsageError(what, where=WHERE, hint="Pipeline(microbatches=...) alone")
    return check_count("microbatches", pipeline.microbatches)


def _check_kinds(mesh: Any, strategy: Any, pipeline: Any, context: Any) -> None:
    """Refuse what is no mesh, strategy, pipeline or context at all."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise UsageError(f"mesh={mesh!r} is none", where=WHERE, hint="mesh=pdrun.mesh(dp=-1, tp=2)")
    for name, value, methods, hint in (
        (
            "strategy",
            strategy,
            ("apply",),
            "strategy=pdrun.Strategy({glob: style}) or pdrun.Operators({name: layout})",
        ),
        ("pipeline", pipeline, ("apply",), "pipeline=pdrun.Pipeline(microbatches=8)"),
        ("context", context, ("apply", "part"), "context=pdrun.ContextParallel()"),
    ):
        if value is not None:
            check_has(name, value, methods, hint)


def _check_mesh(mesh: Mesh, world: int, strategy: Any, pipeline: Any, context: Any) -> None:
    """
    Refuse a mesh on which ranks would only repeat each other, and what is asked for without ranks
    to do it.
    """
    if mesh.size != world:
        raise UsageError(f"{mesh} is for {mesh.size} devices, the job has {world}", where=WHERE)
    tensor = [axis for axis in mesh.tensor_axes if mesh.degree(axis) > 1]
    for axes, value, name in (
        (tensor, strategy, "strategy"),
        (mesh.pp > 1 and ["pp"], pipeline, "pipeline"),
        (mesh.cp > 1 and ["cp"], context, "context"),
    ):
        if axes and value is None:
            what = f"{mesh}: ranks along {' and '.join(axes)} would only repeat each other"
            raise UsageError(what, where=WHERE, hint=f"{name}= says what they do")


def _check_copies(copies: int, pipeline: Any) -> None:
    if copies > 1 and pipeline is not None:
        what = f"copies={copies} beside pipeline=, whose schedule computes one micro-batch while another waits"
        raise UsageError(what, where=WHERE, hint="one of both")


def _prepare(model: nn.Module, device: torch.device, world: int, sync_batchnorm: bool) -> bool:
    """
    Move the model to its device; refuse what can't be equal to one process.

    Return whether some of its weights have no memory yet.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", where=WHERE, hint="an nn.Module")
    if getattr(model, "_pdrun", False):
        raise UsageError("the model belongs to a run already", where=WHERE, hint="make a new one")
    _check_unwrapped(model)
    model._pdrun = True
    empty = move(model, device)
    if sync_batchnorm:
        norm_sync.synchronise(model)
    found = norm_sync.find(model) if world > 1 else []
    if found:
        raise UsageError(
            f"{found[0]} normalises by its own rank's rows, so {world} ranks compute another model than one does",
            where=WHERE,
            hint="sync_batchnorm=True, or .eval() on it, or a norm without statistics of the batch",
        )
    if world > 1:
        _check_frequencies(model)
    return empty


def _check_frequencies(model: nn.Module) -> None:
    """
    Refuse gradients that are divided by how often a word is in a batch: each rank would count its
    own rows.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
            what = f"{name or 'the model'}: scale_grad_by_freq=True divides by how often a word is in a rank's own rows"
            raise UsageError(what, where=WHERE, hint="without it; the loss may weigh words")


def _check_forwards(model: nn.Module) -> None:
    """
    Refuse weights that the forward pass itself changes, by rows of its own rank, or where they are
    not kept.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UsageError(
                f"{name}: max_norm={module.max_norm:g} changes weights in the forward pass, on each rank other rows",
                where=WHERE,
                hint="without it; a norm of the rows that are looked up may be limited in the model",
            )


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse a model, or a part of one, that something else makes parallel already."""
    for name, module in model.named_modules():
        found = WRAPPERS.intersection(kind.__name__ for kind in type(module).__mro__)
        if found:
            what = f"{name or 'the model'} is in a {sorted(found)[0]}, which deals with gradients itself"
            hint = "give the model that is inside of it (.module): optimizer_level= says what is cut over the ranks"
            raise UsageError(what, where=WHERE, hint=hint)


def _store(job: Context) -> Any:
    """Return torch's store of the job, None where there is one rank."""
    if job.world_size > 1:
        return dist.distributed_c10d._get_default_store()
    return None


def _axes(job: Context, mesh: Mesh, device: torch.device, timeout: float) -> Axes:
    """Return this rank's places along the axes, where every wait is bounded."""
    world = job.world_size
    rank = job.rank
    watch = start_watch(timeout, rank, world, _store(job), blocking=device.type == "cpu")
    if world > 1:
        compat.set_timeout(timeout)
    return Axes(mesh.grid, rank, device, watch)


def _start_equal(model: nn.Module, weights: list[Weight], axis: Comm) -> None:
    """Give every rank the weights and buffers of rank 0, but for what it keeps to itself."""
    with torch.no_grad():
        for weight in weights:
            if not weight.alone and weight.param.device.type != "meta":
                axis.from_first(weight.param.detach(), f"rank 0's {weight.name}")
        for name, buffer in model.named_buffers():
            if buffer.layout != torch.strided and axis.world > 1:
                kind = str(buffer.layout).removeprefix("torch.")
                what = f"the buffer {name} is {kind}: ranks cannot be given rank 0's"
                raise UsageError(
                    what, where=WHERE, hint="a dense one, or an attribute that is no buffer"
                )
            axis.from_first(buffer, f"rank 0's {name}")
