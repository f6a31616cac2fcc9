"""
``pdrun doctor --hosts a,b``: what nodes see of each other. A script of an ordinary job, one process
per node.

    facts       versions, variables, addresses, clock: through torch's store
    local       what each host finds by itself, meanwhile
    names       each node resolves the names of the others, and their addresses back
    sockets     each pair: a connection, small and large messages, round trips, bytes per second
    all-reduce  each pair: a gloo group

Each step is bounded. Pairs are taken in rounds in which each node has one partner, so that they do
not disturb each other. gloo is last, and only if all pairs can connect. Rank 0 prints one line of
JSON; `pdrun.launcher.doctor.node_checks` judges it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MARK = "pdrun-doctor:"
"""In front of the line that rank 0 prints."""
STEP_SECONDS = 20.0
"""Longest wait for another node."""
CONNECT_SECONDS = 3.0
STALL_SECONDS = 3.0
MESSAGE_BYTES = (64, 1_400, 8_900, 65_536)
"""Sizes of messages whose answers are awaited: a path that drops large packets stops one."""
PING_COUNT = 50
ASK_TIME = 0xFFFFFFFF
"""In place of a message's size: asks for the wall clock of the other node."""
STREAM_BYTES = 16 << 20
STREAM_SECONDS = 0.3
REDUCE_ELEMENTS = 1 << 20
REDUCE_COUNT = 3
MAX_FULL_NODES = 8
"""Up to so many nodes every pair is measured, above that three partners of each node."""
COMPARED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "HCCL_", "PYTORCH_", "CUDA_LAUNCH")


def main() -> None:
    """Check, and print the result on rank 0."""
    parser = argparse.ArgumentParser(prog="pdrun doctor")
    parser.add_argument("--files", default="")
    parser.add_argument("--log-dir", default="")
    options = parser.parse_args()
    files = [name for name in options.files.split(",") if name]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = StepStore(world)
    with socket.create_server(("", 0), family=socket.AF_INET) as server:
        facts = gather_facts(server.getsockname()[1], files)
        nodes = store.exchange("facts", rank, facts)
        is_first = all(node["host"] != facts["host"] for node in nodes[:rank])
        local = (
            _start_local_checks(options.log_dir) if is_first else None
        )  # nodes may be simulated on one host
        names = store.exchange("names", rank, resolve_names(nodes, rank))
        measured = []
        for turn, partner in enumerate(list_partners(world, rank)):
            if partner is not None:
                measured.append(measure_pair(server, nodes, rank, partner))
            store.exchange(f"turn {turn}", rank, 0)
    pairs = store.exchange("pairs", rank, measured)
    reduced: list[Any] = [[] for _ in range(world)]
    # gloo connects all ranks: it would wait for those that cannot be reached
    if not any(entry["error"] for entries in pairs for entry in entries):
        reduced = store.exchange("reduced", rank, reduce_pairs(store, world, rank))
    findings = store.exchange("local", rank, _read_local_checks(local))
    if rank == 0:
        nodes = [{**node, "local": found} for node, found in zip(nodes, findings, strict=True)]
        result = {"nodes": nodes, "names": names, "pairs": pairs, "reduced": reduced}
        print(f"{MARK}{json.dumps(result)}", flush=True)
    store.exchange("end", rank, 0)


class StepStore:
    """torch's store of the job, in which all ranks exchange values step by step."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world,
            is_master=False,
            timeout=timedelta(seconds=STEP_SECONDS),
        )

    def exchange(self, step: str, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, when all have given theirs."""
        self.store.set(f"doctor/{step}/{rank}", json.dumps(value))
        return [json.loads(self.store.get(f"doctor/{step}/{one}")) for one in range(self.world)]


def gather_facts(port: int, files: list[str]) -> dict[str, Any]:
    """Return what is compared between nodes, and how this one is reached at ``port``."""
    import pdrun

    cuda = torch.version.cuda
    return {
        "node": os.environ.get("PDRUN_NODE_NAME") or socket.gethostname(),
        "host": socket.gethostname(),
        "port": port,
        "addresses": _list_addresses(),
        "files": {name: _hash_file(name) for name in files},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pdrun": pdrun.__version__,
            "cuda": cuda or "none",
            "nccl": _nccl_version() if cuda else "none",
            "driver": _driver_version(),
            "numpy": _module_version("numpy"),
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(COMPARED_PREFIXES) and not name.startswith("TORCH_NCCL_TRACE")
        },
    }


