"""
Hostile bytes: journals, checkpoints, and what is sent to the scheduler's port.

Every one is refused by an error of pdrun or ends its connection; the scheduler goes on.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from pdrun.clock import FakeClock
from pdrun.endpoint import Endpoint
from pdrun.errors import PdrunError
from pdrun.rendezvous.clients.viewer import query_status
from pdrun.rendezvous.journal.recovery import begin_job, resume_job
from pdrun.rendezvous.protocol.events import LocalStop, PeerDisconnected
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import SchedulerChild
from tests.e2e.hostile.cases import mutate
from tests.lib.tiers import by_tier
from tests.rendezvous.helpers import config

SEED = 20261129


def damage(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes cut, repeated, changed at a few places, or with others in between."""
    at = chance.randrange(len(data) + 1)
    match chance.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[chance.randrange(len(data) + 1) :]
        case 2:
            return data[:at] + chance.randbytes(chance.randrange(1, 200)) + data[at:]
        case 3:
            return data + data
        case 4:
            return chance.randbytes(chance.randrange(1, 2000))
        case _:
            found = bytearray(data)
            for _ in range(chance.randrange(1, 9)):
                found[chance.randrange(len(found))] = chance.randrange(256)
            return bytes(found)


def test_damaged_journals(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path = tmp_path / "run" / "scheduler.journal"
    begun = begin_job(config(), FakeClock(), path)
    assert begun._writer is not None
    journal = begun._writer.journal
    for number in range(5):
        journal.add_entry(1000.0 + number, PeerDisconnected(f"c{number}"))
        journal.commit()
    journal.add_entry(1010.0, LocalStop(15, "signal"))
    journal.commit()
    journal.close()
    good = path.read_bytes()
    resumed = 0
    count = by_tier(30, 300)
    for _ in range(count):
        path.write_bytes(damage(good, chance))
        try:
            found = resume_job(config(), FakeClock(), path, None)
        except (PdrunError, FileNotFoundError):
            continue
        resumed += 1
        found.close()
    assert 0 < resumed < count / 2, "a cut end is no damage, all else is"


def test_damaged_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.parallel.checkpoint import test_damaged as checkpoints

    chance = random.Random(SEED)
    refused = 0
    count = by_tier(15, 200)
    for number in range(count):
        folder = checkpoints.write(tmp_path / str(number))
        path = folder / chance.choice(["run.json", "rank-00000.json", "rank-00000.bin"])
        data = path.read_bytes()
        if path.suffix == ".json" and chance.random() < 0.7:
            value: Any = json.loads(data)
            for _ in range(chance.randrange(1, 4)):
                value = mutate(value, chance)
            path.write_text(json.dumps(value))
        else:
            path.write_bytes(damage(data, chance))
        refused += any(checkpoints.outcomes(folder))
    assert refused > count / 2


def send_bytes(endpoint: Endpoint, data: bytes) -> None:
    """Send bytes to the port, and go as soon as they are there or are refused."""
    with socket.create_connection((endpoint.host, endpoint.port), 10) as sock:
        sock.settimeout(0.05)
        try:
            sock.sendall(data)
            while sock.recv(4096):
                pass
        except OSError:
            pass


@pytest.mark.parametrize("is_secure", [True, False], ids=["curve", "insecure"])
def test_bytes_at_the_port(tmp_path: Path, is_secure: bool) -> None:
    chance = random.Random(SEED)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00"
    null = greeting + b"NULL".ljust(20, b"\0") + b"\0" * 32
    curve = greeting + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready = b"\x04" + bytes([len(body)]) + body
    hello = json.dumps(
        {
            "sender": "a" * 32,
            "incarnation": 0,
            "sequence": 0,
            "body": {"kind": "hello", "version": 9, "role": "agent", "job": "j", "agent": "a" * 32},
        }
    ).encode()
    secret = Secret.random() if is_secure else None
    child = SchedulerChild(
        config(nodes=2),
        secret,
        endpoint=Endpoint("127.0.0.1", 0),
        events_path=tmp_path / "run" / "events.jsonl",
        insecure=not is_secure,
    )
    try:
        for _ in range(by_tier(20, 150)):
            start = chance.choice(
                [b"", greeting, null + ready, curve, curve + b"\x04\xc8\x05HELLO"]
            )
            frame = damage(hello, chance) if chance.random() < 0.5 else chance.randbytes(200)
            head = chance.choice(
                [
                    bytes([chance.randrange(4), len(frame) & 0xFF]),
                    b"\x02" + struct.pack(">Q", chance.choice([len(frame), 1 << 62, 1 << 20])),
                    b"",
                ]
            )
            send_bytes(child.endpoint, start + head + frame)
        assert query_status(child.endpoint, secret, insecure=not is_secure) is not None
        assert child.returncode is None
    finally:
        child.close(0.5)
