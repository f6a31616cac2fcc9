"""Jobs in the registry, their log files, and programs that react to SIGTERM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pdrun.eventlog import EventLog, LogEvent
from pdrun.launcher.jobs import registry
from pdrun.launcher.jobs.logs import print_logs
from pdrun.launcher.output.console import Console

TERM_ONCE = (
    "import signal, sys, time\nsignal.signal(15, lambda n, f: sys.exit(143))\n"
    "print('up', flush=True)\ntime.sleep(60)"
)


TERM_TWICE = (
    "import signal, sys, time\nseen = []\n"
    "def stop(n, f):\n    seen.append(n)\n    print('term', flush=True)\n    if len(seen) == 2: sys.exit(143)\n"
    "signal.signal(15, stop)\nprint('up', flush=True)\nwhile True: time.sleep(0.02)"
)


def register(home: Path, pid: int, run: str = "demo-1", *events: LogEvent) -> registry.JobRecord:
    log = EventLog(home / "logs" / run / "events.jsonl")
    log.append(LogEvent("created", 1000.0, {"job": "demo", "run": run, "nodes": 1}))
    log.append(LogEvent("joined", 1000.0, {"node": "n0", "workers": 2}))
    log.append(LogEvent("assigned", 1000.0, {"generation": 0, "nodes": [["n0", 0, 2]]}))
    log.append(LogEvent("started", 1000.0, {"generation": 0}))
    for event in events:
        log.append(event)
    log.close()
    job = registry.make_job_record(
        run, "demo", events=str(log.path), log_dir=str(home / "logs"), made=1000.0, pid=pid
    )
    assert registry.register_job(job)
    return job


def ended() -> int:
    """Return the number of a process that has gone."""
    child = subprocess.Popen(["true"])
    child.wait(10)
    return child.pid


VERDICT = LogEvent("verdict", 1010.0, {"code": 3, "reason": "rank 1 failed"})


def write(home: Path, generation: int, name: str, data: bytes, run: str = "demo-1") -> None:
    folder = home / "logs" / run / str(generation)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(data)


def show(home: Path, *args: str, **kwargs: object) -> tuple[int, str, str]:
    """Run `print_logs` with a console of files; return (code, stdout, stderr)."""
    paths = [home / "shown.out", home / "shown.err"]
    fds = [os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for path in paths]
    try:
        code = print_logs(*args, console=Console(*fds), **kwargs)  # type: ignore[arg-type]
    finally:
        for fd in fds:
            os.close(fd)
    return code, paths[0].read_text(), paths[1].read_text()
