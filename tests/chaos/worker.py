"""
A worker without torch that notes what happens to it and does what a test orders.

    worker.py FOLDER [ignore] [family]

It keeps the time at which it last ran in FOLDER/alive/HOST-RANK-GENERATION-PID, appends JSON lines
to FOLDER/notes/HOST-RANK.jsonl, and carries out what a test writes into FOLDER/orders/WHO, where
WHO is a rank, a host or ``all``: ``WHEN exit N``, ``signal N``, ``raise TEXT``, ``hang``, ``write
BYTES`` or ``eat BYTES``; WHEN is ``always`` or a generation, ``g0``. ``ignore``: SIGTERM is noted
and not obeyed. ``family``: a child, and a child in a session of its own, are left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
GENERATION = int(os.environ.get("PDRUN_GENERATION", "0"))
HOST = os.uname().nodename
POLL_SECONDS = 0.05


def note(what: str, **more: object) -> None:
    """
    Append one line; ``at`` is the machine's monotonic clock unless the host has one of its own.
    """
    line = {
        "what": what,
        "at": time.monotonic(),
        "wall": time.time(),
        "host": HOST,
        "rank": RANK,
        "pid": os.getpid(),
        "generation": GENERATION,
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        **more,
    }
    path = FOLDER / "notes" / f"{HOST}-{RANK}.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def stopped(number: int, frame: object) -> None:
    """Note the stop signal; obey it, or not."""
    note("signal", number=number)
    if "ignore" not in sys.argv:
        os._exit(128 + number)


def carry_out(order: str) -> None:
    """Do what a test ordered."""
    verb, _, value = order.partition(" ")
    note("order", order=order)
    if verb == "exit":
        print(f"rank {RANK} leaves with {value}", flush=True)
        os._exit(int(value))
    elif verb == "signal":
        if int(value) != signal.SIGKILL:
            signal.signal(int(value), signal.SIG_DFL)
        os.kill(os.getpid(), int(value))
    elif verb == "raise":
        raise RuntimeError(value)
    elif verb == "hang":
        time.sleep(3600)
    elif verb == "write":
        line = "x" * 99
        for _ in range(int(value) // 100):
            print(line)
        print("written", flush=True)
        note("written")
    elif verb == "eat":
        keep = bytearray(int(value))
        keep[::4096] = b"x" * len(keep[::4096])


def main() -> None:
    """Note the start; then wait for orders."""
    for name in ("notes", "alive"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    alive = os.open(
        FOLDER / "alive" / f"{HOST}-{RANK}-{GENERATION}-{os.getpid()}",
        os.O_WRONLY | os.O_CREAT,
        0o600,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stopped)
    if "family" in sys.argv:
        for session in (False, True):
            subprocess.Popen(["sleep", "3600"], start_new_session=session)
    note("start")
    print(f"rank {RANK} of {os.environ.get('WORLD_SIZE')} runs on {HOST}", flush=True)
    done: set[tuple[str, int]] = set()
    while True:
        os.pwrite(alive, b"%020.6f" % time.monotonic(), 0)
        for who in (str(RANK), HOST, "all"):
            try:
                order = (who, (FOLDER / "orders" / who).stat().st_mtime_ns)
                when, _, what = (FOLDER / "orders" / who).read_text().partition(" ")
            except FileNotFoundError:
                continue
            if order not in done and when in ("always", f"g{GENERATION}"):
                done.add(order)
                carry_out(what)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
