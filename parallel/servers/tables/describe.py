"""The texts of ``pdrun checkpoint`` about the tables of parameter servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.describe import format_table, show_checkpoint, transform_and_report
from pdrun.parallel.checkpoint.transform import find_checkpoint
from pdrun.parallel.servers.settings import SERVED_FOLDER
from pdrun.parallel.servers.tables.files import SavedTables
from pdrun.parallel.servers.tables.snapshot import list_files
from pdrun.text import escape_text

MAX_SERVERS = 1024


def find_tables(source: Path) -> Path | None:
    """Return the folder with the files of servers: of ``client.save``, or in a checkpoint."""
    if list_files(source):
        return source
    folder = find_checkpoint(source) / SERVED_FOLDER
    return folder if folder.is_dir() else None


def show_with_tables(source: str, mesh: str, strategy: str, as_json: bool) -> str:
    """Return the contents of a checkpoint as text or JSON, with the tables of servers."""
    folder = find_tables(Path(source))
    is_alone = folder == Path(source)
    if is_alone and (mesh or strategy):
        raise UsageError("has tables of servers only, without a mesh", where=source)
    text = "{}" if as_json and is_alone else ""
    if not is_alone:
        text = show_checkpoint(source, mesh, strategy, as_json)
    if folder is None:
        return text
    tables = SavedTables(folder)
    if as_json:
        return json.dumps({**json.loads(text), "servers": tables.servers, **_to_plain(tables)})
    head = f"{folder}: step {tables.step}, tables of {tables.servers} server(s)"
    rows = [("table", "kind", "rows", "dim", "optimizer", "state")]
    for name, table in tables.tables.items():
        spec = table.spec
        dim = str(spec.dim) if spec.kind == "rows" else "-"
        count = f"{table.count_rows():,}"
        settings = (spec.optimizer.name, str(table.states))
        rows.append((escape_text(name), spec.kind, count, dim, *settings))
    return "\n".join([*filter(None, [text]), head, format_table(rows)])


def _to_plain(tables: SavedTables) -> dict[str, Any]:
    found = {
        name: {**table.spec.to_json(), "rows": table.count_rows(), "states": table.states}
        for name, table in tables.tables.items()
    }
    return {"step": tables.step, "tables": found}


def export_tables(source: str, target: str, with_state: bool) -> str:
    """Write the tables to one safetensors file; return a line about it."""
    folder = find_tables(Path(source))
    if folder is None:
        what = "has no tables of parameter servers"
        raise ConfigError(what, where=source, hint="run.export writes the other weights")
    path = Path(target)
    if path.suffix != ".safetensors":
        raise UsageError("must be a file with the suffix .safetensors", where=target)
    tables = SavedTables(folder)
    tables.export(path, with_state=with_state)
    return f"{path}: {len(tables.tables)} table(s) of step {tables.step}"


def transform_with_tables(
    source: str, target: str, mesh: str, strategy: str, servers: int | None
) -> str:
    """
    Transform a checkpoint to another mesh, to another number of servers, or both.

    Args:
        servers: the new number; None: the tables are copied as they are.

    Returns:
        a table of the result.
    """
    if servers is not None and not 1 <= servers <= MAX_SERVERS:
        raise UsageError(f"must be 1 to {MAX_SERVERS}, got {servers}", where="--servers")
    folder = find_tables(Path(source))
    if folder is None:
        if servers is not None:
            raise ConfigError("has no tables of parameter servers", where=source)
        return transform_and_report(source, target, mesh, strategy)
    tables = SavedTables(folder)
    if folder == Path(source):
        return _write_alone(tables, Path(target), mesh or strategy, servers)

    def add_tables(hidden: Path) -> None:
        if servers is None:
            shutil.copytree(folder, hidden / SERVED_FOLDER)
        else:
            tables.write_for(servers, hidden / SERVED_FOLDER)

    if mesh or strategy or servers is None:
        text = transform_and_report(source, target, mesh, strategy, add_tables)
    else:
        text = f"{_copy_with(find_checkpoint(Path(source)), Path(target), add_tables)}:"
    return f"{text}\n{len(tables.tables)} table(s) for {servers or tables.servers} server(s)"


def _write_alone(tables: SavedTables, target: Path, mesh: str, servers: int | None) -> str:
    """Transform a folder that has tables only."""
    if mesh or servers is None:
        what = "has tables of servers only, without a mesh"
        raise UsageError(what, where=str(tables.folder), hint="pass --servers N")
    if target.exists():
        raise UsageError(f"{target} exists", hint="use another folder, or remove it")
    hidden = target.with_name(f".new-{target.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    tables.write_for(servers, hidden)
    hidden.replace(target)
    return f"{target}: {len(tables.tables)} table(s) for {servers} server(s)"


def _copy_with(checkpoint: Path, target: Path, add_tables: Any) -> Path:
    """Copy a checkpoint with other tables; it appears when it is complete."""
    final = target / checkpoint.name
    if final.exists():
        raise UsageError(f"{final} exists", hint="use another folder, or remove it")
    hidden = target / f".new-{final.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    ignore = shutil.ignore_patterns(SERVED_FOLDER)
    try:
        shutil.copytree(checkpoint, hidden, ignore=ignore)
        add_tables(hidden)
        storage.publish_folder(hidden, final)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, (OSError, shutil.Error)):
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot be written ({reason})", where=str(final)) from None
        raise
    return final