def _start_local_checks(log_dir: str) -> subprocess.Popen[str] | None:
    """Start the command that checks this host; a tool that hangs must not stop the others."""
    command = [sys.executable, "-m", "pdrun", "doctor", "--json", "--here"]
    command += ["--log-dir", log_dir] if log_dir else []
    try:
        return subprocess.Popen(
            command,
            env=_user_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None


def _read_local_checks(command: subprocess.Popen[str] | None) -> list[Any]:
    """Return the findings of the command."""
    if command is None:
        return []
    try:
        found = json.loads(command.communicate(timeout=STEP_SECONDS - 5)[0])["findings"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        command.kill()
        return []
    return found if isinstance(found, list) else []


def _user_environment() -> dict[str, str]:
    """Return the environment without what pdrun sets for a worker."""
    added = ("PDRUN_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "MASTER_")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(added) and name not in ("RANK", "WORLD_SIZE")
    }


def _hash_file(name: str) -> str:
    try:
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        return error.strerror or str(error)


def _list_addresses() -> list[str]:
    import psutil

    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def _nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):
        return "unknown"


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return "none"
    return next((word for word in words if word[:3].isdecimal() and "." in word), "unknown")


def _module_version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def resolve_names(nodes: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Return, for each other node, the addresses of its name, and the names of its addresses."""
    found = []
    for other, node in enumerate(nodes):
        if other == rank:
            continue
        entry: dict[str, Any] = {"of": other, "addresses": [], "error": "", "name": ""}
        try:
            answers = socket.getaddrinfo(node["host"], None, socket.AF_INET)
            entry["addresses"] = sorted({str(answer[4][0]) for answer in answers})
        except OSError as error:
            entry["error"] = str(error)
        address = _reachable_address(node)
        if address:
            entry["name"] = socket.getnameinfo((address, 0), 0)[0]
        found.append(entry)
    return found


def _reachable_address(node: Mapping[str, Any]) -> str:
    """Return the address of a node that others use: the first that is not loopback."""
    addresses = [text for text in node["addresses"] if not text.startswith("127.")]
    return str((addresses or node["addresses"] or [""])[0])


def list_partners(world: int, rank: int) -> Iterator[int | None]:
    """
    Yield this node's partner in each round; None: it waits.

    In a round of up to MAX_FULL_NODES nodes, one node stands still and the others turn (the circle
    method of tournaments), so that every pair meets once.
    """
    if world > MAX_FULL_NODES:
        for distance in (1, 2, world // 2):
            for parity in (0, 1):
                place, offset = divmod(rank, distance)
                if place % 2 == parity and rank + distance < world:
                    yield rank + distance
                elif place % 2 != parity and place > 0:
                    yield (place - 1) * distance + offset
                else:
                    yield None
        return
    size = world + world % 2
    for turn in range(size - 1):
        circle = [0, *((index + turn) % (size - 1) + 1 for index in range(size - 1))]
        place = circle.index(rank)
        partner = circle[size - 1 - place]
        yield partner if partner < world else None


def measure_pair(
    server: socket.socket, nodes: list[dict[str, Any]], rank: int, partner: int
) -> dict[str, Any]:
    """Return what this node measures with its partner; the lower rank connects."""
    found: dict[str, Any] = {"of": partner, "error": "", "stalled_at": 0}
    deadline = time.monotonic() + STEP_SECONDS / 2
    try:
        if rank < partner:
            address = _reachable_address(nodes[partner])
            found["to"] = f"{address}:{nodes[partner]['port']}"
            link = socket.create_connection((address, nodes[partner]["port"]), CONNECT_SECONDS)
            link.sendall(rank.to_bytes(4, "big"))
        else:
            link = _accept_partner(server, partner)
    except OSError as error:
        found["error"] = error.strerror or str(error)
        return found
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(STALL_SECONDS)
        try:
            if rank < partner:
                _lead_measurement(link, found)
            else:
                _answer_measurement(link, deadline)
        except OSError as error:
            found["error"] = found["error"] or error.strerror or str(error)
    return found


def _accept_partner(server: socket.socket, partner: int) -> socket.socket:
    """
    Return the connection of a node; others, which have given up before, are closed.

    Raises:
        TimeoutError: it did not connect.
    """
    deadline = time.monotonic() + CONNECT_SECONDS + 1.0
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        link, _ = server.accept()
        link.settimeout(left)
        try:
            if int.from_bytes(_receive(link, 4), "big") == partner:
                return link
        except OSError:
            pass
        link.close()
    raise TimeoutError("timed out")


def _lead_measurement(link: socket.socket, found: dict[str, Any]) -> None:
    for size in MESSAGE_BYTES:
        found["stalled_at"] = size
        link.sendall(size.to_bytes(4, "big") + bytes(size))
        _receive(link, size)
    found["stalled_at"] = 0
    times = []
    for _ in range(PING_COUNT):
        begin = time.perf_counter()
        link.sendall((8).to_bytes(4, "big") + bytes(8))
        _receive(link, 8)
        times.append(time.perf_counter() - begin)
    found["latency"] = statistics.median(times) / 2
    begin = time.perf_counter()
    sent, block = 0, bytes(1 << 20)
    while sent < STREAM_BYTES and time.perf_counter() - begin < STREAM_SECONDS:
        link.sendall(len(block).to_bytes(4, "big") + block)
        _receive(link, len(block))
        sent += 2 * len(block)  # there and back
    found["bandwidth"] = sent / (time.perf_counter() - begin)
    begin = time.time()
    link.sendall(ASK_TIME.to_bytes(4, "big"))
    (there,) = struct.unpack("!d", _receive(link, 8))
    found["clock_offset"] = there - (begin + time.time()) / 2
    link.sendall((0).to_bytes(4, "big"))


def _answer_measurement(link: socket.socket, deadline: float) -> None:
    while time.monotonic() < deadline:
        size = int.from_bytes(_receive(link, 4), "big")
        if not size:
            return
        if size == ASK_TIME:
            link.sendall(struct.pack("!d", time.time()))
        else:
            link.sendall(_receive(link, size))


def _receive(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the other node closed the connection")
        data += part
    return bytes(data)


def reduce_pairs(store: StepStore, world: int, rank: int) -> list[dict[str, Any]]:
    """Return the bytes per second of an all-reduce with each partner; all ranks call it."""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", store.store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=STEP_SECONDS),
        )
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        others = [other for other in range(world) if other != rank]
        return [{"of": other, "error": problem, "bandwidth": 0.0} for other in others]
    try:
        return _reduce_in_turns(world, rank)
    finally:
        dist.destroy_process_group()


def _reduce_in_turns(world: int, rank: int) -> list[dict[str, Any]]:
    found = []
    schedules = [list(list_partners(world, other)) for other in range(world)]
    for turn in range(len(schedules[0])):
        partner = schedules[rank][turn]
        groups = {}
        for one in range(world):
            other = schedules[one][turn]
            if other is not None and one < other:
                groups[one] = dist.new_group([one, other])
        if partner is None:
            continue
        group = groups[min(rank, partner)]
        data = torch.ones(REDUCE_ELEMENTS)
        entry: dict[str, Any] = {"of": partner, "error": "", "bandwidth": 0.0}
        try:
            dist.all_reduce(data, group=group)
            begin = time.perf_counter()
            for _ in range(REDUCE_COUNT):
                dist.all_reduce(data, group=group)
            seconds = (time.perf_counter() - begin) / REDUCE_COUNT
            entry["bandwidth"] = data.numel() * data.element_size() / seconds
            if float(data[0]) != 2.0 ** (REDUCE_COUNT + 1):
                entry["error"] = f"wrong sum: {float(data[0])}"
        except RuntimeError as error:
            entry["error"] = str(error).splitlines()[0]
        found.append(entry)
    return found


if __name__ == "__main__":
    main()
