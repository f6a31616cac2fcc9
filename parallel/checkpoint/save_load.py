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
import itertools
import json
import shutil
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdrun.errors import ConfigError, DeadlineExceeded, PdrunError, UsageError
from pdrun.parallel.checkpoint import compatibility as belonging
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.regions import Box, everything
from pdrun.parallel.checkpoint.storage import Piece, Reader
from pdrun.parallel.zero.full_tensors import Held
from pdrun.parallel.zero.full_tensors import held as held_by

if TYPE_CHECKING:
    from pdrun.parallel.run import Run

POLL = 0.02
WHERE = "pdrun.Run.save"
_count = itertools.count()
"""Saves and loads of this process so far; every rank makes the same ones."""
_savers: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()
"""Which run of this process has saved a checkpoint last."""


class Saving:
    """A save on its way: `wait` ends it and returns the checkpoint's folder."""

    def __init__(self, work: Any, final: Path) -> None:
        self._final = final
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="pdrun-save")
        atexit.register(self._at_exit)
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
        atexit.unregister(self._at_exit)
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return self._final

    def _at_exit(self) -> None:
        """Say that the last save of a program has failed, for which nobody has waited."""
        self._thread.join()
        if self._error is not None:
            print(
                f"pdrun: error: {self._final} was not saved: {self._error}",
                file=sys.stderr,
                flush=True,
            )


# ---- saving -----------------------------------------------------------------


def snapshot(run: Run) -> tuple[list[tuple[Piece, torch.Tensor]], dict[str, Any]]:
    """Return copies of what this rank saves, and what rank 0 writes besides."""
    pieces = []
    for held in held_by(run.engine):
        for name, tensor, once in _tensors(run, held):
            piece = _whole(name, tensor) if once else Piece.of(name, tensor.dtype, _box(held))
            if held.first if once else held.mine:
                pieces.append((piece, _copy(tensor)))
    for name, buffer in run.model.named_buffers():
        if name in run.persistent:
            piece = _whole(
                f"buffers/{name}", buffer
            )  # on every rank, so that all of them refuse what can't be saved
            if run.axis.rank == 0 and run.engine.place.leads:
                pieces.append((piece, _copy(buffer)))
    state = torch.get_rng_state()
    pieces.append((_whole(f"rng/{run.context.rank}", state), _copy(state)))
    return pieces, _plain(run)


def _box(held: Held) -> Box:
    """Return which part of its weight a rank holds."""
    return Box(held.tile.shape, held.tile.ranges, held.start, held.stop)


def _tensors(run: Run, held: Held) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """
    Yield the name and value of what a rank holds of a weight, and whether there is one for all of
    the weight.
    """
    yield f"weights/{held.name}", held.part.detach(), False
    for key, value in run.optimizer.state.get(held.part, {}).items():
        if isinstance(value, torch.Tensor):
            yield f"state/{held.name}/{key}", value.detach(), value.shape != held.part.shape
        else:
            text = json.dumps(encode(value)).encode()
            yield (
                f"plain/{held.name}/{key}",
                torch.frombuffer(bytearray(text), dtype=torch.uint8),
                True,
            )


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        hint = "register_buffer(..., persistent=False), and make it in the model"
        raise UsageError(f"{name} is {kind}, which no checkpoint holds", where=WHERE, hint=hint)
    return Piece.of(name, tensor.dtype, everything(tensor.shape))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _plain(run: Run) -> dict[str, Any]:
    """Return everything that isn't a tensor."""
    return {
        "format": storage.FORMAT,
        "steps": run.steps,
        "position": list(run.feed.standing()),
        "seed": run.seed,
        "world": run.context.world_size,
        "made": belonging.made(run),
        "groups": [
            encode({k: v for k, v in group.items() if k != "params" and not callable(v)})
            for group in run.optimizer.param_groups
        ],
        "scheduler": encode(run.scheduler.state_dict()) if run.scheduler is not None else None,
        "scale": [run.scale.value, run.scale.good] if run.scale else None,
    }


