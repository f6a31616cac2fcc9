"""What workers, hosts and devices use, in words, in a status and on the screen of top."""

from __future__ import annotations

from pdrun.ui.replay import StatusReplay, replay_lines
from pdrun.ui.status import format_plain
from pdrun.ui.top.model import TopModel
from pdrun.ui.usage import describe_usage, format_use

GIB = float(1 << 30)
LOG = (
    '{"kind": "created", "time": 1.0, "job": "j", "run": "r", "nodes": 1}',
    '{"kind": "usage", "time": 5.0, "values": {"cpu_percent": [98.4, 90, 99, 1, -1],'
    ' "memory_bytes": [1288490188.8, 1.0, 1503238553.6, 3, -1],'
    ' "host_memory_percent": [40, 10, 60.2, 0, -1], "x\\u202e": [1, 1, 1, 0, -1]}}',
)


def test_means_and_the_largest_memory() -> None:
    usage = {
        "cpu_percent": (98.4, 99.0, 1),
        "memory_bytes": (1.2 * GIB, 1.4 * GIB, 3),
        "host_cpu_percent": (45.0, 90.0, 0),
        "host_memory_percent": (40.0, 60.2, 0),
        "device_percent": (92.0, 99.0, 2),
        "device_memory_bytes": (30 * GIB, 30 * GIB, 2),
        "device_memory_percent": (37.5, 37.5, 2),
    }
    assert describe_usage(usage) == (
        "workers 98 % CPU, 1.2 GiB (most 1.4 GiB, rank 3); hosts 45 % CPU, at most 60 % memory; "
        "devices 92 % busy, 30 GiB, at most 38 % memory"
    )
    assert describe_usage({}) == ""
    assert format_use("memory_bytes", 5 * 2**20) == "5 MiB"


def test_a_status_has_one_line_of_it() -> None:
    status = replay_lines(LOG)
    lines = format_plain([status], 9.0)
    (use,) = [line for line in lines if line.startswith("use")]
    assert "workers 98 % CPU, 1.2 GiB (most 1.4 GiB, rank 3); hosts at most 60 % memory" in use


def test_top_draws_it_as_curves() -> None:
    model = TopModel()
    model.update(replay_lines(LOG))
    rows = {row[0]: row for row in model.curve_rows(20)}
    assert rows["memory_bytes"][1] == "1.2 GiB" and rows["cpu_percent"][1] == "98 %"


def test_samples_are_deferred_like_progress() -> None:
    """Of a log with a million lines, only the last sample is read."""
    replay = StatusReplay()
    step = b'{"kind": "progress", "time": 1.0, "generation": 0, "step": 3, "saved": -1}'
    replay.feed_lines([line.encode() for line in LOG] + [step, LOG[1].encode()] * 50)
    assert len(replay._segments) == 2, "the line about the job, and all behind it"
    status = replay.make_status()
    assert status.step == 3 and status.usage["cpu_percent"] == (98.4, 99.0, 1)
