"""
A server's note of its last files of tables, from which its next process continues alone.

In modes async and bounded, gradients are used in the order of their arrival. So one server may go
back to earlier values while the others go on. In sync mode it may not: all weights of a job are of
one step, and the job starts again from a checkpoint.

The note is in the agent's folder, where the agent finds out whether a killed server can continue.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pdrun.errors import ConfigError
from pdrun.parallel.servers.settings import parse_mode
from pdrun.parallel.servers.tables import snapshot
from pdrun.parallel.servers.tables.store import TableStore


@dataclass(frozen=True)
class SnapshotNote:
    """Where a server has written its tables."""

    folders: tuple[str, ...]
    """The folder, and its later name if a checkpoint is renamed when it is complete."""
    mode: str
    seconds: float
    """Limit of every wait."""
    at: float
    """Wall clock, seconds since the epoch."""

    def write(self, path: Path) -> None:
        """Replace the note."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)


def read_note(path: Path) -> SnapshotNote | None:
    """
    Return the note; None if this server has written no tables yet.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
        return SnapshotNote(**{**data, "folders": tuple(data["folders"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"is no note of a server ({error})", where=str(path)) from None


def restore_store(note: SnapshotNote, *, server: int, servers: int, workers: int) -> TableStore:
    """
    Return the tables of a server as they were written last.

    Raises:
        ConfigError: they cannot be read.
    """
    store = TableStore(
        parse_mode(note.mode),
        server=server,
        servers=servers,
        workers=workers,
        seconds=note.seconds,
    )
    name = f"{snapshot.file_name(server)}.json"
    folders = [Path(folder) for folder in note.folders]
    found = [folder for folder in folders if (folder / name).is_file()]
    snapshot.restore_server(store, (found or folders)[0])
    return store


def describe_return(store: TableStore, note: SnapshotNote, lost_at: float) -> str:
    """
    Return a line for the user.

    Args:
        lost_at: wall clock at which the earlier process ended.
    """
    return (
        f"went back to version {store.updates:,}: {max(0.0, lost_at - note.at):.1f} s of updates "
        f"are lost; it serves again after {max(0.0, time.time() - lost_at):.1f} s"
    )
