"""Bytes -> lines: whatever the writes were cut into, the lines are the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.output.line_splitter import MAX_PIECE_BYTES, Line, LineSplitter

PIECES = st.sampled_from(
    [b"a", b"bc", b"\n", b"\r", b"\r\n", "é".encode(), "█".encode(), b"\xff", b"x" * 9, b" "]
)
STREAMS = st.lists(PIECES, max_size=40).map(b"".join)


def split(chunks: list[bytes], limit: int = MAX_PIECE_BYTES) -> list[Line]:
    splitter = LineSplitter(limit)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
def test_any_cutting_gives_the_same_lines(data: bytes, cuts: list[int]) -> None:
    whole = split([data], limit=8)
    assert split(cut(data, cuts), limit=8) == whole
    assert split([data[at : at + 1] for at in range(len(data))], limit=8) == whole


@given(STREAMS)
def test_nothing_is_lost_and_no_piece_is_above_the_limit(data: bytes) -> None:
    lines = split([data], limit=8)
    assert all(len(line.text) <= 8 for line in lines)
    plain = data.replace(b"\r\n", b"\n")
    if b"\r" not in plain:
        assert b"".join(line.text + line.end for line in lines) == plain


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb\n", [(b"a", b"\n"), (b"b", b"\n")]),
        (b"a\r\nb\r\n", [(b"a", b"\n"), (b"b", b"\n")]),
        (b"\n\n", [(b"", b"\n"), (b"", b"\n")]),
        (b"half", [(b"half", b"")]),
        (b"\r10%\r20%\rdone\n", [(b"10%", b"\r"), (b"20%", b"\r"), (b"done", b"\n")]),
        (b"10%\r100%\r\r\n", [(b"10%", b"\r"), (b"100%", b"\r"), (b"100%", b"\n")]),
        (b"99%\r", [(b"99%", b"\r")]),
        (b"\xff\xfe\n", [(b"\xff\xfe", b"\n")]),
        (b"", []),
    ],
)
def test_what_ends_a_line(data: bytes, expected: list[tuple[bytes, bytes]]) -> None:
    assert [(line.text, line.end) for line in split([data])] == expected


def test_a_long_line_comes_in_marked_pieces() -> None:
    lines = split([b"x" * 150_000 + b"\nshort\n"])
    assert [(len(line.text), line.end, line.is_continued) for line in lines] == [
        (MAX_PIECE_BYTES, b"", False),
        (MAX_PIECE_BYTES, b"", True),
        (150_000 - 2 * MAX_PIECE_BYTES, b"\n", True),
        (5, b"\n", False),
    ]


def test_a_line_of_exactly_the_limit_is_not_cut() -> None:
    assert split([b"x" * MAX_PIECE_BYTES, b"\n"]) == [Line(b"x" * MAX_PIECE_BYTES, b"\n")]


def test_a_cut_never_falls_inside_a_character() -> None:
    text = "█" * MAX_PIECE_BYTES
    pieces = [line.text for line in split([text.encode() + b"\n"])]
    assert "".join(piece.decode() for piece in pieces) == text


def test_a_line_without_end_is_not_held_in_memory() -> None:
    splitter = LineSplitter()
    for _ in range(200):
        splitter.feed(b"x" * 100_000)
    assert len(splitter.finish()[-1].text) <= MAX_PIECE_BYTES
