"""
Plays hostile cases: reads one per line, runs the command line in a fork, answers with a line.

    python -m tests.e2e.hostile.player FOLDER

A fork per case is ten times as fast as a process per case.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

from pdrun.launcher.cli.commands import build_command_line
from pdrun.launcher.cli.main import main
from tests.e2e.hostile.cases import HostileCase, write_files

SECONDS = 30.0
"""Longest time of a case."""


def play(case: HostileCase, folder: Path) -> dict[str, object]:
    """Run a case in a fresh folder; return exit code, seconds, output and what is left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_files(case, folder)
    (folder / "bin").mkdir()
    for name in ("sh", "touch"):
        found = shutil.which(name)
        assert found is not None
        (folder / "bin" / name).symlink_to(found)
    began = time.monotonic()
    child = os.fork()
    if not child:
        run_command(case, folder)
    code: int | None = None
    while time.monotonic() < began + SECONDS:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    started = folder / "started"
    return {
        "name": case.name,
        "code": code,
        "seconds": time.monotonic() - began,
        "output": (folder / "output").read_text(errors="surrogateescape"),
        "pwned": any(folder.rglob("pwned")),
        "started": len(started.read_text().split()) if started.is_file() else 0,
    }


def run_command(case: HostileCase, folder: Path) -> None:
    """Become the command; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((null, 0), (output, 1), (output, 2)):
            os.dup2(old, new)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
        kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        os.environ.clear()
        os.environ.update(
            kept,
            HOME=str(folder),
            XDG_STATE_HOME=str(folder / "state"),
            PATH=str(folder / "bin"),
            TMPDIR=str(folder),
        )
        for name, value in case.env.items():
            os.environ[name] = value
        code = main(list(case.argv))
        sys.stdout.flush()
    except BaseException as error:
        print("Traceback of the player:", repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def serve(folder: Path) -> None:
    """Play the cases of stdin."""
    build_command_line()
    for line in sys.stdin:
        print(json.dumps(play(HostileCase(**json.loads(line)), folder)), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
