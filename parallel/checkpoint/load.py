"""
Loads a checkpoint into a run, on any number of ranks and at any optimizer level.

Every rank reads its regions of the full tensors. An error of one rank is raised on all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdrun.errors import ConfigError, PdrunError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.compatibility import check_compatible
from pdrun.parallel.checkpoint.fencing import GenerationFence
from pdrun.parallel.checkpoint.index import check_run
from pdrun.parallel.checkpoint.plain_values import decode_value
from pdrun.parallel.checkpoint.rank_barrier import RankBarrier, error_of
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.save import region_of
from pdrun.parallel.zero.full_tensors import LocalRange, local_ranges
from pdrun.text import escape_text

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

NO_CHECKPOINT = -1
FOLDER_ITSELF = -2
"""What rank 0 finds in a folder instead of the step of a checkpoint."""


def agree_on_checkpoint(state: RunState, folder: Path) -> Path | None:
    """Return the checkpoint that rank 0 finds in a folder, on every rank; None if it has none."""
    if state.context.rank == 0:
        is_itself = (folder / "run.json").is_file()
        GenerationFence.of_worker(folder.parent if is_itself else folder).claim_to_load()
    names = [path.name for path in storage.list_checkpoints(folder)]
    if (folder / "run.json").is_file():
        found = FOLDER_ITSELF
    elif names:
        found = int(names[-1].rpartition("-")[2])
    else:
        found = NO_CHECKPOINT
    step = torch.tensor([found], device=state.device)
    state.engine.place.job.broadcast_first(step, "which checkpoint to load")
    if int(step) == NO_CHECKPOINT:
        return None
    if int(step) == FOLDER_ITSELF:
        return folder
    # a rank that does not see the folder reports that in `load_checkpoint`
    name = f"{storage.FOLDER_PREFIX}{int(step):08d}"
    return folder / (f".old-{name}" if f".old-{name}" in names else name)


def _load_served(state: RunState, folder: Path, barrier: RankBarrier) -> None:
    """Let the parameter servers read their tables, and pull what they have."""
    served = state.served
    if served is None:
        return
    if state.context.rank == 0:
        barrier.report("served", error_of(lambda: served.load(folder)))
    barrier.wait_for("served", [0])
    served.reload_weights()


def load_checkpoint(state: RunState, folder: Path) -> None:
    """
    Load a checkpoint. The number of ranks and the optimizer level may differ from those that saved
    it.

    Raises:
        ConfigError: it is incomplete, or belongs to another model or optimizer; raised on every
            rank.
    """
    context = state.context
    seconds = state.data_group.watchdog.seconds
    barrier = RankBarrier(context.world_size, context.rank, "load", seconds)
    state.engine.wait_idle()
    failure: PdrunError | None = None
    try:
        reader = CheckpointReader(folder)
        check_run(reader.run_json, folder)
        check_compatible(state, reader)
        state.guard.torn_checkpoint = str(folder)
        plain = _read_state(state, reader)
    except PdrunError as error:
        failure = error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        failure = ConfigError(f"is damaged ({escape_text(str(error))})", where=str(folder))
    barrier.report("read", str(failure or ""))
    try:
        barrier.finish("read")
    except ConfigError as error:
        raise failure or error from None
    _load_served(state, folder, barrier)
    state.engine.publish_weights()
    for group, saved in zip(state.optimizer.param_groups, plain["groups"], strict=True):
        for name, value in saved.items():
            old = group.get(name)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                value = value.to(old)
            group[name] = value
    if state.scheduler is not None and plain["scheduler"] is not None:
        state.scheduler.load_state_dict(plain["scheduler"])
    state.attached.load(plain["attached"])
    if state.loss_scale is not None and plain["scale"] is not None:
        state.loss_scale.value, state.loss_scale.good_steps = plain["scale"]
    state.steps = plain["steps"]
    state.seed = plain["seed"]
    state.feed.set_position(*plain["position"])
    if plain["rng"] is not None:
        torch.set_rng_state(plain["rng"])


def _read_state(state: RunState, reader: CheckpointReader) -> dict[str, Any]:
    """Read weights, their state and buffers in place, and return the other values."""
    with torch.no_grad():
        for local in local_ranges(state.engine):
            _load_weight(state, reader, local)
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers:
                _check_shape(reader, f"buffers/{name}", buffer.shape)
                buffer.copy_(reader.read_tensor(f"buffers/{name}").view(buffer.shape))
    plain = reader.run_json
    same = plain["world"] == state.context.world_size
    return {
        **plain,
        "groups": [dict(decode_value(group)) for group in plain["groups"]],
        "scheduler": decode_value(plain["scheduler"]),
        "attached": {
            name: decode_value(values) for name, values in plain.get("attached", {}).items()
        },
        "rng": reader.read_tensor(f"rng/{state.context.rank}") if same else None,
    }


def _check_shape(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    if reader.shape_of(name) != tuple(shape):
        plain = name.partition("/")[2]
        what = f"{plain} has shape {reader.shape_of(name)}, {tuple(shape)} in this run"
        raise ConfigError(what, where=str(reader.folder))


def _load_weight(state: RunState, reader: CheckpointReader, local: LocalRange) -> None:
    """
    Read a part of a weight and of its optimizer state.

    State that has the weight's type in the checkpoint gets the weight's type here.
    """
    name = f"weights/{local.name}"
    region = region_of(local)
    _check_shape(reader, name, region.shape)
    part = local.part
    value = reader.read_tensor(name, region)
    there = value.dtype
    part.copy_(value.view(part.shape))
    kept: dict[str, Any] = {}
    for found in reader.tensor_names():
        kind, _, key = found.partition(f"/{local.name}/")
        if kind == "plain":
            kept[key] = decode_value(json.loads(bytes(reader.read_tensor(found).tolist())))
        if kind != "state":
            continue
        shape = reader.shape_of(found)
        if shape == region.shape:
            value = reader.read_tensor(found, region).view(part.shape)
        else:
            value = reader.read_tensor(found).view(shape)
        if value.dtype == there and (shape or not region.shape):
            value = value.to(part.dtype)
        if shape != () or _keeps_counts_on_device(state):
            value = value.to(part.device)
        kept[key] = value
    if local.weight.is_trained:
        state.optimizer.state.pop(part, None)
        if kept:
            state.optimizer.state[part] = kept


def _keeps_counts_on_device(state: RunState) -> bool:
    """
    Whether the optimizer keeps its step counts on the device, as fused and capturable ones do.
    """
    return any(
        group.get("fused") or group.get("capturable") for group in state.optimizer.param_groups
    )
