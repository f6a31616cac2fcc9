"""A server outlives whatever is sent to it."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import random
import socket
import struct
import threading

import pytest
import torch

from pdrun.errors import PdrunError
from pdrun.parallel.servers.channel import Channel, ServerIdentity, accept_channel, open_channel
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.frames import (
    HEADER_BYTES,
    MAILBOX,
    MAILBOX_SLOTS,
    SHARED_VALUES,
    SLOT_PIECES,
    Frame,
    FrameError,
    Op,
    encode_json,
    unpack_header,
)
from pdrun.parallel.servers.links.mapped import SLOT_ELEMENTS
from pdrun.parallel.servers.links.remote import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.settings import dense, parse_mode, rows
from pdrun.parallel.servers.tables.tables import MIN_SHARED_ELEMENTS
from tests.lib.tiers import by_tier

from .served import KEY, serving

pytestmark = pytest.mark.torch


def make_frame(rng: random.Random) -> bytes:
    """Return a frame that is random, or nearly right."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 200))
    frame = Frame(
        rng.choice([*range(20), *Op]),
        rng.choice([0, 1, 2, 65535]),
        rng.choice([0, 1, 65535]),
        rng.choice([0, 0, 1, 2]),
        rng.choice([7, 7, 7, 6]),
        rng.choice([0, 5, 2**64 - 1]),
        rng.choice([0, 3, 2**63, 2**64 - 1]),
        rng.choice([0, 1, 2**63, 2**64 - 1]),
        rng.choice([1.0, 0.0, -1.0, float("nan"), float("inf")]),
        rng.choice([0, 1, 3, 2**32 - 1]),
        rng.choice([0, 8, 24, 32, 40, 57, 300, 2**40]),
        rng.choice([0, 0, 0, 1, 255]),
    )
    body = rng.randbytes(min(frame.length, 400))
    if frame.flags == 1 and rng.random() < 0.7:
        values = [{}, [], {"worker": 1, "client": "x", "mode": "async", "seconds": 5}, {"name": 3}]
        body = encode_json(rng.choice(values))
        frame.length = len(body)
    data = bytearray(frame.pack() + body)
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def ask_mailbox(channel: Channel) -> mmap.mmap:
    """Map the memory to which a worker writes gradients."""
    channel.send_frame(Frame(Op.MAP, MAILBOX, generation=7))
    _, fd = channel.receive_descriptor()
    mapped = mmap.mmap(fd, 0)
    os.close(fd)
    return mapped


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ten_thousand_frames_that_are_wrong(tmp_path, mode):
    rng = random.Random(1)
    with serving(tmp_path, workers=2) as running:
        client = running.connect(mode, seconds=1.0)
        client.add_rows("t", rows(lr=1.0), dim=4, scale=0.0)
        client.add_dense("w", dense(lr=1.0), torch.zeros(MIN_SHARED_ELEMENTS))
        client.add_rows("s", rows(lr=1.0), dim=4, size=50, scale=0.0)
        client.push("w", torch.ones(MIN_SHARED_ELEMENTS))
        sent = 0
        while sent < by_tier(1500, 10_000):
            channel = open_channel(running.addresses[0], KEY, 5.0)
            raw = channel._socket
            if rng.random() < 0.8:
                hello = {"worker": 1, "client": "y", "mode": mode, "seconds": 1}
                channel.send_frame(Frame(Op.HELLO, flags=1, generation=7), encode_json(hello))
                if rng.random() < 0.5:
                    assert channel.receive_header()
                    mailbox = ask_mailbox(channel)
                    for first in (0, 4 * SLOT_ELEMENTS):
                        mailbox[first : first + 4096] = rng.choice(
                            [rng.randbytes(4096), bytes(4096), struct.pack("<q", 7) * 512]
                        )
            try:
                for _ in range(20):
                    raw.sendall(make_frame(rng))
                    sent += 1
            except OSError:
                pass
            channel.shut_down()
            channel.close()
        # strangers without a key
        for data in (b"", b"x", b"GET / HTTP/1.0\r\n\r\n", bytes(32)):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(running.addresses[0])
            stranger.sendall(data)
            stranger.close()
        assert client.rows("t", torch.tensor([1])).shape == (1, 4)
        assert client.rows("s", torch.tensor([1])).shape == (1, 4)
        client.push("w", torch.ones(MIN_SHARED_ELEMENTS))
        assert bool(client.pull("w").isfinite().all())
        client.close()


