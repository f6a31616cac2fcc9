"""
The data channel of parameter servers, compared with pyzmq and torch's RPC: one client, one server.

    python benchmarks/parameter_server.py [--rounds 5] [--bind] [pdrun pdrun-tls zmq-ipc rpc ...]

Dense: 64 MiB pushed (the server applies SGD) and pulled. Rows: 65,536 of a table of 1,000,000 x 32.
Small: a pull of 256 rows. Figures are per CPU-second of both processes, which the load of the
machine changes less than wall time; each is the median of rounds in which the kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from server_processes import cpu_seconds

from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.links.remote import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.service import ParameterService
from pdrun.parallel.servers.settings import dense, parse_mode, rows

KEY = bytes(32)
DENSE = 16 << 20
CHUNK = 1 << 20
ROWS, DIM, COUNT = 1_000_000, 32, 65_536
RATE = 0.01


cores: list[int] = []
"""With ``--bind``: of the client, and of the servers."""


def fork_server(serve: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[1:2])
        torch.set_num_threads(1)
        try:
            serve()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


class PdrunPeer:
    """pdrun's server, over a unix socket or TLS."""

    def __init__(self, tls: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/server.sock"
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}" if tls else path

        def serve() -> None:
            service = ParameterService(KEY)
            service.listen_unix(path)
            service.listen_tcp(listener)
            service.serve_forever()

        self.pid = fork_server(serve)
        while not Path(path).exists():
            time.sleep(0.01)
        time.sleep(0.3)
        mode = parse_mode("async")
        link = RemoteLink(0, KEY, WorkerIdentity(0, mode, 0, 60.0), lambda: [address])
        self.client = ServerClient([link], 0, is_local=False)
        self.client.add_dense("w", dense("sgd", lr=RATE), torch.zeros(DENSE))
        self.client.add_rows("t", rows("sgd", lr=RATE), dim=DIM, size=ROWS)
        self.client.push_rows("t", torch.arange(ROWS), torch.ones(ROWS, DIM))
        self.push = lambda grad: self.client.push("w", grad)
        self.pull = lambda out: self.client.pull("w", out)
        self.rows = lambda ids: self.client.rows("t", ids)
        self.push_rows = lambda ids, grads: self.client.push_rows("t", ids, grads)


class PlainTables:
    """What the servers of the other kinds do."""

    def __init__(self) -> None:
        self.weight = torch.zeros(DENSE)
        self.table = torch.zeros(ROWS, DIM)

    def push(self, first: int, grad: torch.Tensor) -> None:
        self.weight[first : first + len(grad)].add_(grad, alpha=-RATE)

    def pull(self, first: int, count: int) -> torch.Tensor:
        return self.weight[first : first + count]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, ids)

    def push_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        self.table.index_add_(0, ids, grads, alpha=-RATE)


