"""
``python -m pdrun.launcher.function.job_main``: the launcher process of one `pdrun.launch` call.

The job runs in a process of its own, so that the caller may be a thread, a notebook or a test:
signal handlers, the event loop and the main thread are this process's. Its standard input carries
one line of JSON (specification, sources and the call's private folder) and stays open as a
lifeline: when the caller dies in any way, this process removes the folder and leaves at once, and
the keepers end every worker.
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
    order = json.loads(sys.stdin.buffer.readline())
    _watch(_take_lifeline(), Path(order["folder"]))
    from pdrun.errors import PdrunError
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.plan.facts import gather
    from pdrun.launcher.plan.plan import plan

    try:
        spec = JobSpec.from_json(order["spec"])
        return execute(plan(spec, gather(spec), order["sources"]))
    except PdrunError as error:
        sys.stderr.write(f"pdrun: {error}\n")
        return error.exit_code


def _take_lifeline() -> int:
    """
    Move the lifeline away from standard input, which workers would otherwise inherit; return its
    descriptor.
    """
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


def _watch(lifeline: int, folder: Path) -> None:
    threading.Thread(
        target=_leave_at_end, args=(lifeline, folder), daemon=True, name="lifeline"
    ).start()


def _leave_at_end(lifeline: int, folder: Path) -> None:
    while os.read(lifeline, 4096):
        pass
    from pdrun.launcher.agent.channel import Channel
    from pdrun.launcher.jobs.registry import forget

    forget(folder / "logs")
    for one in (folder, *Channel.folders):
        shutil.rmtree(one, ignore_errors=True)
    os._exit(EXIT_SOFTWARE)


if __name__ == "__main__":
    sys.exit(main())
