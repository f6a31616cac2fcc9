"""
Checkpoints on disk: a folder that is whole or not there.

    DIR/step-00000120/rank-00003.bin     tensors' bytes, one after another, each at a multiple of 64
    DIR/step-00000120/rank-00003.json    what lies where in it: name, type, shape, range of elements, offset, checksum
    DIR/step-00000120/run.json           everything that isn't a tensor; written last

Each rank writes its own pieces into a hidden folder. When all have told that theirs are on the disk, rank 0 writes
run.json and renames the folder. A process that dies anywhere leaves a hidden folder, which the next save removes.
Pieces are ranges of flattened tensors, so any number of ranks finds what it needs by arithmetic. Nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError

ALIGN = 64
PREFIX = "step-"
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip
FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """A range of elements of a tensor, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    stop: int
    file: str = ""
    offset: int = 0
    crc: int = 0


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host; the tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


# ---- writing -----------------------------------------------------------------------------------------------------


def write_rank(folder: Path, rank: int, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> None:
    """Write a rank's pieces and their index, and have them on the disk before returning."""
    name = f"rank-{rank:05d}"
    index: list[dict[str, Any]] = []
    with open(folder / f"{name}.bin", "wb") as file:
        for piece, tensor in pieces:
            file.write(b"\0" * (-file.tell() % ALIGN))
            data = buffer_of(tensor)
            index.append({**asdict(piece), "file": f"{name}.bin", "offset": file.tell(), "crc": zlib.crc32(data)})
            file.write(data)
        _flush(file)
    write_json(folder / f"{name}.json", index)


def write_json(path: Path, value: Any) -> None:
    """Write a small file and have it on the disk before returning."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=True)
        _flush(file)


def publish(hidden: Path, final: Path) -> None:
    """Give a complete folder its name; one of that name gives way and is removed after."""
    _flush_folder(hidden)
    old = None
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    hidden.rename(final)
    _flush_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the newest checkpoints: first their run.json, so that none is ever half there."""
    for path in [] if keep is None else whole(folder)[:-keep]:
        (path / "run.json").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading -----------------------------------------------------------------------------------------------------


def whole(folder: Path) -> list[Path]:
    """
    Return the whole checkpoints in a folder, oldest first; one that was being replaced counts where its successor
    isn't there.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{PREFIX}*")) if folder.is_dir() else []:
        step = path.name.rpartition("-")[2]
        known = path.name in (f"{PREFIX}{step}", f".old-{PREFIX}{step}")
        if known and step.isdigit() and (path / "run.json").is_file():
            found[int(step)] = path  # ".old-" sorts before "step-"
    return [found[step] for step in sorted(found)]


class Reader:
    """
    The tensors of one checkpoint.

    Raises:
        ConfigError: the folder is no whole checkpoint, or of a format that this version does not know.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.run: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            indices = [json.loads((folder / name).read_text(encoding="utf-8")) for name in self.run["indices"]]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"is no whole checkpoint ({error})", where=str(folder)) from None
        if self.run.get("format") != FORMAT:
            raise ConfigError(f"has format {self.run.get('format')!r}, this pdrun reads {FORMAT}", where=str(folder))
        self._pieces: dict[str, list[Piece]] = {}
        for entry in (entry for index in indices for entry in index):
            piece = Piece(**{**entry, "shape": tuple(entry["shape"])})
            if Path(piece.file).name != piece.file:
                raise ConfigError(f"{piece.name} lies outside of the folder", where=str(folder))
            self._pieces.setdefault(piece.name, []).append(piece)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor; ConfigError where there is none of that name."""
        return self._find(name)[0].shape

    def _find(self, name: str) -> list[Piece]:
        if name not in self._pieces:
            raise ConfigError(
                f"has no {name}", where=str(self.folder), hint="the model differs from the one that was saved"
            )
        return self._pieces[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """
        Return elements ``start`` to ``stop`` of a flattened tensor, on the host.

        Raises:
            ConfigError: it isn't there, in part or at all, or a piece's checksum is wrong.
        """
        pieces = self._find(name)
        dtype = TYPES[pieces[0].dtype]
        total = torch.Size(pieces[0].shape).numel()
        stop = total if stop is None else stop
        out = torch.empty(stop - start, dtype=dtype)
        covered = start
        for piece in sorted(pieces, key=lambda piece: piece.start):
            low, high = max(piece.start, covered), min(piece.stop, stop)
            if low > covered or low >= high:
                continue
            self._fill(out[low - start : high - start], piece, low)
            covered = high
        if covered < stop:
            raise ConfigError(f"lacks elements {covered} to {stop} of {name}", where=str(self.folder))
        return out

    def _fill(self, out: torch.Tensor, piece: Piece, low: int) -> None:
        data = buffer_of(out)
        with open(self.folder / piece.file, "rb") as file:
            file.seek(piece.offset + (low - piece.start) * out.element_size())
            if file.readinto(data) != len(data):
                raise ConfigError(f"{piece.file} is too short", where=str(self.folder))
        if out.numel() == piece.stop - piece.start and zlib.crc32(data) != piece.crc:
            raise ConfigError(
                f"{piece.name} has a wrong checksum", where=str(self.folder), hint="load an older checkpoint"
            )
