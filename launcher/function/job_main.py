"""
``python -m pdrun.launcher.function.job_main``: the launcher process of one `pdrun.launch` call.

The job runs in its own process, so that the caller may be a thread, a notebook or a test: signal
handlers, the event loop and the main thread belong to this process.

Its standard input contains one line of JSON (specification, sources and the private folder of the
call) and stays open as a lifeline. When the caller dies in any way, this process removes the folder
and exits, and the supervisors kill every worker.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

from pdrun import process_setup
from pdrun.errors import EXIT_SOFTWARE


def main() -> int:
    """Read the job from standard input, run it, return its exit code."""
    process_setup.setup_process()
    payload = json.loads(sys.stdin.buffer.readline())
    _watch_lifeline(_move_lifeline(), Path(payload["folder"]))
    from pdrun.errors import PdrunError
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.plan.facts import gather_facts
    from pdrun.launcher.plan.plan import make_plan

    try:
        spec = JobSpec.from_json(payload["spec"])
        return execute(make_plan(spec, gather_facts(spec), payload["sources"]))
    except PdrunError as error:
        sys.stderr.write(f"pdrun: {error}\n")
        return error.exit_code


def _move_lifeline() -> int:
    """Move the lifeline from standard input, which workers would inherit, to a new descriptor."""
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


def _watch_lifeline(lifeline: int, folder: Path) -> None:
    threading.Thread(
        target=_exit_at_end, args=(lifeline, folder), daemon=True, name="lifeline"
    ).start()


def _exit_at_end(lifeline: int, folder: Path) -> None:
    """Wait for the caller's end, then remove the call's folders and exit."""
    while os.read(lifeline, 4096):
        pass
    from pdrun.launcher.agent.channel import WorkerChannel
    from pdrun.launcher.jobs.registry import remove_jobs

    remove_jobs(folder / "logs")
    for path in (folder, *WorkerChannel.folders):
        shutil.rmtree(path, ignore_errors=True)
    os._exit(EXIT_SOFTWARE)


if __name__ == "__main__":
    sys.exit(main())
