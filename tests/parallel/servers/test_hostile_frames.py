"""A server outlives whatever is sent to it."""

from __future__ import annotations

import random
import socket

import pytest
import torch

from pdrun.parallel.servers.channel import open_channel
from pdrun.parallel.servers.frames import (
    HEADER_BYTES,
    MAILBOX_SLOTS,
    SHARED_VALUES,
    SLOT_PIECES,
    Frame,
    FrameError,
    Op,
    encode_json,
    unpack_header,
)
from pdrun.parallel.servers.settings import dense, rows
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
        values = [{}, [], {"worker": 0, "client": "x", "mode": "async", "seconds": 5}, {"name": 3}]
        body = encode_json(rng.choice(values))
        frame.length = len(body)
    data = bytearray(frame.pack() + body)
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_ten_thousand_frames_that_are_wrong(tmp_path):
    rng = random.Random(1)
    with serving(tmp_path, workers=2) as running:
        client = running.connect("async")
        client.add_rows("t", rows(lr=1.0), dim=4, scale=0.0)
        client.add_dense("w", dense(lr=1.0), torch.zeros(8))
        client.push("w", torch.ones(8))
        sent = 0
        while sent < by_tier(1500, 10_000):
            channel = open_channel(running.addresses[0], KEY, 5.0)
            raw = channel._socket
            if rng.random() < 0.8:
                hello = {"worker": 1, "client": "y", "mode": "async", "seconds": 5}
                channel.send_frame(Frame(Op.HELLO, flags=1, generation=7), encode_json(hello))
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
        client.push("w", torch.ones(8))
        assert bool(client.pull("w").isfinite().all())
        client.close()


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
