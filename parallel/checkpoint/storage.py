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
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.checkpoint.regions import DimRanges, Region, SpanCopy, find_overlap, full_region

ALIGN_BYTES = 64
BLOCK_BYTES = 1 << 20
"""
Bytes that have a checksum of their own: who reads a part of a piece reads and checks the blocks
that it lies in.
"""
FOLDER_PREFIX = "step-"
DTYPES = {
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
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)


@dataclass(frozen=True)
class TensorPiece:
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
    ranges: tuple[DimRanges, ...] | None = None
    """What of each dim the piece was cut from, before it was flattened; None: everything."""
    region: Region = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = full_region(self.shape).ranges if self.ranges is None else self.ranges
        object.__setattr__(self, "box", Region(self.shape, ranges, self.start, self.stop))

    @classmethod
    def for_region(cls, name: str, dtype: torch.dtype, box: Region) -> TensorPiece:
        """
        Return a piece that is not written yet; UsageError where no checkpoint can hold its type.
        """
        kind = str(dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise UsageError(
                f"{name} has the type {kind}, which no checkpoint holds", where="pdrun.Run.save"
            )
        return cls(name, kind, box.shape, box.start, box.stop, ranges=box.ranges)

    def to_entry(self) -> dict[str, Any]:
        """Return the piece as a line of an index."""
        return {name: value for name, value in asdict(self).items() if name != "box"}


def find_sources(
    pieces: Iterable[TensorPiece], box: Region
) -> Iterator[tuple[TensorPiece, list[SpanCopy]]]:
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
        copies = [] if piece.region in seen else find_overlap(piece.region, box)
        seen.add(piece.region)
        if copies:
            yield piece, copies


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host; the tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    if size:
        return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    return memoryview(b"")


# ---- writing ----------------------------------------------------------------


def write_rank(folder: Path, rank: int, pieces: Iterable[tuple[TensorPiece, torch.Tensor]]) -> None:
    """Write a rank's pieces and their index, and have them on the disk before returning."""
    name = f"rank-{rank:05d}"
    index: list[dict[str, Any]] = []
    with open(folder / f"{name}.bin", "wb") as file:
        for piece, tensor in pieces:
            file.write(b"\0" * (-file.tell() % ALIGN_BYTES))
            data = byte_view(tensor)
            crcs = [
                zlib.crc32(data[low : low + BLOCK_BYTES])
                for low in range(0, len(data), BLOCK_BYTES)
            ]
            index.append(
                {**piece.to_entry(), "file": f"{name}.bin", "offset": file.tell(), "crcs": crcs}
            )
            file.write(data)
        _sync_file(file)
    write_json(folder / f"{name}.json", index)


def write_json(path: Path, value: Any) -> None:
    """Write a small file and have it on the disk before returning."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=True)
        _sync_file(file)


def publish_folder(hidden: Path, final: Path) -> None:
    """Give a complete folder its name; one of that name gives way and is removed after."""
    _sync_folder(hidden)
    old = None
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    hidden.rename(final)
    _sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def prune_checkpoints(folder: Path, keep: int | None) -> None:
    """
    Remove all but the newest checkpoints: first their run.json, so that none is ever half there.
    """
    for path in [] if keep is None else list_checkpoints(folder)[:-keep]:
        (path / "run.json").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading ----------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """
    Return the whole checkpoints in a folder in the order in which they were written; one that was
    being replaced counts where its successor isn't there.

    That is the order of their steps, but where a run has gone back to an earlier step, or begun
    anew in the folder.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{FOLDER_PREFIX}*")) if folder.is_dir() else []:
        step = path.name.rpartition("-")[2]
        known = path.name in (f"{FOLDER_PREFIX}{step}", f".old-{FOLDER_PREFIX}{step}")
        if known and step.isdigit() and (path / "run.json").is_file():
            found[int(step)] = path  # ".old-" sorts before "step-"
    return [
        path for _, _, path in sorted((read_turn(path), step, path) for step, path in found.items())
    ]


def read_turn(path: Path) -> int:
    """Return when a checkpoint was written, counted in its folder; 0 where that isn't told."""
    try:
        return int(json.loads((path / "run.json").read_text(encoding="utf-8")).get("turn", 0))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0