def save(run: Run, folder: Path, keep: int | None, timeout: float) -> Saving:
    """Start saving; tensors are copied before this returns."""
    final = folder / f"{storage.PREFIX}{run.steps:08d}"
    hidden = folder / f".new-{final.name}"
    _claim(run, final)
    pieces, plain = snapshot(run)
    world = run.context.world_size
    rank = run.context.rank
    meeting = _Meeting(world, rank, "save", timeout)

    def work() -> None:
        if rank == 0:
            meeting.tell("begin", _try(lambda: _make(folder, hidden)))
        meeting.hear("begin", [0])
        meeting.tell("written", _try(lambda: _write(hidden, rank, pieces)))
        meeting.end("written", lambda: _end(hidden, final, folder, plain, world, keep))

    return Saving(work, final)


def _claim(run: Run, final: Path) -> None:
    """Refuse to replace what another living run of this process has saved."""
    key = str(final.resolve())
    if _savers.get(key, run) is not run:
        # one that nobody has any more may be there still: runs hold themselves in circles
        gc.collect()
    if _savers.get(key, run) is not run:
        what = f"{final} is the checkpoint of another run of this process, which this one would replace"
        raise UsageError(what, where=WHERE, hint="a folder for each run")
    _savers[key] = run


def _write(hidden: Path, rank: int, pieces: list[tuple[Piece, torch.Tensor]]) -> None:
    try:
        storage.write_rank(hidden, rank, pieces)
    except OSError as error:  # which file it was a full disk doesn't say
        raise ConfigError(f"cannot be written ({error.strerror})", where=str(hidden)) from None


