"""Reads the tensors of a checkpoint, whole or in part, and checks their checksums."""

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
from pdrun.parallel.checkpoint.regions import Box, Copy, Ranges, everything
from pdrun.parallel.checkpoint.storage import BLOCK, READS, TYPES, Piece, buffer_of, sources


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
