"""Reads the tensors of a checkpoint, fully or in part, and verifies their checksums."""

from __future__ import annotations

import mmap
import os
import zlib
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import NoReturn

import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.index import read_index
from pdrun.parallel.checkpoint.regions import Region, SpanCopy, full_region
from pdrun.parallel.checkpoint.storage import (
    BLOCK_BYTES,
    DTYPES,
    TensorPiece,
    byte_view,
    find_sources,
    open_regular,
)
from pdrun.text import escape_text

MAX_MISSING = 1024
"""A tensor whose pieces have fewer than one of so many elements is damaged."""


class CheckpointReader:
    """
    The tensors of one checkpoint.

    Raises:
        ConfigError: the folder is not a complete checkpoint, or has an unknown format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_json, found = read_index(folder)
        self._pieces: dict[str, list[TensorPiece]] = {}
        for piece in found:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._checked: set[str] = set()
        """Names of tensors whose pieces fit together and fit into their files."""

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
                f"has no {escape_text(name)}",
                where=str(self.folder),
                hint="the model differs from the one that was saved",
            )
        pieces = self._pieces[name]
        if name not in self._checked:
            self._check_pieces(escape_text(name), pieces)
            self._checked.add(name)
        return pieces

    def _check_pieces(self, name: str, pieces: list[TensorPiece]) -> None:
        """Check that the pieces of a tensor agree, and that their bytes can exist."""
        first = pieces[0]
        if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in pieces):
            raise ConfigError(f"{name} has several shapes or types", where=str(self.folder))
        for piece in pieces:
            nbytes = (piece.stop - piece.start) * DTYPES[piece.dtype].itemsize
            try:
                size = (self.folder / piece.file).stat().st_size
            except OSError as error:  # files may be on other nodes; checksums prove the size
                if piece.crcs is None:
                    self._refuse_file(piece, error.strerror)
                continue
            if size < piece.offset + nbytes:
                raise ConfigError(f"{piece.file} is too short", where=str(self.folder))
        if prod(first.shape) > MAX_MISSING * sum(piece.stop - piece.start for piece in pieces):
            raise ConfigError(f"lacks nearly all elements of {name}", where=str(self.folder))

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
        try:
            out = torch.empty(region.numel, dtype=DTYPES[pieces[0].dtype])
        except RuntimeError:  # torch has no other for this
            size = region.numel * DTYPES[pieces[0].dtype].itemsize
            raise ConfigError(
                f"there is no memory for the {size:,} bytes of {escape_text(name)}",
                where=str(self.folder),
            ) from None
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
                f"lacks elements {covered} to {region.stop} of {escape_text(name)}",
                where=str(self.folder),
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
            return open_regular(self.folder / piece.file)
        except OSError as error:
            self._refuse_file(piece, error.strerror)

    def _refuse_file(self, piece: TensorPiece, reason: str | None) -> NoReturn:
        raise ConfigError(
            f"{piece.file} cannot be read ({reason})", where=str(self.folder)
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
            what = f"{escape_text(piece.name)} has a wrong checksum"
            raise ConfigError(what, where=str(self.folder), hint="load an older checkpoint")