def _make(folder: Path, hidden: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f".new-{storage.PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    hidden.mkdir()


def _end(
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
    turn = 1 + max((storage.turn(path) for path in storage.whole(folder)), default=0)
    storage.write_json(hidden / "run.json", {**plain, "indices": names, "turn": turn})
    storage.publish(hidden, final)
    storage.prune(folder, keep)


def _try(call: Any) -> str:
    """Return what went wrong in words, or nothing."""
    try:
        call()
    except (OSError, PdrunError) as error:
        return str(error) or type(error).__name__
    return ""


class _Meeting:
    """Who has come how far, told through torch's store."""

    def __init__(self, world: int, rank: int, what: str, timeout: float) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store() if world > 1 else None
        self._rank = rank
        self._name = f"pdrun/{what}/{next(_count)}"
        self._timeout = timeout
        self._world = world
        self._where = f"pdrun.Run.{what}"
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
                raise ConfigError(
                    told if "rank " in str(told) else f"rank {rank}: {told}", where=self._where
                )

    def end(self, what: str, then: Any = lambda: None) -> None:
        """
        Wait until all ranks have told, and rank 0 has done something more; ConfigError where one
        had trouble.
        """
        if self._rank == 0:
            self.tell("end", _try(lambda: self.hear(what, range(self._world))) or _try(then))
        self.hear("end", [0])

    def _ask(self, what: str, rank: int, end: float) -> str:
        key = f"{self._name}/{what}/{rank}"
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"rank {rank} has not come in {self._timeout:g} s", where=self._where
                )
            time.sleep(POLL)
        return str(self._store.get(key).decode())


# ---- loading ----------------------------------------------------------------


def load(run: Run, folder: Path) -> None:
    """
    Take up a checkpoint; the number of ranks and the optimizer level may differ from those that
    saved it.

    Raises:
        ConfigError: it isn't whole, or belongs to another model or optimizer; on every rank,
            whichever has seen it.
    """
    meeting = _Meeting(run.context.world_size, run.context.rank, "load", run.axis.watch.seconds)
    run.engine.settle()
    trouble: PdrunError | None = None
    try:
        reader = Reader(folder)
        belonging.check(run, reader)
        run.guard.torn = str(folder)
        plain = _read(run, reader)
    except PdrunError as error:
        trouble = error
    meeting.tell("read", str(trouble or ""))
    try:
        meeting.end("read")
    except ConfigError as told:
        raise trouble or told from None
    run.engine.publish()
    for group, saved in zip(run.optimizer.param_groups, plain["groups"], strict=True):
        for name, value in saved.items():
            old = group.get(name)
            group[name] = (
                value.to(old)
                if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
                else value
            )
    if run.scheduler is not None and plain["scheduler"] is not None:
        run.scheduler.load_state_dict(plain["scheduler"])
    if run.scale is not None and plain["scale"] is not None:
        run.scale.value, run.scale.good = plain["scale"]
    run.steps = plain["steps"]
    run.seed = plain["seed"]
    run.feed.stand(*plain["position"])
    if plain["rng"] is not None:
        torch.set_rng_state(plain["rng"])


def _read(run: Run, reader: Reader) -> dict[str, Any]:
    """Read weights, their state and buffers into their places, and return everything else."""
    with torch.no_grad():
        for held in held_by(run.engine):
            _load_weight(run, reader, held)
        for name, buffer in run.model.named_buffers():
            if name in run.persistent:
                _check_shape(reader, f"buffers/{name}", buffer.shape)
                buffer.copy_(reader.read(f"buffers/{name}").view(buffer.shape))
    plain = reader.run
    same = plain["world"] == run.context.world_size
    return {
        **plain,
        "groups": [decode(group) for group in plain["groups"]],
        "scheduler": decode(plain["scheduler"]),
        "rng": reader.read(f"rng/{run.context.rank}") if same else None,
    }


def _check_shape(reader: Reader, name: str, shape: tuple[int, ...]) -> None:
    if reader.shape(name) != tuple(shape):
        what = f"{name.partition('/')[2]} is {reader.shape(name)} there and {tuple(shape)} here"
        raise ConfigError(what, where=str(reader.folder))


def _load_weight(run: Run, reader: Reader, held: Held) -> None:
    """
    Read a part of a weight and of its optimizer's state, which has the weight's type where it had
    it there.
    """
    name = f"weights/{held.name}"
    box = _box(held)
    _check_shape(reader, name, box.shape)
    part = held.part
    value = reader.read(name, box)
    there = value.dtype
    part.copy_(value.view(part.shape))
    state: dict[str, Any] = {}
    for found in reader.names():
        kind, _, key = found.partition(f"/{held.name}/")
        if kind == "plain":
            state[key] = decode(json.loads(bytes(reader.read(found).tolist())))
        if kind != "state":
            continue
        shape = reader.shape(found)
        value = (
            reader.read(found, box).view(part.shape)
            if shape == box.shape
            else reader.read(found).view(shape)
        )
        if value.dtype == there and (shape or not box.shape):
            value = value.to(part.dtype)
        stays = shape == () and not _on_device(run)
        state[key] = value if stays else value.to(part.device)
    if held.weight.trained:
        run.optimizer.state.pop(part, None)
        if state:
            run.optimizer.state[part] = state


def _on_device(run: Run) -> bool:
    """
    Whether the optimizer keeps its step counts on the device, as fused and capturable ones do.
    """
    return any(
        group.get("fused") or group.get("capturable") for group in run.optimizer.param_groups
    )


# ---- plain values as JSON ---------------------------------------------------


def encode(value: Any) -> Any:
    """
    Return a plain value as JSON has it: tuples, tensors of one number and dicts with other keys
    than text are marked.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"!tensor": value.item(), "type": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Counter):
        return {"!counter": [[encode(key), count] for key, count in value.items()]}
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
        f"a {type(value).__name__} in the state of the optimizer or scheduler can't be saved",
        where="pdrun.Run.save",
    )


def decode(value: Any) -> Any:
    """Undo `encode`; code isn't saved, and comes back as None."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    (mark, inner), *more = value.items()
    if mark == "!tensor":
        return torch.tensor(inner, dtype=storage.TYPES[more[0][1]] if more else None)
    if mark == "!counter":
        return Counter({decode(key): count for key, count in inner})
    if mark == "!tuple":
        return tuple(decode(entry) for entry in inner)
    if mark == "!code":
        return None
    return {decode(key): decode(entry) for key, entry in inner}
