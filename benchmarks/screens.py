"""
CPU time of what shows a job: the live line, per line of output and per refresh; a frame of
`pdrun top` of 12,500 nodes, if textual is installed.

    python benchmarks/screens.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import pty
import sys
import tempfile
import threading
import time
from pathlib import Path

from pdrun.async_writer import BackgroundWriter
from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.live_line import LiveLine

LINES = 20_000
LINE = b"node0:0| step 12 loss 2.5 some more text of a usual line of a log\n"
FOOTER = b"step 1,200 of 10,000  loss 2.31  4.2 steps/s  1:02 left  0:05:10"
REFRESHES = 1_000


class TimedWriter(BackgroundWriter):
    """A writer whose thread notes its CPU time."""

    cpu_seconds = 0.0

    def _write_loop(self) -> None:
        super()._write_loop()
        self.cpu_seconds = time.thread_time()


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:
        pass


def measure_line(footer: bytes) -> float:
    """Return the CPU microseconds of the agent's two threads per line of output."""
    master, own = pty.openpty()
    threading.Thread(target=_drain, args=(master,), daemon=True).start()
    writer = TimedWriter(own, "terminal")
    writer.show_footer(footer)
    begin = time.thread_time()
    for index in range(LINES):
        writer.put(LINE)
        if index % 10 == 0:
            time.sleep(0.001)  # so that there are many writes, as of real workers
    spent = time.thread_time() - begin
    writer.close(10.0)
    os.close(own)
    return (spent + writer.cpu_seconds) / LINES * 1e6


def measure_refresh() -> float:
    """Return the CPU microseconds of a refresh of the live line; each tenth has a new step."""
    events = Path(tempfile.mkdtemp(), "events.jsonl")

    def add(kind: str, **data: object) -> None:
        with events.open("a") as file:
            file.write(json.dumps({"kind": kind, "time": time.time(), **data}) + "\n")

    add("created", job="j", run="r", nodes=1)
    add("joined", node="node0", workers=2)
    add("assigned", generation=0, restarts=0, nodes=[["node0", 0, 2]])
    add("started", generation=0)
    reader, line = EventLogReader(events), LiveLine()
    begin = time.thread_time()
    for index in range(REFRESHES):
        if index % 10 == 0:
            add("progress", step=index, most=index, values={"loss": [2.5, 2.5, 2.5, 0, -1]})
        line.format(reader.read_status(), time.time(), 100)
    return (time.thread_time() - begin) / REFRESHES * 1e6


def measure_frames(nodes: int = 12_500, workers: int = 8) -> list[float]:
    """Return the CPU milliseconds of frames of `pdrun top`, each with a new status."""
    import asyncio

    from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
    from pdrun.ui.top.app import TopApp

    def make_status(step: int) -> JobStatus:
        found = {f"n{i}": NodeStatus(f"n{i}", "running", i, workers) for i in range(nodes)}
        count = nodes * workers
        ranks = {rank: RankStatus(rank, f"n{rank // workers}", "running") for rank in range(count)}
        return JobStatus(state="running", nodes=found, ranks=ranks, step=step, step_at=step + 1.0)

    async def run() -> list[float]:
        times = []
        first = make_status(0)
        app = TopApp(lambda: first, lambda rank: [])
        async with app.run_test(size=(300, 100)) as pilot:
            await pilot.pause(1.0)
            app.action_pause()
            for step in range(1, 6):
                status = make_status(step)
                begin = time.thread_time()
                app.show_status(status)
                app.screen._compositor.render_strips()
                times.append((time.thread_time() - begin) * 1e3)
        return times

    return asyncio.run(run())


def main() -> None:
    """Print a line per round."""
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        without, shown = measure_line(b""), measure_line(FOOTER)
        print(f"per line {without:.1f} us, with the live line {shown:.1f} us;", end=" ")
        print(f"per refresh {measure_refresh():.0f} us, twice a second")
    try:
        frames = measure_frames()
    except ImportError as error:
        print(f"pdrun top: {error}")
    else:
        print("pdrun top, 12,500 nodes:", ", ".join(f"{frame:.0f}" for frame in frames), "ms")


if __name__ == "__main__":
    main()
