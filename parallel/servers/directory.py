"""
Where the servers of this job are: variables of the launcher, and addresses in the job's store.

    PDRUN_SERVER_COUNT=2                number of servers
    PDRUN_SERVER_KEY                    the key of the data channel, hexadecimal
    store: pdrun/server/GENERATION/R    the addresses of server R, as JSON
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, PeerLost
from pdrun.parallel.startup.init import find_worker, init

KEY_BYTES = 32
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class ServerDirectory:
    """The servers of a job, as one worker sees them."""

    servers: int
    key: bytes
    rank: int
    generation: int
    store: Any
    """torch's store of the job."""
    seconds: float

    def find_addresses(self, server: int) -> list[str]:
        """
        Return the addresses of a server: its unix socket if it is on this host, then TCP.

        Raises:
            PeerLost: it has not started in time.
        """
        try:
            self.store.set_timeout(timedelta(seconds=self.seconds))
            data = json.loads(self.store.get(store_key(self.generation, server)))
        except Exception as error:  # torch raises RuntimeErrors of several classes
            what = f"parameter server {server} has not started: {error}"
            raise PeerLost(what, hint="its log has the reason") from None
        found = []
        if data["host"] == read_boot_id() and Path(data["unix"]).exists():
            found.append(str(data["unix"]))
        if data["tcp"]:
            found.append(str(data["tcp"]))
        return found


def find_directory(
    seconds: float, environ: Mapping[str, str] = os.environ
) -> ServerDirectory | None:
    """
    Return the servers of this job; None for a job of one process without servers.

    Raises:
        ConfigError: several workers and no servers, or variables are wrong.
    """
    context = init()
    servers = read_count(environ, "PDRUN_SERVER_COUNT")
    if not servers:
        if context.world_size > 1:
            what = f"this job has {context.world_size} workers and no parameter servers"
            raise ConfigError(what, where="pdrun.servers", hint="start it with pdrun --servers 1")
        return None
    worker = find_worker()
    if worker is None:
        raise ConfigError("is set, but RANK is not", where="PDRUN_SERVER_COUNT")
    return ServerDirectory(
        servers,
        read_key(environ),
        context.rank,
        context.generation,
        connect_store(worker.master_addr, worker.master_port, seconds),
        seconds,
    )


def connect_store(host: str, port: int, seconds: float) -> Any:
    """Return a client of the job's store."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except Exception as error:  # torch raises RuntimeErrors of several classes
        raise PeerLost(
            f"the job's store does not answer: {error}", where=f"{host}:{port}"
        ) from None


def store_key(generation: int, server: int) -> str:
    """Return the key of a server's addresses."""
    return f"pdrun/server/{generation}/{server}"


def read_count(environ: Mapping[str, str], name: str) -> int:
    """Return a number of the launcher; 0 if the variable is not set."""
    text = environ.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{text!r} is not a whole number", where=name)
    return int(text)


def read_key(environ: Mapping[str, str]) -> bytes:
    """Return the key of the data channel."""
    try:
        key = bytes.fromhex(environ.get("PDRUN_SERVER_KEY", ""))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("is not a key", where="PDRUN_SERVER_KEY", hint="pdrun sets it")
    return key


def read_boot_id() -> str:
    """Return what is equal for all processes of one running kernel."""
    try:
        return Path(BOOT_ID_FILE).read_text().strip()
    except OSError:
        return ""
