"""What a worker's bytes look like on the terminal."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.output.formatting import (
    BAR_SECONDS,
    PrefixFormatter,
    RawFormatter,
    escape_controls,
)

COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain\ttext\n", b"plain\ttext\n"),
        (b"\x1b[31mred\x1b[0m", b"\x1b[31mred\x1b[0m"),
        (b"\x1b[2J\x1b[1;1Hforged", b"^[[2J^[[1;1Hforged"),
        (b"\x1b]0;title\x07", b"^[]0;title^G"),
        (b"\x1b]52;c;bWFsaWNl\x1b\\", b"^[]52;c;bWFsaWNl^[\\"),
        (b"a\x00b\x08c\x7f", b"a^@b^Hc^?"),
        ("\u009b2J é █".encode(), "\\x9b2J é █".encode()),
        (b"\x9b2J", b"\\x9b2J"),
        (b"latin \xe9", b"latin \\xe9"),
        ("abc\u202edef".encode(), b"abc\\u202edef"),
        (b"a\rb", b"a^Mb"),
    ],
)
def test_escapes_are_shown_not_obeyed(data: bytes, shown: bytes) -> None:
    assert escape_controls(data) == shown


@given(st.binary(max_size=200), st.booleans())
def test_nothing_but_colours_is_left_of_any_bytes(data: bytes, in_place: bool) -> None:
    left = COLOUR.sub(b"", escape_controls(data, in_place=in_place)).decode()
    allowed = "\n\t\r\b" if in_place else "\n\t"
    assert not [
        char for char in left if (ord(char) < 32 or 127 <= ord(char) < 160) and char not in allowed
    ]


def test_a_colour_that_is_left_on_ends_with_its_line() -> None:
    shaper = PrefixFormatter("n:0", tty=True)
    assert shaper.feed(b"\x1b[31mred\nplain\n", 0.0) == b"n:0| \x1b[31mred\x1b[0m\nn:0| plain\n"


def test_elsewhere_than_on_a_terminal_bytes_stay_as_they_are() -> None:
    shaper = PrefixFormatter("n:0", tty=False)
    assert shaper.feed(b"\x1b[2J\xff\n", 0.0) == b"n:0| \x1b[2J\xff\n"


def test_a_prefix_has_its_rank_s_colour() -> None:
    assert (
        PrefixFormatter("n:0", tty=True, colour=0).feed(b"x\n", 0.0) == b"\x1b[36mn:0|\x1b[0m x\n"
    )
    assert (
        PrefixFormatter("n:1", tty=True, colour=1).feed(b"x\n", 0.0) == b"\x1b[33mn:1|\x1b[0m x\n"
    )


def test_a_bar_is_shown_now_and_then_and_at_its_end() -> None:
    shaper, shown = PrefixFormatter("", tty=False), []
    for step in range(100):
        shown.append(shaper.feed(b"\r%d%%" % step, step * BAR_SECONDS / 8))
    assert [line for line in shown if line] == [b"%d%%\n" % step for step in range(0, 99, 8)]
    assert shaper.feed(b"\r100%\n", 10.0) == b"100%\n"


def test_a_bar_that_nothing_follows_keeps_its_last_state() -> None:
    shaper = PrefixFormatter("", tty=False)
    assert shaper.feed(b"1%\r2%\r3%\r", 0.0) + shaper.finish() == b"1%\n3%\n"


def test_a_bar_that_is_wiped_leaves_nothing() -> None:
    shaper = PrefixFormatter("", tty=False)
    assert (
        shaper.feed(b"\r1%\r2%\r    \r", 0.0) + shaper.feed(b"done\n", 5.0) + shaper.finish()
        == b"1%\ndone\n"
    )


def test_one_worker_s_prompt_and_bar_pass_at_once_on_a_terminal() -> None:
    shaper = RawFormatter(tty=True)
    assert shaper.feed(b"name? ", 0.0) == b"name? "
    assert shaper.feed(b"\r10%\x1b[2K", 0.0) == b"\r10%^[[2K"


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_one_worker_s_bytes_are_its_own_where_there_is_no_terminal(
    data: bytes, cuts: list[int]
) -> None:
    shaper, edges = RawFormatter(tty=False), [0, *sorted(cuts), len(data)]
    shown = b"".join(shaper.feed(data[low:high], 0.0) for low, high in pairwise(edges))
    assert shown == b"" or shown.endswith((b"\n", b"\r"))
    assert shown + shaper.finish() == data


@pytest.mark.parametrize("char", ["e", "é", "█", "🙂"])
def test_a_whole_character_is_not_held_back_and_a_part_is(char: str) -> None:
    data = char.encode()
    assert RawFormatter(tty=True).feed(data, 0.0) == data
    for cut in range(1, len(data)):
        shaper = RawFormatter(tty=True)
        assert (shaper.feed(data[:cut], 0.0), shaper.feed(data[cut:], 0.0)) == (b"", data)


def test_a_sequence_that_is_cut_is_not_torn_apart() -> None:
    shaper = RawFormatter(tty=True)
    text = "\x1b[38;5;208m█é\x1b[0m".encode()
    assert b"".join(shaper.feed(text[at : at + 1], 0.0) for at in range(len(text))) == text
