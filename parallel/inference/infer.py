"""`pdrun.infer`: a model and its weights become an `InferenceModel` on every device of the mesh."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.checkpoint.rank_barrier import RankBarrier
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import EXPERT_AXIS, Mesh, solve_mesh
from pdrun.parallel.comm.watchdog import start_watchdog
from pdrun.parallel.experts.adapters import find_adapter
from pdrun.parallel.experts.fused import is_fused
from pdrun.parallel.experts.moe import MoE
from pdrun.parallel.experts.style import experts
from pdrun.parallel.inference.decode import find_session
from pdrun.parallel.inference.inference_model import INFER, InferenceModel, naming_infer
from pdrun.parallel.inference.load import load_weights
from pdrun.parallel.inference.sources import WEIGHTS_HINT, open_source
from pdrun.parallel.inference.stages import take_stage
from pdrun.parallel.model.copies import on_meta
from pdrun.parallel.model.meta_init import move_model
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.prepare import claim_model, store_of
from pdrun.parallel.startup.init import Context
from pdrun.parallel.startup.init import init as init_process
from pdrun.parallel.tensor import Strategy, strategy_for
from pdrun.parallel.tensor.style import ModuleStyle
from pdrun.parallel.training.rank_agreement import RankAgreement

TIMEOUT_SECONDS = 600.0
"""Default limit of a collective."""
MAX_TIMEOUT_SECONDS = 86400.0 * 30
COMPUTED_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_SPARE_NAMES = 5
"""Unused tensors that are named."""


def infer(
    model: nn.Module,
    *,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
    weights: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    compile: bool = False,
) -> InferenceModel:
    """
    Prepare a model for inference. Every rank of the job calls this with the same arguments.

    Args:
        model: from ids ``[rows, length]`` to logits, or a causal model of transformers. Made inside
            `pdrun.empty_init` it has no memory until its shards are read. It is changed: it is in
            eval mode, without gradients, and has this rank's shards.
        mesh: dp divides the prompts, tensor axes the weights, pp the layers, and ep prompts and
            experts; default: all devices on dp.
        strategy: shards the weights over the tensor axes and ep; default: `pdrun.strategy_for` the
            model, and its experts over ep and the tensor axes.
        weights: a folder of `Run.save` (of any mesh; the newest step, or one step), a safetensors
            file, or a folder of such files with their index. None: rank 0's values.
        dtype: of floating-point weights; default: as they are in the model.
        max_length: tokens that a prompt and its new tokens may have together; default:
            ``max_position_embeddings`` of the model's configuration.
        timeout: seconds that a collective may take.
        compile: compile the step of a token: with CUDA graphs on CUDA.

    Raises:
        UsageError: an argument is wrong, or ranks differ.
        ConfigError: weights are missing or damaged, or are those of another model.
    """
    _check_arguments(model, strategy, weights, dtype, max_length, timeout)
    if type(compile) is not bool:
        raise UsageError(f"compile must be True or False, got {compile!r}", where=INFER)
    job = init_process()
    torch_compat.destroy_unused_groups()
    devices = mesh or solve_mesh(job.world_size, {"dp": -1})
    _check_mesh(devices, job.world_size)
    agreement = RankAgreement(job.rank, store_of(job), timeout)
    described = {
        "model": type(model).__qualname__,
        **{f"weight {name}": list(param.shape) for name, param in model.named_parameters()},
        "mesh": str(devices),
        "strategy": None if strategy is None else sorted(strategy.rules),
        "weights": None if weights is None else str(weights),
        "dtype": str(dtype),
        "max_length": max_length,
        "compile": compile,
    }
    hint = "every rank calls it with the same arguments and model"
    agreement.check_equal(described.items(), where=INFER, hint=hint)
    session = find_session(model)
    device = torch.device(job.device)
    with naming_infer(), claim_model(model) as begin_partitioning:
        is_empty = move_model(model, device)
        if is_empty and weights is None:
            raise UsageError(
                "the model has weights without values", where=INFER, hint="pass weights="
            )
        axes = _make_axes(devices, job, device, timeout)
        begin_partitioning()
        _freeze(model, None if weights is not None else dtype)
        original = on_meta(model)
        if weights is None:
            _broadcast(model, axes)
        model = _cut(model, strategy, devices, axes)
        if devices.pp > 1:
            take_stage(model, axes)
        if weights is not None:
            _load(model, original, Path(weights), device, dtype, job, timeout)
        return InferenceModel(
            model,
            original,
            devices,
            axes,
            agreement,
            session,
            max_length,
            strategy,
            is_compiled=compile,
        )


def _check_arguments(
    model: Any, strategy: Any, weights: Any, dtype: Any, max_length: Any, timeout: Any
) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"model must be a torch.nn.Module, got {kind}", where=INFER)
    if strategy is not None and not isinstance(strategy, Strategy):
        raise UsageError(
            f"strategy must be a pdrun.Strategy, got {type(strategy).__name__}",
            where=INFER,
            hint="pdrun.strategy_for(model), or Strategy({glob: style})",
        )
    if weights is not None and not isinstance(weights, (str, Path)):
        kind = type(weights).__name__
        raise UsageError(f"weights must be a path, got {kind}", where=INFER, hint=WEIGHTS_HINT)
    if dtype not in (None, *COMPUTED_TYPES):
        names = ", ".join(str(each) for each in COMPUTED_TYPES)
        raise UsageError(f"dtype must be one of {names}, got {dtype!r}", where=INFER)
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        what = f"max_length must be a whole number from 1, got {max_length!r}"
        raise UsageError(what, where=INFER)
    if type(timeout) not in (int, float) or not 0 < timeout <= MAX_TIMEOUT_SECONDS:
        what = f"timeout must be above 0 and at most {MAX_TIMEOUT_SECONDS:.0f} seconds"
        raise UsageError(f"{what}, got {timeout!r}", where=INFER)
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.capacity is not None:
            what = f"{name}: capacity={module.capacity} counts the tokens of a sequence"
            hint = "make the model with capacity=None: each token has all of its experts then"
            raise UsageError(f"{what}, which grows with each token", where=INFER, hint=hint)


def _check_mesh(devices: Any, world: int) -> None:
    if not isinstance(devices, Mesh):
        raise UsageError(
            f"mesh must be a pdrun.Mesh, got {devices!r}",
            where=INFER,
            hint="use mesh=pdrun.mesh(tp=2, dp=-1)",
        )
    if devices.size != world:
        what = f"{devices} needs {devices.size} devices, the job has {world}"
        raise UsageError(what, where=INFER)
    if devices.cp > 1:
        raise UsageError(
            f"{devices}: inference does not use the axis cp",
            where=INFER,
            hint="divide weights over tp or pp, and prompts over dp",
        )


def _make_axes(devices: Mesh, job: Context, device: torch.device, seconds: float) -> MeshGroups:
    """Return this rank's groups; all are made now, in one order on all ranks."""
    blocking = device.type == "cpu"
    watchdog = start_watchdog(seconds, job.rank, job.world_size, store_of(job), blocking)
    if job.world_size > 1:
        torch_compat.set_timeout(seconds)
    axes = MeshGroups(devices.grid, job.rank, device, watchdog)
    names = devices.grid.names
    not_dp = tuple(name for name in names if name != "dp")
    experts = tuple(name for name in names if name in (EXPERT_AXIS, *devices.tensor_axes))
    each = tuple((name,) for name in names)
    for group in (*each, devices.tensor_axes, devices.row_axes, experts, not_dp):
        axes[group]
    return axes


