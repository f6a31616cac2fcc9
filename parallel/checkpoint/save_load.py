"""
What a run saves and how it takes it up again, on any number of ranks and at any optimizer level.

    weights/NAME, state/NAME/KEY, plain/NAME/KEY, buffers/NAME, rng/RANK

Weights and state are saved as boxes of whole tensors, state that is no tensor as text. Of what
several ranks hold the same of, one saves it. Agreement goes through torch's store, never through a
collective, so that a save can go on in a thread while the next steps compute, and a rank that could
not read its part of a checkpoint is heard of by all.
"""

from __future__ import annotations

import atexit
import gc
import json
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.compatibility import check_compatible, fingerprint
from pdrun.parallel.checkpoint.plain_values import decode_value, encode_value
from pdrun.parallel.checkpoint.rank_barrier import RankBarrier, error_of
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, full_region
from pdrun.parallel.checkpoint.storage import TensorPiece
from pdrun.parallel.zero.full_tensors import LocalRange
from pdrun.parallel.zero.full_tensors import local_ranges as held_by

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

RUN_SAVE = "pdrun.Run.save"
NO_CHECKPOINT = -1
FOLDER_ITSELF = -2
"""What rank 0 finds in a folder instead of the step of a checkpoint."""
_last_savers: weakref.WeakValueDictionary[str, RunState] = weakref.WeakValueDictionary()
"""Which run of this process has saved a checkpoint last."""


