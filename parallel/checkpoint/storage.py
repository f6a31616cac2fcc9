"""
Checkpoints on disk. A folder is a complete checkpoint or does not exist.

    DIR/step-00000120/rank-00003.bin     tensors' bytes, each at a multiple of 64
    DIR/step-00000120/rank-00003.json    index: name, type, shape, region, offset, checksums
    DIR/step-00000120/run.json           everything that is not a tensor; written last

Each rank writes its own pieces into a hidden folder. When all ranks have flushed theirs to disk,
rank 0 writes run.json and renames the folder. A process that is killed leaves a hidden folder,
which the next save removes. Pieces are regions: any ranks on any mesh compute what they need.
Nothing is unpickled.

Each block of a piece has a checksum, so that damage is found in a partial read too.

Format 2 has ``ranges``: for each dim the [low, high] ranges of the full tensor that the piece was
cut from; ``start`` and ``stop`` count elements of these ranges, flattened. In format 1 pieces are
ranges of full tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.checkpoint.regions import DimRanges, Region, SpanCopy, find_overlap, full_region

ALIGN_BYTES = 64
BLOCK_BYTES = 1 << 20
"""Bytes per checksum. A partial read reads and verifies the blocks that it touches."""
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
MAX_JSON_BYTES = 1 << 28
"""Size of a JSON file: index entries of millions of tensors."""
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor, and the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    start: int
    stop: int
    file: str = ""
    offset: int = 0
    crc: int = 0
    """Checksum of the piece, in files without checksums of blocks."""
    crcs: tuple[int, ...] | None = None
    """Checksums of its blocks."""
    ranges: tuple[DimRanges, ...] | None = None
    """The ranges of each dim that the piece was cut from; None: the full tensor."""
    region: Region = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = full_region(self.shape).ranges if self.ranges is None else self.ranges
        object.__setattr__(self, "region", Region(self.shape, ranges, self.start, self.stop))

    @classmethod
    def for_region(cls, name: str, dtype: torch.dtype, region: Region) -> TensorPiece:
        """
        Return a piece that is not written yet.

        Raises:
            UsageError: checkpoints do not support its type.
        """
        kind = str(dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise UsageError(
                f"{name} has the type {kind}, which checkpoints do not support",
                where="pdrun.Run.save",
            )
        return cls(name, kind, region.shape, region.start, region.stop, ranges=region.ranges)

    def to_entry(self) -> dict[str, Any]:
        """Return the piece as an entry of an index."""
        return {name: value for name, value in asdict(self).items() if name != "region"}


def find_sources(
    pieces: Iterable[TensorPiece], region: Region
) -> Iterator[tuple[TensorPiece, list[SpanCopy]]]:
    """
    Yield the pieces that contain a region of a tensor, each with the elements to take from it.

    Nothing is read. Pieces without elements of the region are left out: a rank, or an offline
    transform, opens the other files only. Pieces with the same region are replicas: the first is
    taken.

    Args:
        pieces: of one tensor, in any order.
        region: a part of that tensor.
    """
    seen = set()
    for piece in pieces:
        copies = [] if piece.region in seen else find_overlap(piece.region, region)
        seen.add(piece.region)
        if copies:
            yield piece, copies


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host. The tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    if size:
        return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    return memoryview(b"")


# ---- writing ----------------------------------------------------------------


def write_rank(folder: Path, rank: int, pieces: Iterable[tuple[TensorPiece, torch.Tensor]]) -> None:
    """Write a rank's pieces and their index, and flush them to disk."""
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
    """Write a small file and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=True)
        _sync_file(file)


def publish_folder(hidden: Path, final: Path) -> None:
    """
    Rename a complete folder to its final name. An older folder of that name is removed afterwards.
    """
    _sync_folder(hidden)
    old = None
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        hidden.rename(final)
    except OSError:  # a later generation has taken the hidden folder away
        if old is not None:
            old.rename(final)
        raise
    _sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def prune_checkpoints(folder: Path, keep: int | None) -> None:
    """
    Remove all but the newest checkpoints. run.json is removed first: no folder is half complete.
    """
    if keep is None:
        return
    for path in list_checkpoints(folder)[:-keep]:
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


def open_regular(path: Path) -> BufferedReader:
    """
    Open a file for reading. A pipe or a device, which could block or never end, is refused.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return open(fd, "rb")
    os.close(fd)
    raise OSError(0, "is not a regular file", str(path))


def read_json(path: Path) -> Any:
    """
    Return the value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or not JSON in UTF-8.
    """
    with open_regular(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """
    Return the complete checkpoints in a folder, in the order in which they were written.

    A checkpoint that was being replaced counts if its successor is missing. The order is that of
    the steps, unless a run went back to an earlier step or started over in the folder.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{FOLDER_PREFIX}*")) if folder.is_dir() else []:
        step = path.name.rpartition("-")[2]
        known = path.name in (f"{FOLDER_PREFIX}{step}", f".old-{FOLDER_PREFIX}{step}")
        if known and step.isdecimal() and _is_complete(path):
            found[int(step)] = path  # ".old-" sorts before "step-"
    return [
        path for _, _, path in sorted((read_turn(path), step, path) for step, path in found.items())
    ]


def _is_complete(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:  # a folder that this user may not read
        return False


def read_turn(path: Path) -> int:
    """Return the sequence number of a checkpoint in its folder; 0 if it has none."""
    try:
        turn = read_json(path / "run.json").get("turn", 0)
    except (OSError, ValueError, AttributeError, RecursionError, MemoryError):
        return 0
    return turn if type(turn) is int else 0
