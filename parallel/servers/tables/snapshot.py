"""
The tables of all servers as files that any number of servers can read.

    server-00001.json           tables, the step, the number of servers
    server-00001.safetensors    NAME|ids, NAME|values, NAME|state0 ...; NAME|piece3|values ...

Rows are sorted by id. A server reads the files of all servers and takes what is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.safetensors import SafetensorsFile, write_file
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import find_owners, piece_owner
from pdrun.parallel.servers.tables.store import TableStore
from pdrun.parallel.servers.tables.tables import DenseTable

FILE_PREFIX = "server-"
SNAPSHOT_FORMAT = 1


def write_tables(store: TableStore, folder: Path, step: Any) -> None:
    """
    Write the tables of a server, all at one moment.

    Raises:
        ConfigError: the folder cannot be written.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    tensors: list[tuple[str, torch.Tensor]] = []

    def add(name: str, tensor: torch.Tensor) -> None:
        shapes[name] = (tensor.dtype, tuple(tensor.shape))
        tensors.append((name, tensor))

    with store.paused() as tables:
        described = []
        for table in tables:
            entry: dict[str, Any] = {"spec": table.spec.to_json()}
            label = table.spec.name
            if table.rows is not None:
                ids, values, states = table.rows.export_rows()
                entry["step"] = table.rows.step
                add(f"{label}|ids", ids)
                add(f"{label}|values", values)
                for index, state in enumerate(states):
                    add(f"{label}|state{index}", state)
            elif table.dense is not None:
                entry["pieces"] = {}
                for piece, values, states, updates in table.dense.export_pieces():
                    entry["pieces"][str(piece)] = updates
                    add(f"{label}|piece{piece}|values", values)
                    for index, state in enumerate(states):
                        add(f"{label}|piece{piece}|state{index}", state)
            described.append(entry)
        plain = {
            "format": SNAPSHOT_FORMAT,
            "servers": store.servers,
            "step": step,
            "tables": described,
            "updates": store.updates,
            "requests": store.export_requests(),
        }
        write_server(folder, store.server, plain, shapes, tensors)


def write_server(
    folder: Path,
    server: int,
    plain: dict[str, Any],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """
    Write the two files of a server. Earlier ones are replaced when both are complete; the JSON file
    is missing meanwhile, so two that do not belong together are never read.

    Raises:
        ConfigError: the folder cannot be written.
    """
    name = file_name(server)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{name}.new"
        write_file(new, shapes, tensors)
        part = folder / f"{name}.json.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(plain, file)
            file.flush()
            os.fsync(file.fileno())
        (folder / f"{name}.json").unlink(missing_ok=True)
        new.replace(folder / f"{name}.safetensors")
        part.replace(folder / f"{name}.json")
    except OSError as error:
        what = f"the tables of server {server} cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(folder)) from None


def file_name(server: int) -> str:
    """Return the name of a server's files, without suffix."""
    return f"{FILE_PREFIX}{server:05d}"


def restore_server(store: TableStore, folder: Path) -> None:
    """
    Give an empty server the tables that an earlier process of it wrote, and what it had answered.

    Raises:
        ConfigError: the files are not there, or not of this server.
    """
    path = folder / f"{file_name(store.server)}.json"
    try:
        plain = json.loads(path.read_bytes())
        if plain["format"] != SNAPSHOT_FORMAT or plain["servers"] != store.servers:
            raise ValueError("it is of another job")
        specs = [TableSpec.from_json(entry["spec"]) for entry in plain["tables"]]
        requests, updates = dict(plain["requests"]), int(plain["updates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"has no tables of server {store.server} ({error})"
        raise ConfigError(what, where=str(folder)) from None
    file = SafetensorsFile(path.with_suffix(".safetensors"))
    for spec in specs:
        store.declare_table(spec)
    with store.paused() as tables:
        for table, entry in zip(tables, plain["tables"], strict=True):
            label = table.spec.name
            if table.rows is not None:
                read = _read_all(file, f"{label}|")
                states = [read[f"state{i}"] for i in range(len(read) - 2)]
                table.rows.restore_rows(read["ids"], read["values"], states)
                table.rows.step = entry["step"]
            elif table.dense is not None:
                _read_pieces(table.dense, file, label, entry["pieces"])
            table.open()
    store.resume_requests(requests, updates)


def _read_pieces(dense: DenseTable, file: SafetensorsFile, label: str, pieces: Any) -> None:
    for text, updates in pieces.items():
        read = _read_all(file, f"{label}|piece{text}|")
        states = [read[f"state{i}"] for i in range(len(read) - 1)]
        dense.assign_piece(int(text), read["values"], states, updates)


def read_tables(store: TableStore, folder: Path) -> int:
    """
    Give the declared tables of a server their values of a checkpoint; return its step.

    Raises:
        ConfigError: the checkpoint is not complete, or has another table of that name.
    """
    plains = read_plains(folder)
    step = plains[0]["step"]
    with store.paused() as tables:
        for table in tables:
            label = table.spec.name
            entries = [
                (path, entry)
                for path, plain in zip(list_files(folder), plains, strict=True)
                for entry in plain["tables"]
                if entry["spec"]["name"] == label
            ]
            if not entries:
                raise ConfigError(f"has no served table {label}", where=str(folder))
            saved = entries[0][1]["spec"]
            mine = table.spec.to_json()
            for field in ("kind", "dim", "size", "optimizer"):
                theirs, ours = saved[field], mine[field]
                if field == "optimizer":
                    theirs, ours = theirs["name"], ours["name"]
                if theirs != ours:
                    what = f"table {label} has {field} {theirs} there and {ours} here"
                    raise ConfigError(what, where=str(folder))
            if table.rows is not None:
                table.rows.clear()
            for path, entry in entries:
                file = SafetensorsFile(path.with_suffix(".safetensors"))
                if table.rows is not None:
                    read = _read_all(file, f"{label}|")
                    ids = read["ids"]
                    owned = find_owners(ids, label, store.servers) == store.server
                    states = [read[f"state{i}"][owned] for i in range(len(read) - 2)]
                    table.rows.assign_rows(ids[owned], read["values"][owned], states)
                    table.rows.step = entry["step"]
                elif table.dense is not None:
                    pieces = {
                        text: updates
                        for text, updates in entry["pieces"].items()
                        if piece_owner(int(text), label, store.servers) == store.server
                    }
                    _read_pieces(table.dense, file, label, pieces)
            table.open()
    return int(step)


def list_files(folder: Path) -> list[Path]:
    """Return the JSON files of all servers in a folder."""
    return sorted(folder.glob(f"{FILE_PREFIX}*.json"))


def read_plains(folder: Path) -> list[dict[str, Any]]:
    """
    Return what the JSON files of all servers contain, in the order of `list_files`.

    Raises:
        ConfigError: it is not a complete checkpoint.
    """
    try:
        plains = [json.loads(path.read_bytes()) for path in list_files(folder)]
        is_complete = bool(plains) and all(
            plain["format"] == SNAPSHOT_FORMAT and plain["servers"] == len(plains)
            for plain in plains
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"is not a checkpoint of parameter servers ({error})"
        raise ConfigError(what, where=str(folder)) from None
    if not is_complete:
        found = len(plains)
        what = f"is not a complete checkpoint of parameter servers: {found} files of servers"
        raise ConfigError(what, where=str(folder))
    return plains


def _read_all(file: SafetensorsFile, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): file.read_tensor(name)
        for name in file.entries
        if name.startswith(prefix)
    }
