"""
Checkpoints on disk: a folder that is whole or not there.

    DIR/step-00000120/rank-00003.bin     tensors' bytes, one after another, each at a multiple of 64
    DIR/step-00000120/rank-00003.json    what lies where in it: name, type, shape, box, offset, checksum
    DIR/step-00000120/run.json           everything that isn't a tensor; written last

Each rank writes its own pieces into a hidden folder. When all have told that theirs are on the
disk, rank 0 writes run.json and renames the folder. A process that dies anywhere leaves a hidden
folder, which the next save removes. Pieces are boxes (`boxes`): any ranks on any mesh find what
they need by arithmetic. Nothing is unpickled.

Each block of a piece has a checksum, so that who reads a part of it is told of damage too.

Format 2 has ``ranges``, for each dim the [low, high] ranges of the whole tensor that the piece was
cut from; ``start`` and ``stop`` count elements of that, flattened. In format 1 pieces are ranges of
whole tensors.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint.regions import Box, Copy, Ranges, common, everything

ALIGN = 64
BLOCK = 1 << 20
"""
Bytes that have a checksum of their own: who reads a part of a piece reads and checks the blocks
that it lies in.
"""
PREFIX = "step-"
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    )
}
FORMAT = 2
READS = (1, 2)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    stop: int
    file: str = ""
    offset: int = 0
    crc: int = 0
    """Checksum of all of it, in files that have none of blocks."""
    crcs: tuple[int, ...] | None = None
    """Checksums of its blocks."""
    ranges: tuple[Ranges, ...] | None = None
    """What of each dim the piece was cut from, before it was flattened; None: everything."""
    box: Box = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = everything(self.shape).ranges if self.ranges is None else self.ranges
        object.__setattr__(self, "box", Box(self.shape, ranges, self.start, self.stop))

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, box: Box) -> Piece:
        """
        Return a piece that is not written yet; UsageError where no checkpoint can hold its type.
        """
        kind = str(dtype).removeprefix("torch.")
        if kind not in TYPES:
            raise UsageError(
                f"{name} has the type {kind}, which no checkpoint holds", where="pdrun.Run.save"
            )
        return cls(name, kind, box.shape, box.start, box.stop, ranges=box.ranges)

    def entry(self) -> dict[str, Any]:
        """Return the piece as a line of an index."""
        return {name: value for name, value in asdict(self).items() if name != "box"}


def sources(pieces: Iterable[Piece], box: Box) -> Iterator[tuple[Piece, list[Copy]]]:
    """
    Yield the pieces of which a box of a tensor is put together, each with the elements to take from
    it.

    Nothing is read, and a piece that has nothing of the box is left out: a rank, or an offline
    transform, opens the files of these only. Pieces with the same box are replicas: the first is
    taken.

    Args:
        pieces: of one tensor, in any order.
        box: a part of that tensor.
    """
    seen = set()
    for piece in pieces:
        copies = [] if piece.box in seen else common(piece.box, box)
        seen.add(piece.box)
        if copies:
            yield piece, copies


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host; the tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    if size:
        return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    return memoryview(b"")


# ---- writing ----------------------------------------------------------------


def write_rank(folder: Path, rank: int, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> None:
    """Write a rank's pieces and their index, and have them on the disk before returning."""
    name = f"rank-{rank:05d}"
    index: list[dict[str, Any]] = []
    with open(folder / f"{name}.bin", "wb") as file:
        for piece, tensor in pieces:
            file.write(b"\0" * (-file.tell() % ALIGN))
            data = buffer_of(tensor)
            crcs = [zlib.crc32(data[low : low + BLOCK]) for low in range(0, len(data), BLOCK)]
            index.append(
                {**piece.entry(), "file": f"{name}.bin", "offset": file.tell(), "crcs": crcs}
            )
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
    """
    Remove all but the newest checkpoints: first their run.json, so that none is ever half there.
    """
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


# ---- reading ----------------------------------------------------------------


def whole(folder: Path) -> list[Path]:
    """
    Return the whole checkpoints in a folder in the order in which they were written; one that was
    being replaced counts where its successor isn't there.

    That is the order of their steps, but where a run has gone back to an earlier step, or begun
    anew in the folder.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{PREFIX}*")) if folder.is_dir() else []:
        step = path.name.rpartition("-")[2]
        known = path.name in (f"{PREFIX}{step}", f".old-{PREFIX}{step}")
        if known and step.isdigit() and (path / "run.json").is_file():
            found[int(step)] = path  # ".old-" sorts before "step-"
    return [path for _, _, path in sorted((turn(path), step, path) for step, path in found.items())]


def turn(path: Path) -> int:
    """Return when a checkpoint was written, counted in its folder; 0 where that isn't told."""
    try:
        return int(json.loads((path / "run.json").read_text(encoding="utf-8")).get("turn", 0))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0


