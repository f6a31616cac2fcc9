"""
The import of torch, begun before the command line is read: on a guess, which the plan takes over or
ends.

Nothing of a start takes as long as that import, and pdrun itself needs 0.2 s until its plan says
what to import. But ``pdrun --devices 8 train.py`` nearly always comes to what its bare words and
the environment look like: a starter (see `starting`) with this interpreter and this environment. So
that one is started first, with its keeper, and taken over if it is to the letter what the plan asks
for (`take`). A wrong guess costs CPU for 0.2 s; what an import of torch runs of the user's own
(sitecustomize, plug-ins) runs for nothing then. What is not taken over is ended before anything of
the job begins (`drop`).

Nothing is guessed where words or environment tell of another kind of start, or a warm process may
be there.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdrun.launcher.supervisor.boot import Prestart
    from pdrun.launcher.supervisor.events import WorkerCommand

ELSE = frozenset(
    (
        "-h",
        "--help",
        "--version",
        "--dry-run",
        "-m",
        "--module",
        "--no-python",
        "--no_python",
        "--python",
        "--start",
        "--env",
        "--chdir",
        "--local",
        "--hosts",
        "--hostfile",
        "--rank-table",
        "--rank_table_file",
        "--launcher",
        "--run-path",
        "--run_path",
        "--role",
    )
)
"""
Options with which a job starts in another way, or does not start at all, or elsewhere, or with
other variables.
"""
ATTACHED = ("LD_PRELOAD", "LD_AUDIT")
"""Variables of tools that would be attached to one more process; with them workers are executed."""
ENDING = 2.0
"""Seconds that a keeper has to end what nobody wants."""


_ahead: Prestart | None = None


def begin(words: Sequence[str]) -> None:
    """
    Guess what ``pdrun WORDS`` will start, and start it. Raises nothing: who cannot guess does
    without.
    """
    global _ahead
    if sys.platform != "linux" or _ahead is not None:
        return
    try:
        place = script(words, os.environ)
        if place is None:
            return
        from pdrun.launcher.supervisor import boot

        _ahead = boot.Prestart(*boot.start_supervisor(sys.executable))
        _ahead.command = command(words[place:], os.environ)  # while the keeper starts
        if _ahead.command is None:
            drop()
        else:
            _send(_ahead)
    except Exception:  # of any kind: what is wrong here is told by whoever reads the command line
        drop()


def take(wanted: WorkerCommand) -> Prestart | None:
    """
    Return the keeper that has just this starter, now the caller's; None, and none is left, where
    there is none.
    """
    global _ahead
    if _ahead is None or _ahead.command != (list(wanted.argv), dict(wanted.env), wanted.cwd):
        drop()
        return None
    found = _ahead
    _ahead = None
    return found


def drop() -> None:
    """End what was started and nobody has taken over."""
    global _ahead
    if _ahead is None:
        return
    found = _ahead
    _ahead = None
    found.socket.close()  # the keeper ends its starter, then itself
    for number, seconds in (
        (signal.SIGCONT, ENDING),
        (signal.SIGKILL, ENDING),
    ):  # the one if it was stopped
        deadline = time.monotonic() + seconds
        try:
            os.kill(found.pid, number)
            while time.monotonic() < deadline:
                if os.waitpid(found.pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.002)
        except (ChildProcessError, ProcessLookupError):
            return


def script(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return which word is the Python file that workers of an ordinary job would run, or None."""
    import resource

    from pdrun import process_setup
    from pdrun.launcher.common.files import has_warm_socket

    if any(name.startswith("PDRUN_") and name != "PDRUN_TOKEN" for name in environ) or any(
        map(environ.get, ATTACHED)
    ):
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and most < process_setup.MIN_DESCRIPTORS:
        return None
    for place, word in enumerate(words):
        if word.partition("=")[0] in ELSE or word.endswith((".yaml", ".yml")):
            return None
        if place == 0 and word == "run":
            continue
        if word.endswith(".py") and word[0] != "-" and os.path.isfile(word):  # noqa: PTH113  (pathlib comes later)
            if "--no-warm" not in words[:place] and has_warm_socket(environ):
                return None
            return place
        if place == 0 and word[0:1] != "-":
            return None
    return None


def command(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str], str] | None:
    """
    Return words, environment and folder of the starter for a script and its arguments; None: there
    will be none.
    """
    from pathlib import Path

    from pdrun.launcher.plan.environment import remove_launcher_variables
    from pdrun.launcher.plan.script_scan import MAX_READ_BYTES, scan_script
    from pdrun.launcher.stdlib_only import import_env
    from pdrun.launcher.supervisor import boot

    env = remove_launcher_variables(environ)[0]
    cwd = os.path.normpath(Path.cwd())
    path = Path(cwd, words[0])
    with path.open("rb") as file:
        found = scan_script(path, file.read(MAX_READ_BYTES))
    if not found.imports_torch or found.late_variable or import_env.why_exec_needed(env):
        return None
    modules = boot.BASE_MODULES + (boot.OPTIMIZER_MODULES if found.uses_optimizer else ())
    return (
        boot.fork_server_argv(sys.executable, modules, (sys.executable, *words)),
        import_env.import_environment(env),
        cwd,
    )


def _send(found: Prestart) -> None:
    import json
    import socket

    from pdrun import process_setup
    from pdrun.launcher.supervisor import boot

    assert found.command is not None
    argv, env, cwd = found.command
    body = boot.write_command(argv, env, cwd, (), process_setup.user_nofile_limit())
    try:
        socket.send_fds(
            found.socket, [json.dumps({"op": "prepare"}).encode()], [body], socket.MSG_NOSIGNAL
        )
    finally:
        os.close(body)
