"""
The tables of a checkpoint without servers: what there is, as one file, or for another number of
servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.safetensors import SafetensorsFile, write_file
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import count_pieces, find_owners, piece_bounds, piece_owner
from pdrun.parallel.servers.tables.optimizers import count_states
from pdrun.parallel.servers.tables.snapshot import (
    SNAPSHOT_FORMAT,
    list_files,
    read_plains,
    write_server,
)

_Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class SavedTable:
    """A table in the files of all servers."""

    spec: TableSpec
    parts: tuple[tuple[SafetensorsFile, dict[str, Any]], ...]
    """Each server's file and entry."""

    @property
    def states(self) -> int:
        """Number of tensors of the optimizer's state."""
        return count_states(self.spec.optimizer)

    def count_rows(self) -> int:
        """Return the number of stored rows, or of elements of a dense weight."""
        if self.spec.kind == "dense":
            return self.spec.size
        return sum(file.entries[f"{self.spec.name}|ids"][1][0] for file, _ in self.parts)

    def read_rows(self, label: str, owner: tuple[int, int] | None = None) -> torch.Tensor:
        """
        Return ids, values or a state, of all rows in ascending order of ids.

        Args:
            label: ids, values, state0 ...
            owner: (server, servers): only rows of this server.
        """
        ids, found = [], []
        for file, _ in self.parts:
            own = file.read_tensor(f"{self.spec.name}|ids")
            tensor = own if label == "ids" else file.read_tensor(f"{self.spec.name}|{label}")
            if owner is not None:
                mine = find_owners(own, self.spec.name, owner[1]) == owner[0]
                own, tensor = own[mine], tensor[mine]
            ids.append(own)
            found.append(tensor)
        return torch.cat(found).index_select(0, torch.cat(ids).argsort())

    def pieces(self) -> Iterator[tuple[int, SafetensorsFile, int]]:
        """Yield the pieces of a dense weight: number, file, updates."""
        for file, entry in self.parts:
            for text, updates in entry["pieces"].items():
                yield int(text), file, int(updates)

    def read_dense(self, label: str) -> torch.Tensor:
        """Return values or a state of a dense weight, flat."""
        out = torch.empty(self.spec.size)
        for piece, file, _ in self.pieces():
            first, last = piece_bounds(piece, self.spec.size)
            out[first:last] = file.read_tensor(f"{self.spec.name}|piece{piece}|{label}")
        return out


class SavedTables:
    """
    The tables in a folder that `snapshot.write_tables` has filled.

    Raises:
        ConfigError: it is not a complete checkpoint of servers, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plains = read_plains(folder)
        self.servers = len(plains)
        self.step = plains[0]["step"]
        files = [SafetensorsFile(path.with_suffix(".safetensors")) for path in list_files(folder)]
        self.tables: dict[str, SavedTable] = {}
        try:
            for entry in plains[0]["tables"]:
                spec = TableSpec.from_json(entry["spec"])
                parts = [
                    (file, next(one for one in plain["tables"] if one["spec"] == entry["spec"]))
                    for file, plain in zip(files, plains, strict=True)
                ]
                self.tables[spec.name] = table = SavedTable(spec, tuple(parts))
                _check_table(table)
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            what = f"is a damaged checkpoint of parameter servers ({error})"
            raise ConfigError(what, where=str(folder)) from None

    def export(self, path: Path, *, with_state: bool) -> None:
        """
        Write one safetensors file: ``NAME`` and ``NAME.ids`` of rows, ``NAME`` of dense weights.

        Args:
            with_state: also write ``NAME.state0`` and so on.
        """
        shapes: _Shapes = {}
        for name, table in self.tables.items():
            count, spec = table.count_rows(), table.spec
            shape = (count, spec.dim) if spec.kind == "rows" else (count,)
            shapes[name] = (torch.float32, shape)
            if spec.kind == "rows":
                shapes[f"{name}.ids"] = (torch.int64, (count,))
            if with_state:
                for index in range(table.states):
                    shapes[f"{name}.state{index}"] = (torch.float32, shape)
        try:
            write_file(path, shapes, ((label, self._read_exported(label)) for label in shapes))
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", where=str(path)) from None

    def _read_exported(self, label: str) -> torch.Tensor:
        table = self.tables.get(label)
        part = "values"
        if table is None:
            name, _, part = label.rpartition(".")
            table = self.tables[name]
        return table.read_rows(part) if table.spec.kind == "rows" else table.read_dense(part)

    def write_for(self, servers: int, folder: Path) -> None:
        """Write the files for another number of servers; one server's are in memory at a time."""
        for server in range(servers):
            tensors: list[tuple[str, torch.Tensor]] = []
            described = []
            for name, table in self.tables.items():
                entry: dict[str, Any] = {"spec": table.spec.to_json()}
                labels = ["values", *(f"state{index}" for index in range(table.states))]
                if table.spec.kind == "rows":
                    entry["step"] = max(int(part["step"]) for _, part in table.parts)
                    tensors += [
                        (f"{name}|{label}", table.read_rows(label, (server, servers)))
                        for label in ("ids", *labels)
                    ]
                else:
                    entry["pieces"] = {}
                    for piece, file, updates in table.pieces():
                        if piece_owner(piece, name, servers) == server:
                            entry["pieces"][str(piece)] = updates
                            tensors += [
                                (label, file.read_tensor(label))
                                for label in (f"{name}|piece{piece}|{one}" for one in labels)
                            ]
                described.append(entry)
            shapes = {label: (tensor.dtype, tuple(tensor.shape)) for label, tensor in tensors}
            plain = {
                "format": SNAPSHOT_FORMAT,
                "servers": servers,
                "step": self.step,
                "tables": described,
            }
            write_server(folder, server, plain, shapes, tensors)


def _check_table(table: SavedTable) -> None:
    """
    Check that the tensors of a table are there.

    Raises:
        ValueError, KeyError: they are not.
    """
    spec = table.spec
    labels = ["values", *(f"state{index}" for index in range(table.states))]
    if spec.kind == "rows":
        for file, entry in table.parts:
            int(entry["step"])
            dtype, shape, _ = file.entries[f"{spec.name}|ids"]
            want = {(torch.float32, (*shape, spec.dim))}
            found = {file.entries[f"{spec.name}|{label}"][:2] for label in labels}
            if dtype != torch.int64 or len(shape) != 1 or found != want:
                raise ValueError(f"table {spec.name} has tensors of other shapes")
        return
    pieces = set()
    for piece, file, _ in table.pieces():
        first, last = piece_bounds(piece, spec.size)
        pieces.add(piece)
        found = {file.entries[f"{spec.name}|piece{piece}|{label}"][:2] for label in labels}
        if found != {(torch.float32, (last - first,))}:
            raise ValueError(f"piece {piece} of {spec.name} has another shape")
    if pieces != set(range(count_pieces(spec.size))):
        raise ValueError(f"pieces of {spec.name} are missing")
