"""Reads the tensors of a checkpoint, fully or in part, and verifies their checksums."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.regions import DimRanges, Region, SpanCopy, full_region
from pdrun.parallel.checkpoint.storage import (
    BLOCK_BYTES,
    DTYPES,
    READABLE_VERSIONS,
    TensorPiece,
    byte_view,
    find_sources,
)


class CheckpointReader:
    """
    The tensors of one checkpoint.

    Raises:
        ConfigError: the folder is not a complete checkpoint, or has an unknown format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.run_json: dict[str, Any] = json.loads(
                (folder / "run.json").read_text(encoding="utf-8")
            )
            indices = [
                json.loads((folder / name).read_text(encoding="utf-8"))
                for name in self.run_json["indices"]
            ]
            found = [_parse_piece(entry) for index in indices for entry in index]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"is not a complete checkpoint ({error})", where=str(folder)
            ) from None
        if self.run_json.get("format") not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            what = f"has format {self.run_json.get('format')!r}, this pdrun reads {readable}"
            raise ConfigError(what, where=str(folder))
        self._pieces: dict[str, list[TensorPiece]] = {}
        for piece in found:
            if Path(piece.file).name != piece.file:
                raise ConfigError(f"{piece.name} is outside of the folder", where=str(folder))
            if piece.dtype not in DTYPES:
                raise ConfigError(
                    f"{piece.name} has the unknown type {piece.dtype}", where=str(folder)
                )
            self._pieces.setdefault(piece.name, []).append(piece)

    def tensor_names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._pieces)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """
        Return the shape of a full tensor.

        Raises:
            ConfigError: the checkpoint has no tensor of that name.
        """
        return self._find_pieces(name)[0].shape

    def pieces_of(self, name: str) -> list[TensorPiece]:
        """
        Return all pieces of a tensor.

        Raises:
            ConfigError: the checkpoint has no tensor of that name.
        """
        return self._find_pieces(name)

    def _find_pieces(self, name: str) -> list[TensorPiece]:
        if name not in self._pieces:
            raise ConfigError(
                f"has no {name}",
                where=str(self.folder),
                hint="the model differs from the one that was saved",
            )
        return self._pieces[name]

    def read_tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        """
        Return a region of a tensor, flattened, on the host; only its bytes are read.

        Args:
            region: default: the full tensor.

        Raises:
            ConfigError: elements are missing, or the checksum of a piece is wrong.
        """
        pieces = self._find_pieces(name)
        if region is None:
            region = full_region(pieces[0].shape)
        out = torch.empty(region.numel, dtype=DTYPES[pieces[0].dtype])
        got: list[tuple[int, int]] = []
        for piece, copies in find_sources(pieces, region):
            self._copy_from_piece(out, region.start, piece, copies)
            got += [(copy.target, copy.target + copy.count) for copy in copies]
        covered = region.start
        for low, high in sorted(got):
            if low > covered:
                break
            covered = max(covered, high)
        if covered < region.stop:
            raise ConfigError(
                f"lacks elements {covered} to {region.stop} of {name}", where=str(self.folder)
            )
        return out

    def _copy_from_piece(
        self, out: torch.Tensor, start: int, piece: TensorPiece, copies: list[SpanCopy]
    ) -> None:
        """
        Copy elements of a piece to their place.

        Args:
            start: offset of the first element of ``out`` in the region.
        """
        size = out.element_size()
        target = byte_view(out)
        length = (piece.stop - piece.start) * size
        with self._open_piece(piece) as file:
            if os.fstat(file.fileno()).st_size < piece.offset + length:
                raise ConfigError(f"{piece.file} is too short", where=str(self.folder))
            if len(copies) == 1 and copies[0].count == piece.stop - piece.start:
                (copy,) = copies
                file.seek(piece.offset)
                data = target[(copy.target - start) * size :][:length]
                file.readinto(data)
                self._check_blocks(piece, data, [(0, length)])
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
                    self._check_blocks(piece, data, parts)

    def _open_piece(self, piece: TensorPiece) -> BufferedReader:
        try:
            return open(self.folder / piece.file, "rb")
        except OSError as error:
            raise ConfigError(
                f"{piece.file} cannot be read ({error.strerror})", where=str(self.folder)
            ) from None

    def _check_blocks(
        self, piece: TensorPiece, data: memoryview, parts: list[tuple[int, int]]
    ) -> None:
        """
        Compare the blocks of a piece that contain some bytes with their checksums.

        Args:
            parts: [low, high) byte ranges of the piece.
        """
        if piece.crcs is None:
            right = (
                sum(high - low for low, high in parts) < len(data) or zlib.crc32(data) == piece.crc
            )
        else:
            blocks = {
                block
                for low, high in parts
                for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES))
            }
            right = all(
                piece.crcs[block : block + 1]
                == (zlib.crc32(data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]),)
                for block in sorted(blocks)
            )
        if not right:
            what = f"{piece.name} has a wrong checksum"
            raise ConfigError(what, where=str(self.folder), hint="load an older checkpoint")


def _parse_piece(entry: Any) -> TensorPiece:
    """
    Return the piece of an index entry.

    Raises:
        TypeError, KeyError, ValueError: it is not an entry.
    """
    crcs = None if entry.get("crcs") is None else tuple(entry["crcs"])
    return TensorPiece(
        **{
            **entry,
            "shape": tuple(entry["shape"]),
            "ranges": _parse_ranges(entry.get("ranges")),
            "crcs": crcs,
        }
    )


def _parse_ranges(value: Any) -> tuple[DimRanges, ...] | None:
    if value is None:
        return None
    return tuple(tuple((low, high) for low, high in dim) for dim in value)
