"""Which pipes are read: none whose reader, terminal or disk, is far behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdrun.launcher.output.console import STDERR, STDOUT
from pdrun.launcher.output.router import OutputRouter
from pdrun.launcher.output.worker_streams import WorkerStream
from tests.launcher.output.helpers import make_output


@pytest.mark.parametrize(
    ("behind", "disk", "shown", "hidden"),
    [
        ((), False, 2, 2),
        ((STDOUT,), False, 1, 2),
        ((STDOUT, STDERR), False, 0, 2),
        ((), True, 0, 0),
    ],
    ids=["nothing", "stdout", "both streams", "disk"],
)
def test_pipes_whose_reader_is_behind_are_left_alone(
    behind: tuple[int, ...],
    disk: bool,
    shown: int,
    hidden: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that --show-ranks hides waits for the disk, but for no terminal."""
    null = os.open(os.devnull, os.O_WRONLY)
    output = make_output(tmp_path, null, null, show_ranks="0")
    ends = {rank: output.open_pipes(rank, rank, 0) for rank in (0, 1)}
    monkeypatch.setattr(output.console, "is_behind", lambda stream: stream in behind)
    monkeypatch.setattr(output._log_writer, "is_behind", lambda: disk)
    watched = set(output.watched_fds())
    found = [sum(stream.fd in watched for stream in streams_of(output, rank)) for rank in (0, 1)]
    for end in (*ends[0], *ends[1], null):
        os.close(end)
    output.close()
    assert found == [shown, hidden]


def streams_of(output: OutputRouter, rank: int) -> list[WorkerStream]:
    """Return the two streams of a rank."""
    return list(output._workers[rank].streams)