def _freeze(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Set a model to inference; change the type of its floating-point weights."""
    model.eval()
    model.requires_grad_(False)
    for param in model.parameters():
        param.grad = None
        if dtype is not None and param.is_floating_point():
            param.data = param.data.to(dtype)


def _broadcast(model: nn.Module, axes: MeshGroups) -> None:
    world = axes[axes.grid.names]
    for tensor in (*model.parameters(), *model.buffers()):
        world.broadcast(tensor.data)


def _cut(model: nn.Module, strategy: Strategy | None, devices: Mesh, axes: MeshGroups) -> nn.Module:
    if strategy is None:
        strategy = _choose_strategy(model, devices)
    model = model if strategy is None else strategy.apply(model, axes)
    shards = [shard_of(param) for param in model.parameters()]
    used = {axis for shard in shards for axis in (*shard.layout.axes, *shard.own_axes)}
    for axis in (*devices.tensor_axes, EXPERT_AXIS):
        if axis in devices.grid.names and devices.degree(axis) > 1 and axis not in used:
            what = f"{devices}: the strategy cuts no weight over {axis}, which would have no effect"
            raise UsageError(what, where=INFER, hint="give modules a style over it, or use dp")
    return model


def _choose_strategy(model: nn.Module, devices: Mesh) -> Strategy | None:
    """Return the strategy of a model, and its experts over ep and the tensor axes."""
    tensor = tuple(axis for axis in devices.tensor_axes if devices.degree(axis) > 1)
    rules: dict[str, ModuleStyle] = {}
    if tensor:
        rules |= strategy_for(model, axis=tensor[0] if len(tensor) == 1 else tensor).rules
    names = devices.grid.names
    wanted = tuple(name for name in names if name in tensor or name == EXPERT_AXIS)
    wanted = tuple(name for name in wanted if devices.degree(name) > 1)
    has_experts = False
    for name, module in model.named_modules():
        if not wanted or not (isinstance(module, MoE) or is_fused(module)):
            continue
        has_experts = True
        count = find_adapter(name, module, None).count_experts(module)
        parts = math.prod(devices.degree(axis) for axis in wanted)
        # too few experts for all of these ranks: each of a tensor group has all of its experts
        over = wanted if count % parts == 0 or not tensor else wanted[: devices.ep > 1]
        if over:
            rules[name] = experts(over)
    if devices.ep > 1 and not has_experts:
        what = f"{devices}: {type(model).__name__} has no experts to cut over ep"
        raise UsageError(what, where=INFER, hint="use dp, or pass a strategy with experts('ep')")
    return Strategy(rules) if rules else None


def _load(
    model: nn.Module,
    original: nn.Module,
    path: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    job: Context,
    seconds: float,
) -> None:
    """
    Fill this rank's shards.

    Raises:
        ConfigError: a rank could not; raised on every rank.
    """
    barrier = RankBarrier(job.world_size, job.rank, "infer", seconds)
    failure: PdrunError | None = None
    spare: list[str] = []
    place = str(path)
    try:
        source = open_source(path)
        place = source.place
        spare = load_weights(model, source, device, dtype, original)
    except PdrunError as error:
        failure = error
    except OSError as error:
        failure = ConfigError(f"cannot be read ({error.strerror})", where=str(path))
    barrier.report("read", str(failure or ""))
    try:
        barrier.finish("read")
    except ConfigError as error:
        raise failure or error from None
    if spare and job.rank == 0:
        named = ", ".join(spare[:MAX_SPARE_NAMES])
        more = f" and {len(spare) - MAX_SPARE_NAMES} more" if len(spare) > MAX_SPARE_NAMES else ""
        text = f"pdrun: {place}: the model does not use {named}{more}"
        print(text, file=sys.stderr, flush=True)