class Reader:
    """
    The tensors of one checkpoint.

    Raises:
        ConfigError: the folder is no whole checkpoint, or of a format that this version does not
            know.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.run: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            indices = [
                json.loads((folder / name).read_text(encoding="utf-8"))
                for name in self.run["indices"]
            ]
            found = [_piece(entry) for index in indices for entry in index]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"is no whole checkpoint ({error})", where=str(folder)) from None
        if self.run.get("format") not in READS:
            what = f"has format {self.run.get('format')!r}, this pdrun reads {' and '.join(map(str, READS))}"
            raise ConfigError(what, where=str(folder))
        self._pieces: dict[str, list[Piece]] = {}
        for piece in found:
            if Path(piece.file).name != piece.file:
                raise ConfigError(f"{piece.name} lies outside of the folder", where=str(folder))
            if piece.dtype not in TYPES:
                raise ConfigError(
                    f"{piece.name} has the unknown type {piece.dtype}", where=str(folder)
                )
            self._pieces.setdefault(piece.name, []).append(piece)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor; ConfigError where there is none of that name."""
        return self._find(name)[0].shape

    def pieces(self, name: str) -> list[Piece]:
        """Return all pieces of a tensor; ConfigError where there is none of that name."""
        return self._find(name)

    def _find(self, name: str) -> list[Piece]:
        if name not in self._pieces:
            raise ConfigError(
                f"has no {name}",
                where=str(self.folder),
                hint="the model differs from the one that was saved",
            )
        return self._pieces[name]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """
        Return a box of a tensor, flattened, on the host; only its bytes are read.

        Args:
            box: default: the whole tensor.

        Raises:
            ConfigError: it isn't there, in part or at all, or a piece's checksum is wrong.
        """
        pieces = self._find(name)
        box = everything(pieces[0].shape) if box is None else box
        out = torch.empty(box.numel, dtype=TYPES[pieces[0].dtype])
        got: list[tuple[int, int]] = []
        for piece, copies in sources(pieces, box):
            self._fill(out, box.start, piece, copies)
            got += [(copy.target, copy.target + copy.count) for copy in copies]
        covered = box.start
        for low, high in sorted(got):
            if low > covered:
                break
            covered = max(covered, high)
        if covered < box.stop:
            raise ConfigError(
                f"lacks elements {covered} to {box.stop} of {name}", where=str(self.folder)
            )
        return out

    def _fill(self, out: torch.Tensor, start: int, piece: Piece, copies: list[Copy]) -> None:
        """
        Copy elements of a piece to where they belong; ``start`` is what the first of ``out`` counts
        as.
        """
        size = out.element_size()
        target = buffer_of(out)
        length = (piece.stop - piece.start) * size
        with self._open(piece) as file:
            if os.fstat(file.fileno()).st_size < piece.offset + length:
                raise ConfigError(f"{piece.file} is too short", where=str(self.folder))
            if len(copies) == 1 and copies[0].count == piece.stop - piece.start:
                (copy,) = copies
                file.seek(piece.offset)
                data = target[(copy.target - start) * size :][:length]
                file.readinto(data)
                self._check(piece, data, [(0, length)])
                return
            with (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
            ):
                with view[piece.offset : piece.offset + length] as data:
                    parts = []
                    for copy in copies:
                        low = (copy.source - piece.start) * size
                        high = (copy.target - start) * size
                        target[high : high + copy.count * size] = data[
                            low : low + copy.count * size
                        ]
                        parts.append((low, low + copy.count * size))
                    self._check(piece, data, parts)

    def _open(self, piece: Piece) -> BufferedReader:
        try:
            return open(self.folder / piece.file, "rb")
        except OSError as error:
            raise ConfigError(
                f"{piece.file} cannot be read ({error.strerror})", where=str(self.folder)
            ) from None

    def _check(self, piece: Piece, data: memoryview, parts: list[tuple[int, int]]) -> None:
        """
        Hold the blocks of a piece in which parts lie, given as [low, high) bytes of it, against
        their checksums.
        """
        if piece.crcs is None:
            right = (
                sum(high - low for low, high in parts) < len(data) or zlib.crc32(data) == piece.crc
            )
        else:
            blocks = {
                block for low, high in parts for block in range(low // BLOCK, -(-high // BLOCK))
            }
            right = all(
                piece.crcs[block : block + 1]
                == (zlib.crc32(data[block * BLOCK : (block + 1) * BLOCK]),)
                for block in sorted(blocks)
            )
        if not right:
            what = f"{piece.name} has a wrong checksum"
            raise ConfigError(what, where=str(self.folder), hint="load an older checkpoint")


def _piece(entry: Any) -> Piece:
    """
    Return the piece of an entry of an index; TypeError, KeyError or ValueError where it is
    something else.
    """
    crcs = None if entry.get("crcs") is None else tuple(entry["crcs"])
    return Piece(
        **{
            **entry,
            "shape": tuple(entry["shape"]),
            "ranges": _ranges(entry.get("ranges")),
            "crcs": crcs,
        }
    )


def _ranges(value: Any) -> tuple[Ranges, ...] | None:
    if value is None:
        return None
    return tuple(tuple((low, high) for low, high in dim) for dim in value)
