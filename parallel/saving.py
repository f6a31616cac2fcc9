"""
What a run saves and how it takes it up again, on any number of ranks and at any optimizer level.

    weights/NAME, state/NAME/KEY, buffers/NAME, rng/RANK

Weights and state are saved as boxes of whole tensors. Of what several ranks hold the same of, one saves it. Agreement
goes through torch's store, never through a collective, so that a save can go on in a thread while the next steps
compute.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdrun.errors import ConfigError, DeadlineExceeded, PdrunError, UsageError
from pdrun.parallel import storage
from pdrun.parallel.boxes import Box, everything
from pdrun.parallel.storage import Piece, Reader
from pdrun.parallel.wholes import Held
from pdrun.parallel.wholes import held as held_by

if TYPE_CHECKING:
    from pdrun.parallel.run import Run

POLL = 0.02
_count = itertools.count()
"""Saves of this process so far; every rank makes the same ones."""


class Saving:
    """A save on its way: `wait` ends it and returns the checkpoint's folder."""

    def __init__(self, work: Any, final: Path) -> None:
        self._final = final
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="pdrun-save")
        self._thread.start()

    def _run(self, work: Any) -> None:
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
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._final


# ---- saving ------------------------------------------------------------------------------------------------------


def snapshot(run: Run) -> tuple[list[tuple[Piece, torch.Tensor]], dict[str, Any]]:
    """Return copies of what this rank saves, and what rank 0 writes besides."""
    pieces = []
    for held in held_by(run.engine):
        for name, tensor, once in _tensors(run, held):
            if held.first if once else held.mine:
                piece = _whole(name, tensor) if once else Piece.of(name, tensor.dtype, _box(held))
                pieces.append((piece, _copy(tensor)))
    if run.axis.rank == 0 and run.engine.place.leads:
        for name, buffer in run.model.named_buffers():
            if name in run.persistent:
                pieces.append((_whole(f"buffers/{name}", buffer), _copy(buffer)))
    state = torch.get_rng_state()
    pieces.append((_whole(f"rng/{run.context.rank}", state), _copy(state)))
    return pieces, _plain(run)


def _box(held: Held) -> Box:
    """Return which part of its weight a rank holds."""
    return Box(held.tile.shape, held.tile.ranges, held.start, held.stop)


def _tensors(run: Run, held: Held) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name and value of what a rank holds of a weight, and whether there is one for all of the weight."""
    yield f"weights/{held.name}", held.part.detach(), False
    for key, value in run.optimizer.state.get(held.part, {}).items():
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        yield f"state/{held.name}/{key}", tensor.detach(), tensor.shape != held.part.shape


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece.of(name, tensor.dtype, everything(tensor.shape))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _plain(run: Run) -> dict[str, Any]:
    """Return everything that isn't a tensor."""
    return {
        "format": storage.FORMAT,
        "steps": run.steps,
        "position": [run.position.epoch, run.position.batch],
        "seed": run.seed,
        "world": run.context.world_size,
        "groups": [encode({k: v for k, v in group.items() if k != "params"}) for group in run.optimizer.param_groups],
        "scheduler": encode(run.scheduler.state_dict()) if run.scheduler is not None else None,
        "scale": [run.scale.value, run.scale.good] if run.scale else None,
    }


def save(run: Run, folder: Path, keep: int | None, timeout: float) -> Saving:
    """Start saving; tensors are copied before this returns."""
    final = folder / f"{storage.PREFIX}{run.steps:08d}"
    hidden = folder / f".new-{final.name}"
    pieces, plain = snapshot(run)
    world, rank = run.context.world_size, run.context.rank
    meeting = _Meeting(world, rank, f"pdrun/save/{next(_count)}", timeout)

    def work() -> None:
        if rank == 0:
            meeting.tell("begin", _try(lambda: _make(folder, hidden)))
        meeting.hear("begin", [0])
        meeting.tell("written", _try(lambda: storage.write_rank(hidden, rank, pieces)))
        if rank == 0:
            trouble = _trouble(lambda: meeting.hear("written", range(world)))
            done = trouble or _try(lambda: _end(hidden, final, folder, plain, world, keep))
            meeting.tell("end", done)
        meeting.hear("end", [0])

    return Saving(work, final)


