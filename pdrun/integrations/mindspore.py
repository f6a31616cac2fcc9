"""
Runs a MindSpore script as the workers of a job: its own ``init()`` finds the other workers.

    pdrun --devices 8 -m pdrun.integrations.mindspore train.py --epochs 3

Each worker gets the variables of MindSpore's dynamic cluster. Rank 0 also starts MindSpore's
scheduler, a process of MindSpore whose port follows from that of the store. It ends with the job.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from pdrun.errors import PdrunError, UsageError
from pdrun.text import quote_command
from pdrun.worker_env import WorkerEnv

WHERE = "pdrun.integrations.mindspore"
START = ("pdrun", "--devices", "8", "-m", WHERE)
SCHEDULER_PROGRAM = "from mindspore.communication import init; init()"
SCHEDULER_SECONDS = 30.0
"""How long the scheduler may take to end after the script."""
FIRST_PORT = 10000
PORT_COUNT = 20000
"""The scheduler's port follows from the store's, and is below those that the system chooses."""


def make_variables(env: WorkerEnv) -> dict[str, str]:
    """Return the variables of MindSpore's dynamic cluster for a worker."""
    port = FIRST_PORT + env.master_port % PORT_COUNT
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": env.master_addr,
        "MS_SCHED_PORT": str(port),
        "MS_WORKER_NUM": str(env.world_size),
        "MS_NODE_ID": str(env.rank),
    }


def start_scheduler(variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """
    Start MindSpore's scheduler on this host.

    Raises:
        UsageError: its port is in use.
    """
    host, port = variables["MS_SCHED_HOST"], int(variables["MS_SCHED_PORT"])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"MindSpore's scheduler cannot listen on {host}:{port} ({error.strerror})"
            raise UsageError(what, where=WHERE, hint="choose another --master-port") from None
    return subprocess.Popen(
        [sys.executable, "-c", SCHEDULER_PROGRAM],
        env={**os.environ, **variables, "MS_ROLE": "MS_SCHED"},
        stdin=subprocess.DEVNULL,
    )


def run_script(words: list[str]) -> None:
    """
    Run a script with MindSpore's variables.

    Args:
        words: the script and its arguments.

    Raises:
        UsageError: there is no script, or no job around.
    """
    if not words or not Path(words[0]).exists():
        what = f"the script {words[0]!r} does not exist" if words else "a script is missing"
        raise UsageError(what, where=WHERE, hint=quote_command(*START, "train.py"))
    env = WorkerEnv.from_env(os.environ)
    if env is None:
        hint = f"start it with {quote_command(*START, words[0])}"
        raise UsageError("there is no job around this process", where=WHERE, hint=hint)
    variables = make_variables(env)
    if env.rank == 0:
        # registered before MindSpore's own handlers, so that it runs after them
        atexit.register(_end_scheduler, start_scheduler(variables))
    os.environ.update(variables)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        error.__traceback__ = _drop_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _end_scheduler(scheduler: subprocess.Popen[bytes]) -> None:
    """Wait for the scheduler, which ends when all workers have left; then kill it."""
    try:
        scheduler.wait(SCHEDULER_SECONDS)
    except subprocess.TimeoutExpired:
        scheduler.kill()
        scheduler.wait()


def _drop_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def main() -> None:
    """Run the script of the command line."""
    try:
        run_script(sys.argv[1:])
    except PdrunError as error:
        print(f"pdrun: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
