"""
Starts the import of torch before the command line is parsed, on a guess.

The import of torch is the longest part of a start, and pdrun needs 0.2 s until its plan defines
what to import. But ``pdrun --devices 8 train.py`` nearly always leads to what the arguments and the
environment suggest: a fork server of this interpreter and this environment (see `start_method`).

* `start` starts that fork server and its supervisor first.
* `claim` hands them over if the plan wants exactly this fork server.
* `discard` ends them otherwise, before anything of the job starts.

A wrong guess costs 0.2 s of CPU time, and the user's own code in an import of torch
(sitecustomize, plug-ins) then runs in vain.

Nothing is guessed if arguments or environment select another start method, or if there may be a
warm process.
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

EXCLUDING_OPTIONS = frozenset(
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
        "--launch-compat",
        "--local-rank-arg",
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
Options of a job that starts differently, not at all, on other hosts or with other variables.
"""
PRELOAD_VARIABLES = ("LD_PRELOAD", "LD_AUDIT")
"""Their tools would be attached to one more process. With them workers are executed, not forked."""
EXIT_SECONDS = 2.0
"""Time for a supervisor to exit before it is killed."""

_prestart: Prestart | None = None


def start(words: Sequence[str]) -> None:
    """Guess the fork server of ``pdrun WORDS`` and start it. Never raises."""
    global _prestart
    if sys.platform != "linux" or _prestart is not None:
        return
    try:
        index = find_script_argument(words, os.environ)
        if index is None:
            return
        from pdrun.launcher.supervisor import boot

        _prestart = boot.Prestart(*boot.start_supervisor(sys.executable))
        # the supervisor starts meanwhile
        _prestart.command = guess_command(words[index:], os.environ)
        if _prestart.command is None:
            discard()
        else:
            _send_command(_prestart)
    except Exception:  # of any kind: the command line reports what is wrong
        discard()


def claim(command: WorkerCommand) -> Prestart | None:
    """
    Return the supervisor whose fork server has exactly this command; the caller owns it.

    Any other prestarted supervisor is ended, and None returned.
    """
    global _prestart
    wanted = (list(command.argv), dict(command.env), command.cwd)
    if _prestart is None or _prestart.command != wanted:
        discard()
        return None
    claimed = _prestart
    _prestart = None
    return claimed


def discard() -> None:
    """End the supervisor and fork server that were not claimed."""
    global _prestart
    if _prestart is None:
        return
    unused = _prestart
    _prestart = None
    unused.socket.close()  # the supervisor ends its fork server, then itself
    # SIGCONT first: the supervisor may have been stopped
    for number in (signal.SIGCONT, signal.SIGKILL):
        deadline = time.monotonic() + EXIT_SECONDS
        try:
            os.kill(unused.pid, number)
            while time.monotonic() < deadline:
                if os.waitpid(unused.pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.002)
        except (ChildProcessError, ProcessLookupError):
            return


def find_script_argument(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return the index of the script that forked workers would run; None: no guess."""
    import resource

    from pdrun import process_setup

    if any(name.startswith("PDRUN_") and name != "PDRUN_TOKEN" for name in environ):
        return None
    if any(map(environ.get, PRELOAD_VARIABLES)):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < process_setup.MIN_DESCRIPTORS:
        return None
    for index, word in enumerate(words):
        if word.partition("=")[0] in EXCLUDING_OPTIONS or word.endswith((".yaml", ".yml")):
            return None
        if index == 0 and word == "run":
            continue
        # not pathlib: importing it takes time
        if word.endswith(".py") and word[0] != "-" and os.path.isfile(word):  # noqa: PTH113
            if "--no-warm" not in words[:index] and _may_have_warm_process(environ):
                return None
            return index
        if index == 0 and word[0:1] != "-":
            return None
    return None


def guess_command(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str], str] | None:
    """
    Return argv, environment and folder of the fork server of a script; None: no fork server.

    Args:
        words: path of the script, then its arguments.
        environ: the environment of pdrun.
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


def _may_have_warm_process(environ: Mapping[str, str]) -> bool:
    """Return whether this user may have a warm process."""
    from pdrun.launcher.common.files import warm_folder

    try:
        return any(path.suffix == ".sock" for path in warm_folder(environ).iterdir())
    except OSError:
        return False


def _send_command(prestart: Prestart) -> None:
    """Send the fork server's command to the supervisor."""
    import json
    import socket

    from pdrun import process_setup
    from pdrun.launcher.supervisor import boot

    assert prestart.command is not None
    argv, env, cwd = prestart.command
    body = boot.write_command(argv, env, cwd, (), process_setup.user_nofile_limit())
    try:
        socket.send_fds(
            prestart.socket, [json.dumps({"op": "prepare"}).encode()], [body], socket.MSG_NOSIGNAL
        )
    finally:
        os.close(body)
