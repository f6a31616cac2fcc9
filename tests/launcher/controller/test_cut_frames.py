"""A frame of an agent is taken when all of it has come."""

from __future__ import annotations

from pdrun.launcher.controller import frames
from pdrun.launcher.controller.frames import FrameReader, encode_frame


def test_a_frame_that_comes_byte_by_byte_is_taken_once() -> None:
    reader = FrameReader(is_greeted=True)
    data = encode_frame(b"o", b"first") + encode_frame(b"e", b"second")
    found = [frame for byte in data for frame in reader.feed(bytes([byte]))]
    assert found == [(b"o", b"first"), (b"e", b"second")]


def test_noise_before_the_greeting_is_kept_apart() -> None:
    reader = FrameReader()
    data = b"Welcome to host0\n" + frames.GREETING + encode_frame(b"o", b"first")
    found = [frame for byte in data for frame in reader.feed(bytes([byte]))]
    assert (found, reader.noise) == ([(b"o", b"first")], b"Welcome to host0\n")
