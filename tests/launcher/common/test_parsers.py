"""Parsers of values: what they take, and that nothing else gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.common import parsers, rank_lists


@given(st.text(max_size=12))
def test_a_whole_number_is_ascii_digits_or_refused(text: str) -> None:
    try:
        found = parsers.int_parser(0)(text, "--x")
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert text.isascii()
    assert text.isdigit()
    assert found == int(text)


@given(st.integers(0, parsers.MAX_COUNT))
def test_every_whole_number_in_range_is_taken(number: int) -> None:
    assert parsers.int_parser(0)(str(number), "--x") == number


PARSERS = [
    parsers.parse_duration,
    parsers.parse_duration_or_zero,
    parsers.parse_bool,
    parsers.parse_text,
    parsers.parse_path,
    parsers.parse_host,
    parsers.parse_tcp_port,
    parsers.endpoint_parser(),
    parsers.parse_interface,
    rank_lists.parse_ranks,
    rank_lists.parse_rank_list,
    parsers.parse_assignment,
    parsers.parse_log_name,
    parsers.parse_node_range,
    parsers.parse_exit_codes,
    parsers.parse_scheduler_loss,
    parsers.parse_job_name,
    parsers.int_parser(),
    parsers.int_or_auto_parser(),
    parsers.choice_parser("a", "b"),
]


@given(st.sampled_from(PARSERS), st.text(st.characters(), max_size=40))
def test_no_text_breaks_a_parser(parser: parsers.Parser, text: str) -> None:
    try:
        parser(text, "--x")
    except UsageError as error:
        assert error.where.startswith("--x")
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("2.5", 2.5),
        ("30s", 30),
        ("5m", 300),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1d", 86400),
        ("250ms", 0.25),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parsers.parse_duration(text, "--x") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "30 s", "3x", "1e3", "-1", "+1", ".5", "1_0", "inf", "0", "400d", "\u0663", "1h 2m"],
)
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError):
        parsers.parse_duration(text, "--x")


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=200))
def test_ranks_survive_their_text(numbers: set[int]) -> None:
    assert rank_lists.parse_rank_list(rank_lists.format_ranks(tuple(numbers)), "--x") == tuple(
        sorted(numbers)
    )


def test_ranks_have_one_spelling() -> None:
    assert rank_lists.parse_ranks("9,7-8,0,7", "--x") == "0,7-9"
    assert (rank_lists.parse_ranks("all", "--x"), rank_lists.parse_ranks("none", "--x")) == (
        "all",
        "none",
    )


def test_endpoints() -> None:
    parse = parsers.endpoint_parser()
    assert parse("[::1]:5", "--x") == Endpoint("::1", 5)
    assert parse("[fe80::1%eth0]:5", "--x") == Endpoint("fe80::1%eth0", 5)
    assert parse("localhost:0", "--x") == Endpoint("localhost", 0)
    assert parsers.endpoint_parser(29400)("node0", "--x") == Endpoint("node0", 29400)


@given(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(exclude_characters="\0")),
)
def test_an_assignment_keeps_its_value_as_it_is(name: str, value: str) -> None:
    assert parsers.parse_assignment(f"{name}={value}", "--x") == (name, value)


def test_nodes_are_a_number_or_a_range() -> None:
    assert [parsers.parse_node_range(text, "--x") for text in ("4", "4:4", "2:4")] == [
        (0, 4),
        (0, 4),
        (2, 4),
    ]
    for text, words in (
        ("4:2", "write 2:4"),
        ("0:2", "below 1"),
        (":2", "lacks a number"),
        ("1:2:3", "2:3"),
    ):
        with pytest.raises(UsageError, match=words):
            parsers.parse_node_range(text, "--x")


def test_exit_codes() -> None:
    assert parsers.parse_exit_codes("7,1,3-5,SIGKILL,4", "--x") == (1, 3, 4, 5, 7, 137)
    for text in ("", "0", "256", "5-3", "SIGNOPE", "-1", "1,", "0-4", "1 2"):
        with pytest.raises(UsageError):
            parsers.parse_exit_codes(text, "--x")


def test_waiting_for_a_lost_scheduler() -> None:
    found = [parsers.parse_scheduler_loss(text, "--x") for text in ("stop", "wait", "wait=5m")]
    assert found == [0.0, 60.0, 300.0]
    for text in ("wait=", "wait=0", "go", "", "stop=1"):
        with pytest.raises(UsageError):
            parsers.parse_scheduler_loss(text, "--x")