class PendingSave:
    """A save on its way: `wait` ends it and returns the checkpoint's folder."""

    def __init__(self, work: Any, final: Path) -> None:
        self._final = final
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_work, args=(work,), name="pdrun-save")
        atexit.register(self._report_failure)
        self._thread.start()

    def _run_work(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def wait(self) -> Path:
        """
        Return when the checkpoint is whole.

        Raises:
            ConfigError: a rank could not write; says which and why.
        """
        self._thread.join()
        atexit.unregister(self._report_failure)
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return self._final

    def _report_failure(self) -> None:
        """Say that the last save of a program has failed, for which nobody has waited."""
        self._thread.join()
        if self._error is not None:
            print(
                f"pdrun: error: {self._final} was not saved: {self._error}",
                file=sys.stderr,
                flush=True,
            )


# ---- saving -----------------------------------------------------------------


def take_snapshot(state: RunState) -> tuple[list[tuple[TensorPiece, torch.Tensor]], dict[str, Any]]:
    """Return copies of what this rank saves, and what rank 0 writes besides."""
    pieces = []
    for held in held_by(state.engine):
        for name, tensor, once in _iter_tensors(state, held):
            piece = (
                _full_piece(name, tensor)
                if once
                else TensorPiece.for_region(name, tensor.dtype, _region_of(held))
            )
            if held.saves_scalars if once else held.is_saved_here:
                pieces.append((piece, _copy_to_host(tensor)))
    for name, buffer in state.model.named_buffers():
        if name in state.persistent_buffers:
            piece = _full_piece(
                f"buffers/{name}", buffer
            )  # on every rank, so that all of them refuse what can't be saved
            if state.data_group.rank == 0 and state.engine.place.is_first_on_tensor:
                pieces.append((piece, _copy_to_host(buffer)))
    generator = torch.get_rng_state()
    pieces.append((_full_piece(f"rng/{state.context.rank}", generator), _copy_to_host(generator)))
    return pieces, _describe_run(state)


def _region_of(held: LocalRange) -> Region:
    """Return which part of its weight a rank holds."""
    return Region(held.tile.shape, held.tile.ranges, held.start, held.stop)


def _iter_tensors(state: RunState, held: LocalRange) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """
    Yield the name and value of what a rank holds of a weight, and whether there is one for all of
    the weight.
    """
    yield f"weights/{held.name}", held.part.detach(), False
    for key, value in state.optimizer.state.get(held.part, {}).items():
        if isinstance(value, torch.Tensor):
            yield f"state/{held.name}/{key}", value.detach(), value.shape != held.part.shape
        else:
            text = json.dumps(encode_value(value)).encode()
            yield (
                f"plain/{held.name}/{key}",
                torch.frombuffer(bytearray(text), dtype=torch.uint8),
                True,
            )


def _full_piece(name: str, tensor: torch.Tensor) -> TensorPiece:
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        hint = "register_buffer(..., persistent=False), and make it in the model"
        raise UsageError(f"{name} is {kind}, which no checkpoint holds", where=RUN_SAVE, hint=hint)
    return TensorPiece.for_region(name, tensor.dtype, full_region(tensor.shape))


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _describe_run(state: RunState) -> dict[str, Any]:
    """Return everything that isn't a tensor."""
    return {
        "format": storage.FORMAT_VERSION,
        "steps": state.steps,
        "position": list(state.feed.next_position()),
        "seed": state.seed,
        "world": state.context.world_size,
        "made": fingerprint(state),
        "groups": [
            encode_value({k: v for k, v in group.items() if k != "params" and not callable(v)})
            for group in state.optimizer.param_groups
        ],
        "scheduler": encode_value(state.scheduler.state_dict())
        if state.scheduler is not None
        else None,
        "scale": [state.loss_scale.value, state.loss_scale.good_steps]
        if state.loss_scale
        else None,
    }


def save_checkpoint(state: RunState, folder: Path, keep: int | None, timeout: float) -> PendingSave:
    """Start saving; tensors are copied before this returns."""
    final = folder / f"{storage.FOLDER_PREFIX}{state.steps:08d}"
    hidden = folder / f".new-{final.name}"
    _claim_folder(state, final)
    pieces, plain = take_snapshot(state)
    world = state.context.world_size
    rank = state.context.rank
    barrier = RankBarrier(world, rank, "save", timeout)

    def work() -> None:
        if rank == 0:
            barrier.report("begin", error_of(lambda: _make_folder(folder, hidden)))
        barrier.wait_for("begin", [0])
        barrier.report("written", error_of(lambda: _write_pieces(hidden, rank, pieces)))
        barrier.finish(
            "written", lambda: _publish_checkpoint(hidden, final, folder, plain, world, keep)
        )

    return PendingSave(work, final)


def _claim_folder(state: RunState, final: Path) -> None:
    """Refuse to replace what another living run of this process has saved."""
    key = str(final.resolve())
    if _last_savers.get(key, state) is not state:
        # one that nobody has any more may be there still: runs hold themselves in circles
        gc.collect()
    if _last_savers.get(key, state) is not state:
        what = f"{final} is the checkpoint of another run of this process, which this one would replace"
        raise UsageError(what, where=RUN_SAVE, hint="a folder for each run")
    _last_savers[key] = state


def _write_pieces(hidden: Path, rank: int, pieces: list[tuple[TensorPiece, torch.Tensor]]) -> None:
    try:
        storage.write_rank(hidden, rank, pieces)
    except OSError as error:  # which file it was a full disk doesn't say
        raise ConfigError(f"cannot be written ({error.strerror})", where=str(hidden)) from None


def _make_folder(folder: Path, hidden: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f".new-{storage.FOLDER_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    hidden.mkdir()


def _publish_checkpoint(
    hidden: Path, final: Path, folder: Path, plain: dict[str, Any], world: int, keep: int | None
) -> None:
    names = [f"rank-{rank:05d}.json" for rank in range(world)]
    missing = [name for name in names if not (hidden / name).is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not there on rank 0's machine",
            where=str(folder),
            hint="save to a shared file system",
        )
    turn = 1 + max(
        (storage.read_turn(path) for path in storage.list_checkpoints(folder)), default=0
    )
    storage.write_json(hidden / "run.json", {**plain, "indices": names, "turn": turn})
    storage.publish_folder(hidden, final)
    storage.prune_checkpoints(folder, keep)


# ---- loading ----------------------------------------------------------------


def agree_on_checkpoint(state: RunState, folder: Path) -> Path | None:
    """Return the checkpoint that rank 0 finds in a folder, on every rank; None if there is none."""
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


def load_checkpoint(state: RunState, folder: Path) -> None:
    """
    Take up a checkpoint; the number of ranks and the optimizer level may differ from those that
    saved it.

    Raises:
        ConfigError: it isn't whole, or belongs to another model or optimizer; on every rank,
            whichever has seen it.
    """
    context = state.context
    seconds = state.data_group.watchdog.seconds
    barrier = RankBarrier(context.world_size, context.rank, "load", seconds)
    state.engine.wait_idle()
    trouble: PdrunError | None = None
    try:
        reader = CheckpointReader(folder)
        check_compatible(state, reader)
        state.guard.torn_checkpoint = str(folder)
        plain = _read_state(state, reader)
    except PdrunError as error:
        trouble = error
    barrier.report("read", str(trouble or ""))
    try:
        barrier.finish("read")
    except ConfigError as error:
        raise trouble or error from None
    state.engine.publish_weights()
    for group, saved in zip(state.optimizer.param_groups, plain["groups"], strict=True):
        for name, value in saved.items():
            old = group.get(name)
            group[name] = (
                value.to(old)
                if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
                else value
            )
    if state.scheduler is not None and plain["scheduler"] is not None:
        state.scheduler.load_state_dict(plain["scheduler"])
    if state.loss_scale is not None and plain["scale"] is not None:
        state.loss_scale.value, state.loss_scale.good_steps = plain["scale"]
    state.steps = plain["steps"]
    state.seed = plain["seed"]
    state.feed.set_position(*plain["position"])
    if plain["rng"] is not None:
        torch.set_rng_state(plain["rng"])


def _read_state(state: RunState, reader: CheckpointReader) -> dict[str, Any]:
    """Read weights, their state and buffers into their places, and return everything else."""
    with torch.no_grad():
        for held in held_by(state.engine):
            _load_weight(state, reader, held)
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers:
                _check_shape(reader, f"buffers/{name}", buffer.shape)
                buffer.copy_(reader.read_tensor(f"buffers/{name}").view(buffer.shape))
    plain = reader.run_json
    same = plain["world"] == state.context.world_size
    return {
        **plain,
        "groups": [decode_value(group) for group in plain["groups"]],
        "scheduler": decode_value(plain["scheduler"]),
        "rng": reader.read_tensor(f"rng/{state.context.rank}") if same else None,
    }


def _check_shape(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    if reader.shape_of(name) != tuple(shape):
        what = f"{name.partition('/')[2]} is {reader.shape_of(name)} there and {tuple(shape)} here"
        raise ConfigError(what, where=str(reader.folder))


def _load_weight(state: RunState, reader: CheckpointReader, held: LocalRange) -> None:
    """
    Read a part of a weight and of its optimizer's state, which has the weight's type where it had
    it there.
    """
    name = f"weights/{held.name}"
    box = _region_of(held)
    _check_shape(reader, name, box.shape)
    part = held.part
    value = reader.read_tensor(name, box)
    there = value.dtype
    part.copy_(value.view(part.shape))
    kept: dict[str, Any] = {}
    for found in reader.tensor_names():
        kind, _, key = found.partition(f"/{held.name}/")
        if kind == "plain":
            kept[key] = decode_value(json.loads(bytes(reader.read_tensor(found).tolist())))
        if kind != "state":
            continue
        shape = reader.shape_of(found)
        value = (
            reader.read_tensor(found, box).view(part.shape)
            if shape == box.shape
            else reader.read_tensor(found).view(shape)
        )
        if value.dtype == there and (shape or not box.shape):
            value = value.to(part.dtype)
        stays = shape == () and not _keeps_counts_on_device(state)
        kept[key] = value if stays else value.to(part.device)
    if held.weight.is_trained:
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