def read_values(frame: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.frombuffer(frame.buffer, dtype=dtype)


class ZmqPeer:
    """A ROUTER and a DEALER, over ipc or over TCP with CURVE."""

    def __init__(self, curve: bool) -> None:
        import zmq

        self.folder = tempfile.TemporaryDirectory()
        public, secret = zmq.curve_keypair()
        path = f"{self.folder.name}/address"

        def serve() -> None:
            router = zmq.Context().socket(zmq.ROUTER)
            if curve:
                router.curve_server, router.curve_secretkey = True, secret
                port = router.bind_to_random_port("tcp://127.0.0.1")
                address = f"tcp://127.0.0.1:{port}"
            else:
                address = f"ipc://{self.folder.name}/socket"
                router.bind(address)
            tables = PlainTables()
            Path(f"{path}.part").write_text(address)
            Path(f"{path}.part").replace(path)
            while True:
                who, what, *rest = router.recv_multipart(copy=False)
                op, first = what.bytes.decode().split()
                answer: Any = b"k"
                if op == "push":
                    tables.push(int(first), read_values(rest[0]))
                elif op == "pull":
                    answer = tables.pull(int(first), CHUNK).numpy()  # which keeps the tensor
                elif op == "rows":
                    answer = tables.rows(read_values(rest[0], torch.int64)).numpy()
                else:
                    grads = read_values(rest[1]).view(-1, DIM)
                    tables.push_rows(read_values(rest[0], torch.int64), grads)
                router.send_multipart([who.bytes, answer], copy=False)

        self.pid = fork_server(serve)
        while not Path(path).exists():
            time.sleep(0.01)
        self.socket = zmq.Context().socket(zmq.DEALER)
        if curve:
            mine = zmq.curve_keypair()
            self.socket.curve_serverkey = public
            self.socket.curve_publickey, self.socket.curve_secretkey = mine
        self.socket.connect(Path(path).read_text())

    def push(self, grad: torch.Tensor) -> None:
        places = range(0, DENSE, CHUNK)
        for first in places:
            data = byte_view(grad[first : first + CHUNK])
            self.socket.send_multipart([f"push {first}".encode(), data], copy=False)
        for _ in places:
            self.socket.recv()

    def pull(self, out: torch.Tensor) -> None:
        places = range(0, DENSE, CHUNK)
        for first in places:
            self.socket.send(f"pull {first}".encode())
        for first in places:
            out[first : first + CHUNK] = read_values(self.socket.recv(copy=False))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        self.socket.send_multipart([b"rows 0", byte_view(ids)], copy=False)
        return read_values(self.socket.recv(copy=False)).view(-1, DIM)

    def push_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        parts = [b"push_rows 0", byte_view(ids), byte_view(grads)]
        self.socket.send_multipart(parts, copy=False)
        self.socket.recv()


_tables: list[PlainTables] = []


def call_table(method: str, *arguments: Any) -> Any:
    """Run in the RPC server's process."""
    if not _tables:
        _tables.append(PlainTables())
    return getattr(_tables[0], method)(*arguments)


class RpcPeer:
    """torch.distributed.rpc over TensorPipe, without encryption."""

    def __init__(self) -> None:
        from torch.distributed import rpc

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def join(rank: int) -> None:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
            rpc.init_rpc(f"p{rank}", rank=rank, world_size=2, rpc_backend_options=options)

        def serve() -> None:
            join(1)
            threading.Event().wait()

        self.pid = fork_server(serve)
        join(0)
        self.call = lambda *arguments: rpc.rpc_async("p1", call_table, arguments)

    def push(self, grad: torch.Tensor) -> None:
        places = range(0, DENSE, CHUNK)
        for reply in [self.call("push", at, grad[at : at + CHUNK].clone()) for at in places]:
            reply.wait()

    def pull(self, out: torch.Tensor) -> None:
        places = range(0, DENSE, CHUNK)
        for at, reply in [(at, self.call("pull", at, CHUNK)) for at in places]:
            out[at : at + CHUNK] = reply.wait()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.call("rows", ids).wait()

    def push_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        self.call("push_rows", ids, grads).wait()


PEERS: dict[str, Callable[[], Any]] = {
    "rpc": RpcPeer,  # first: it forks before other kinds have threads
    "pdrun": lambda: PdrunPeer(False),
    "pdrun-tls": lambda: PdrunPeer(True),
    "zmq-ipc": lambda: ZmqPeer(False),
    "zmq-curve": lambda: ZmqPeer(True),
}
COLUMNS = ("push MB", "pull MB", "rows k", "push rows k", "small us", "push MB/s", "pull MB/s")


def measure(peer: Any) -> list[float]:
    grad = torch.full((DENSE,), 1e-3)
    out = torch.zeros(DENSE)  # has its pages, as weights that are pulled again have
    ids = torch.randperm(ROWS)[:COUNT].sort().values
    grads = torch.ones(COUNT, DIM)
    small = ids[:256].contiguous()

    def time_call(call: Callable[[], Any], units: float, times: int = 1) -> tuple[float, float]:
        cpu, wall = cpu_seconds(os.getpid(), peer.pid), time.perf_counter()
        for _ in range(times):
            call()
        wall = time.perf_counter() - wall
        return units * times / (cpu_seconds(os.getpid(), peer.pid) - cpu), units * times / wall

    megabytes = DENSE * 4 / 1e6
    push = time_call(lambda: peer.push(grad), megabytes)
    pull = time_call(lambda: peer.pull(out), megabytes)
    found = [push[0], pull[0]]
    found.append(time_call(lambda: peer.rows(ids), COUNT / 1e3, 3)[0])
    found.append(time_call(lambda: peer.push_rows(ids, grads), COUNT / 1e3, 3)[0])
    found.append(1e6 / time_call(lambda: peer.rows(small), 1, 300)[0])
    return [*found, push[1], pull[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bind", action="store_true", help="a core for each side, as pdrun binds")
    parser.add_argument("kinds", nargs="*", default=list(PEERS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.bind:
        cores.extend(sorted(os.sched_getaffinity(0)))
        os.sched_setaffinity(0, cores[:1])
    peers = {kind: PEERS[kind]() for kind in options.kinds}
    try:
        for peer in peers.values():
            measure(peer)
        results: dict[str, list[list[float]]] = {kind: [] for kind in peers}
        for _ in range(options.rounds):
            for kind, peer in peers.items():
                results[kind].append(measure(peer))
        print("| kind |", " | ".join(COLUMNS), "|")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for kind, found in results.items():
            medians = [f"{statistics.median(column):,.0f}" for column in zip(*found, strict=True)]
            print(f"| {kind} |", " | ".join(medians), "|")
    finally:
        for peer in peers.values():
            os.kill(peer.pid, signal.SIGKILL)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
