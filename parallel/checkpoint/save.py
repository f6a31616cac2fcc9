"""
Saves a run, so that any number of ranks can load it at any optimizer level.

    weights/NAME, state/NAME/KEY, plain/NAME/KEY, buffers/NAME, rng/RANK

Weights and state are saved as regions of full tensors, state that is not a tensor as text. One rank
saves each set of replicas. Ranks agree through torch's store, not through collectives: a save can
continue in a thread while the next steps compute. An error of one rank is raised on all ranks.
"""

from __future__ import annotations

import atexit
import gc
import json
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.compatibility import fingerprint
from pdrun.parallel.checkpoint.fencing import GenerationFence
from pdrun.parallel.checkpoint.plain_values import encode_value
from pdrun.parallel.checkpoint.rank_barrier import RankBarrier, error_of
from pdrun.parallel.checkpoint.regions import Region, full_region
from pdrun.parallel.checkpoint.storage import TensorPiece
from pdrun.parallel.zero.full_tensors import LocalRange, local_ranges

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

RUN_SAVE = "pdrun.Run.save"
_last_savers: weakref.WeakValueDictionary[str, RunState] = weakref.WeakValueDictionary()
"""The run of this process that saved each checkpoint last."""


class PendingSave:
    """A save in progress; `wait` returns the checkpoint's folder."""

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
        Return when the checkpoint is complete.

        Raises:
            ConfigError: a rank could not write; names the rank and the reason.
        """
        self._thread.join()
        atexit.unregister(self._report_failure)
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return self._final

    def _report_failure(self) -> None:
        """Print the error of a program's last save if the program did not wait for it."""
        self._thread.join()
        if self._error is not None:
            print(
                f"pdrun: error: {self._final} was not saved: {self._error}",
                file=sys.stderr,
                flush=True,
            )


def take_snapshot(state: RunState) -> tuple[list[tuple[TensorPiece, torch.Tensor]], dict[str, Any]]:
    """Return copies of the tensors that this rank saves, and the contents of run.json."""
    pieces = []
    for local in local_ranges(state.engine):
        for name, tensor, once in _iter_tensors(state, local):
            if once:
                piece = _full_piece(name, tensor)
                is_mine = local.saves_scalars
            else:
                piece = TensorPiece.for_region(name, tensor.dtype, region_of(local))
                is_mine = local.is_saved_here
            if is_mine:
                pieces.append((piece, _copy_to_host(tensor)))
    for name, buffer in state.model.named_buffers():
        if name in state.persistent_buffers:
            # on every rank, so that all of them refuse what cannot be saved
            piece = _full_piece(f"buffers/{name}", buffer)
            if state.data_group.rank == 0 and state.engine.place.is_first_on_tensor:
                pieces.append((piece, _copy_to_host(buffer)))
    generator = torch.get_rng_state()
    pieces.append((_full_piece(f"rng/{state.context.rank}", generator), _copy_to_host(generator)))
    return pieces, _describe_run(state)


def region_of(local: LocalRange) -> Region:
    """Return the region of its full weight that a rank has."""
    return Region(local.shard.shape, local.shard.ranges, local.start, local.stop)


def _iter_tensors(state: RunState, local: LocalRange) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """
    Yield name and value of a rank's part of a weight and its state.

    The third item is True for a value that exists once per weight.
    """
    yield f"weights/{local.name}", local.part.detach(), False
    for key, value in state.optimizer.state.get(local.part, {}).items():
        if isinstance(value, torch.Tensor):
            yield f"state/{local.name}/{key}", value.detach(), value.shape != local.part.shape
        else:
            text = json.dumps(encode_value(value)).encode()
            yield (
                f"plain/{local.name}/{key}",
                torch.frombuffer(bytearray(text), dtype=torch.uint8),
                True,
            )


def _full_piece(name: str, tensor: torch.Tensor) -> TensorPiece:
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        hint = "use register_buffer(..., persistent=False), and build it in the model"
        raise UsageError(
            f"{name} is {kind}, which checkpoints do not support", where=RUN_SAVE, hint=hint
        )
    return TensorPiece.for_region(name, tensor.dtype, full_region(tensor.shape))


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _describe_run(state: RunState) -> dict[str, Any]:
    """Return everything that is not a tensor."""
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
        "attached": {
            name: encode_value(values) for name, values in state.attached.state_dicts().items()
        },
        "scale": [state.loss_scale.value, state.loss_scale.good_steps]
        if state.loss_scale
        else None,
    }


def save_checkpoint(state: RunState, folder: Path, keep: int | None, timeout: float) -> PendingSave:
    """Start to save. Tensors are copied before this returns."""
    final = folder / f"{storage.FOLDER_PREFIX}{state.steps:08d}"
    fence = GenerationFence.of_worker(folder)
    hidden = fence.hidden_folder(final.name)
    _claim_folder(state, final)
    pieces, plain = take_snapshot(state)
    world = state.context.world_size
    rank = state.context.rank
    barrier = RankBarrier(world, rank, "save", timeout)

    def work() -> None:
        if rank == 0:
            barrier.report("begin", error_of(lambda: _make_folder(fence, hidden)))
        barrier.wait_for("begin", [0])
        write = partial(_write_pieces, hidden, final, rank, pieces, state)
        publish = partial(_publish_checkpoint, hidden, final, folder, plain, world, keep)
        barrier.report("written", error_of(lambda: _run_fenced(fence, write)))
        barrier.finish("written", lambda: _run_fenced(fence, publish))

    return PendingSave(work, final)


def _claim_folder(state: RunState, final: Path) -> None:
    """Refuse to replace a checkpoint of another living run of this process."""
    key = str(final.resolve())
    if _last_savers.get(key, state) is not state:
        # runs are reference cycles: a run without users may still exist
        gc.collect()
    if _last_savers.get(key, state) is not state:
        what = f"{final} belongs to another run of this process and would be replaced"
        raise UsageError(what, where=RUN_SAVE, hint="use one folder per run")
    _last_savers[key] = state


def _run_fenced(fence: GenerationFence, step: Callable[[], None]) -> None:
    """Run a step of a save; if it fails because a later generation took the folder, say so."""
    try:
        step()
    except (OSError, ConfigError):
        fence.check()
        raise


def _write_pieces(
    hidden: Path,
    final: Path,
    rank: int,
    pieces: list[tuple[TensorPiece, torch.Tensor]],
    state: RunState,
) -> None:
    if rank == 0 and state.served is not None:
        state.served.save(hidden, final)
    try:
        storage.write_rank(hidden, rank, pieces)
    except OSError as error:  # the error of a full disk has no file name
        raise ConfigError(f"cannot be written ({error.strerror})", where=str(hidden)) from None


def _make_folder(fence: GenerationFence, hidden: Path) -> None:
    hidden.parent.mkdir(parents=True, exist_ok=True)
    fence.claim()
    hidden.mkdir()
    try:
        # A claim before mkdir has left its marker; one after it renames the folder.
        fence.check()
    except ConfigError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _publish_checkpoint(
    hidden: Path, final: Path, folder: Path, plain: dict[str, Any], world: int, keep: int | None
) -> None:
    names = [f"rank-{rank:05d}.json" for rank in range(world)]
    missing = [name for name in names if not (hidden / name).is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing on rank 0's machine",
            where=str(folder),
            hint="save to a shared file system",
        )
    turn = 1 + max(
        (storage.read_turn(path) for path in storage.list_checkpoints(folder)), default=0
    )
    storage.write_json(hidden / "run.json", {**plain, "indices": names, "turn": turn})
    storage.publish_folder(hidden, final)
    storage.prune_checkpoints(folder, keep)