def make_descriptor(rng: random.Random) -> int:
    """Return a descriptor that is no table's memory, or one of any size."""
    kind = rng.randrange(4)
    if kind == 0:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = rng.choice([0, 8, 5000, 1 << 20])
    os.ftruncate(fd, size)
    if kind > 1:
        os.pwrite(fd, rng.randbytes(min(size, 8000)), 0)
    if kind > 2:  # of a fixed size, so that a worker maps it
        fcntl.fcntl(fd, 1033, 0x0002 | 0x0004)
    return fd


def answer_wrongly(channel: Channel, rng: random.Random) -> int:
    """Answer a worker's requests for a while, some of them rightly; return how many."""
    answered = 0
    while (frame := channel.receive_header()) is not None:
        channel.receive_into(bytearray(frame.length))
        answered += 1
        reply = Frame(frame.op, request=frame.request, place=0)
        if frame.op == Op.MAP and rng.random() < 0.7:
            reply.place = 1
            fds = [make_descriptor(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
            try:
                socket.send_fds(channel._socket, [reply.pack()], fds)
            finally:
                for fd in fds:
                    os.close(fd)
            continue
        body = b""
        if frame.op in (Op.ROWS, Op.PULL, Op.ROWS_SINCE) and not frame.flags:
            body = rng.randbytes(rng.choice([0, 8, 24, 48, 64, 4 * MIN_SHARED_ELEMENTS]))
            reply.count = rng.choice([0, 1, 2, 3])
        if rng.random() < 0.15:
            channel._socket.sendall(make_frame(rng))
            if rng.random() < 0.5:
                return answered
            continue
        reply.table = rng.choice([0, 0, 0, 1, 65535])
        reply.length = len(body)
        channel._socket.sendall(reply.pack() + body)
    return answered


def test_a_worker_gets_an_error_from_a_server_that_answers_wrongly(tmp_path):
    """Whatever it sends, descriptors too: no other exception, no wait without a limit."""
    rng = random.Random(2)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(8)
    answered = [0]
    wanted = by_tier(400, 10_000)

    def serve() -> None:
        while answered[0] < wanted:
            connection, _ = listener.accept()
            try:
                channel = accept_channel(connection, KEY, ServerIdentity(with_tls=False))
                answered[0] += answer_wrongly(channel, rng)
            except (OSError, FrameError):
                pass
            connection.close()
        listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    before = set(os.listdir("/proc/self/fd"))
    refused = 0
    identity = WorkerIdentity(0, parse_mode("async"), 7, 0.2)
    count = MIN_SHARED_ELEMENTS // 4
    while thread.is_alive():
        client = None
        try:
            links = [RemoteLink(0, KEY, identity, lambda: [str(tmp_path / "s")])]
            links[0]._channel.set_timeout(0.3)
            client = ServerClient(links, 0, is_local=False)
            client.add_rows("s", rows(), dim=4, size=2 * count)
            client.add_dense("w", dense(), torch.zeros(MIN_SHARED_ELEMENTS))
            client.add_rows("c", rows(cache=9), dim=4)
            for _ in range(3):
                client.rows("s", torch.arange(3))
                client.push_rows("s", torch.arange(count), torch.ones(count, 4))
                client.push("w", torch.ones(MIN_SHARED_ELEMENTS))
                client.pull("w")
                client.rows("c", torch.arange(2))
                client.clock()
        except PdrunError:
            refused += 1
        if client is not None:
            client.close()
    thread.join(10)
    assert refused > wanted // 100
    gc.collect()
    assert len(set(os.listdir("/proc/self/fd")) - before) < 8


def test_a_header_is_checked():
    good = Frame(Op.PUSH_ROWS, 1, count=2, length=32)
    assert unpack_header(good.pack()) == good
    assert len(good.pack()) == HEADER_BYTES
    for wrong in (
        Frame(99),
        Frame(Op.ROWS, count=2, length=8),
        Frame(Op.PULL, count=1, length=8),
        Frame(Op.PUSH, length=1 << 40),
        Frame(Op.PUSH, flags=1),
        Frame(Op.HELLO, length=5),
        Frame(Op.HELLO, flags=1, length=1 << 20),
        Frame(Op.PUSH, flags=SHARED_VALUES, length=4),
        Frame(Op.PUSH, flags=SHARED_VALUES, count=SLOT_PIECES + 1),
        Frame(Op.PUSH, flags=SHARED_VALUES, count=1, slot=MAILBOX_SLOTS),
        Frame(Op.PUSH, slot=1),
        Frame(Op.ROWS, flags=SHARED_VALUES),
    ):
        with pytest.raises(FrameError):
            unpack_header(wrong.pack())
    with pytest.raises(FrameError, match="protocol"):
        unpack_header(bytes(HEADER_BYTES))
