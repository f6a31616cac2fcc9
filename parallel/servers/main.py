"""
The program of a server process, which `pdrun --servers` starts; it never runs the user's script.

    PDRUN_SERVER_RANK, PDRUN_SERVER_COUNT   number of this server, and of all
    PDRUN_SERVER_FOLDER                 a private folder, for the unix socket
    PDRUN_SERVER_LISTEN                 the address for workers of other hosts; empty: none
    PDRUN_SERVER_KEY                    the key of the data channel
    PDRUN_SERVER_NOTE                   file that tells where this server has written its tables
    PDRUN_SERVER_LOST_AT                time at which an earlier process of this server was lost
    MASTER_ADDR, MASTER_PORT            the job's store, which gets this server's addresses
    WORLD_SIZE, PDRUN_GENERATION        workers, and the generation that is served

It runs until it is killed: the agent ends it after the workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, PdrunError
from pdrun.parallel.servers.directory import (
    connect_store,
    read_boot_id,
    read_count,
    read_key,
    store_key,
)
from pdrun.parallel.servers.service import ParameterService
from pdrun.rendezvous.transport.listen import bind_listener, use_port_range_of

STORE_SECONDS = 300.0


def serve(environ: Mapping[str, str]) -> None:
    """
    Serve until the process ends.

    Raises:
        PdrunError: a variable is wrong, or the job's store does not answer.
    """
    server = read_count(environ, "PDRUN_SERVER_RANK")
    generation = read_count(environ, "PDRUN_GENERATION")
    folder = Path(environ.get("PDRUN_SERVER_FOLDER", ""))
    if not folder.is_dir():
        raise ConfigError("is not a folder", where="PDRUN_SERVER_FOLDER")
    torch.set_num_threads(max(1, read_count(environ, "OMP_NUM_THREADS")))
    use_port_range_of(environ)
    service = ParameterService(
        read_key(environ),
        server=server,
        servers=read_count(environ, "PDRUN_SERVER_COUNT"),
        workers=read_count(environ, "WORLD_SIZE"),
        generation=generation,
        print_line=_print_line,
        note=Path(environ["PDRUN_SERVER_NOTE"]) if environ.get("PDRUN_SERVER_NOTE") else None,
    )
    if lost_at := environ.get("PDRUN_SERVER_LOST_AT"):
        service.continue_alone(float(lost_at))
    addresses = {"host": read_boot_id(), "tcp": ""}
    addresses["unix"] = service.listen_unix(str(folder / f"server-{server}.sock"))
    if listen := environ.get("PDRUN_SERVER_LISTEN"):
        listener = bind_listener(Endpoint(listen, 0))
        addresses["tcp"] = str(Endpoint(listen, int(listener.getsockname()[1])))
        service.listen_tcp(listener)
    host, port = environ.get("MASTER_ADDR", ""), read_count(environ, "MASTER_PORT")
    store = connect_store(host, port, STORE_SECONDS)
    store.set(store_key(generation, server), json.dumps(addresses))
    service.serve_forever()


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the server; an error is one line on stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers first
    try:
        serve(os.environ)
    except PdrunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