def _make(folder: Path, hidden: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f".new-{storage.PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    hidden.mkdir()


def _end(hidden: Path, final: Path, folder: Path, plain: dict[str, Any], world: int, keep: int | None) -> None:
    names = [f"rank-{rank:05d}.json" for rank in range(world)]
    missing = [name for name in names if not (hidden / name).is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not there on rank 0's machine", where=str(folder), hint="save to a shared file system"
        )
    storage.write_json(hidden / "run.json", {**plain, "indices": names})
    storage.publish(hidden, final)
    storage.prune(folder, keep)


def _try(call: Any) -> str:
    """Return what went wrong in words, or nothing."""
    try:
        call()
    except (OSError, PdrunError) as error:
        return str(error) or type(error).__name__
    return ""


def _trouble(call: Any) -> str:
    try:
        call()
    except PdrunError as error:
        return str(error)
    return ""


class _Meeting:
    """Who has come how far, told through torch's store."""

    def __init__(self, world: int, rank: int, name: str, timeout: float) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store() if world > 1 else None
        self._rank, self._name, self._timeout = rank, name, timeout
        self._own: dict[str, str] = {}

    def tell(self, what: str, trouble: str) -> None:
        """Say that this rank has done something, or what trouble it had."""
        self._own[what] = trouble
        if self._store is not None:
            self._store.set(f"{self._name}/{what}/{self._rank}", trouble or "done")

    def hear(self, what: str, ranks: Any) -> None:
        """Wait until ranks have told; ConfigError where one had trouble."""
        end = time.monotonic() + self._timeout
        for rank in ranks:
            told = self._own.get(what) if rank == self._rank else self._ask(what, rank, end)
            if told not in ("", "done", None):
                raise ConfigError(told if "rank " in str(told) else f"rank {rank}: {told}", where="pdrun.Run.save")

    def _ask(self, what: str, rank: int, end: float) -> str:
        key = f"{self._name}/{what}/{rank}"
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise DeadlineExceeded(f"rank {rank} has not saved in {self._timeout:g} s", where="pdrun.Run.save")
            time.sleep(POLL)
        return str(self._store.get(key).decode())


# ---- loading -----------------------------------------------------------------------------------------------------


def load(run: Run, folder: Path) -> None:
    """
    Take up a checkpoint; the number of ranks and the optimizer level may differ from those that saved it.

    Raises:
        ConfigError: it isn't whole, or belongs to another model or optimizer.
    """
    reader = Reader(folder)
    run.engine.settle()
    with torch.no_grad():
        for held in held_by(run.engine):
            _load_weight(run, reader, held)
        for name, buffer in run.model.named_buffers():
            if name in run.persistent:
                buffer.copy_(reader.read(f"buffers/{name}").view(buffer.shape))
    run.engine.publish()
    plain = reader.run
    groups = [decode(group) for group in plain["groups"]]
    if len(groups) != len(run.optimizer.param_groups):
        raise ConfigError(
            f"has {len(groups)} groups of weights, the optimizer {len(run.optimizer.param_groups)}", where=str(folder)
        )
    for group, saved in zip(run.optimizer.param_groups, groups, strict=True):
        group.update(saved)
    if run.scheduler is not None and plain["scheduler"] is not None:
        run.scheduler.load_state_dict(decode(plain["scheduler"]))
    if run.scale is not None and plain["scale"] is not None:
        run.scale.value, run.scale.good = plain["scale"]
    run.steps, run.seed = plain["steps"], plain["seed"]
    run.position.epoch, run.position.batch = plain["position"]
    run.feed.unbind()
    if plain["world"] == run.context.world_size:
        torch.set_rng_state(reader.read(f"rng/{run.context.rank}"))


def _load_weight(run: Run, reader: Reader, held: Held) -> None:
    """Read a part of a weight and of its optimizer's state."""
    name, box = f"weights/{held.name}", _box(held)
    if reader.shape(name) != box.shape:
        raise ConfigError(f"{held.name} is {reader.shape(name)} there and {box.shape} here", where=str(reader.folder))
    part = held.part
    part.copy_(reader.read(name, box).view(part.shape))
    state: dict[str, Any] = {}
    prefix = f"state/{held.name}/"
    for found in (found for found in reader.names() if found.startswith(prefix)):
        shape = reader.shape(found)
        value = reader.read(found, box).view(part.shape) if shape == box.shape else reader.read(found).view(shape)
        stays = shape == () and not _on_device(run)
        state[found.removeprefix(prefix)] = value if stays else value.to(part.device)
    if held.weight.trained:
        run.optimizer.state.pop(part, None)
        if state:
            run.optimizer.state[part] = state


def _on_device(run: Run) -> bool:
    """Whether the optimizer keeps its step counts on the device, as fused and capturable ones do."""
    return any(group.get("fused") or group.get("capturable") for group in run.optimizer.param_groups)


# ---- plain values as JSON ----------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """
    Return a plain value as JSON has it: tuples, tensors of one number and dicts with other keys than text are
    marked.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"!tensor": value.item()}
    if isinstance(value, (list, set)):
        return [encode(entry) for entry in value]
    if isinstance(value, tuple):
        return {"!tuple": [encode(entry) for entry in value]}
    if isinstance(value, dict):
        return {"!dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return {"!code": True}
    raise UsageError(
        f"a {type(value).__name__} in the state of the optimizer or scheduler can't be saved", where="pdrun.Run.save"
    )


def decode(value: Any) -> Any:
    """Undo `encode`; code isn't saved, and comes back as None."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((mark, inner),) = value.items()
    if mark == "!tensor":
        return torch.tensor(inner)
    if mark == "!tuple":
        return tuple(decode(entry) for entry in inner)
    return None if mark == "!code" else {decode(key): decode(entry) for key, entry in inner}
