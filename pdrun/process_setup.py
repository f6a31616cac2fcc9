"""
What a process of pdrun does before anything else, so that no moment of its life is without an
answer.

    descriptors 0-2    one that was closed (``>&-``) becomes /dev/null; else the next file would get its number
    SIGINT and others  until somebody takes them (`pdrun.launcher.common.signals`), they end the process quietly with 128 + N
    RLIMIT_NOFILE      raised towards the hard limit for pdrun itself; workers get back what the user had
    PDRUN_TOKEN        taken out of the environment and kept (`token`): no child has it that is not handed it

Only the mains call `begin`, never a library: handlers and limits are the process's own. No import
of it takes time.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing that takes time comes before the handlers
    from collections.abc import Mapping
    from types import FrameType

    from pdrun.errors import ConfigError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
MAX_DESCRIPTORS = 1 << 16
"""Descriptors that pdrun gives itself at most; far more than any node needs."""
MIN_DESCRIPTORS = 64
"""Descriptors with which anything small can be done."""
TOKEN_VARIABLE = "PDRUN_TOKEN"

_user_nofile_limit: list[tuple[int, int]] = []
_taken_token: list[str] = []


def setup_process() -> None:
    """
    Do what the module says. What was inherited as ignored (nohup's SIGHUP, a background job's
    SIGINT) stays so.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_handler)
    take_token()
    _open_standard_fds()
    _raise_nofile_limit()


def exit_handler(number: int, frame: FrameType | None) -> None:
    """
    The handler: nothing has begun that would have to be ended, and what was started notices the end
    by itself.
    """
    os._exit(128 + number)


def restore_sigint() -> None:
    """
    From here on Ctrl-C is a KeyboardInterrupt again: for a command that wants to tidy up its
    screen.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is exit_handler:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


def handler_after(before: object) -> object:
    """
    Return the handler for the time after somebody has taken a signal, given the one from before.

    In a process that began with `begin` the job is over then, and its exit code stands: nothing may
    change it any more.
    """
    return signal.SIG_IGN if before is exit_handler else before


def _open_standard_fds() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            got = os.open(
                os.devnull, os.O_RDWR
            )  # the lowest free number: this one, since those below it are open
            os.set_inheritable(got, True)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(got, "w" if number else "r", closefd=False))


# The token
# ------------------------------------------------------------------------------------------------------------


def take_token() -> str | None:
    """
    Return what PDRUN_TOKEN said, the same at every call; the first one takes it out of the
    environment.

    The one place that reads the variable: mains call this before they start anything, libraries
    when they need the secret. A token that was set since then counts.
    """
    if (text := os.environ.pop(TOKEN_VARIABLE, None)) is not None:
        _taken_token[:] = [text]
    return _taken_token[-1] if _taken_token else None


def env_without_token(environ: Mapping[str, str]) -> dict[str, str]:
    """
    Return an environment for a child of a process whose own is the user's affair (`pdrun.launch`).
    """
    return {name: value for name, value in environ.items() if name != TOKEN_VARIABLE}


def env_with_token(environ: Mapping[str, str]) -> dict[str, str]:
    """
    Return an environment for a child that needs the token itself, or hands it on to one that does.
    """
    text = take_token()
    return {**environ, **({TOKEN_VARIABLE: text} if text is not None else {})}


# Descriptors
# ----------------------------------------------------------------------------------------------------------


def user_nofile_limit() -> tuple[int, int] | None:
    """RLIMIT_NOFILE (soft, hard) as the user had it; None where this process has not changed it."""
    return _user_nofile_limit[-1] if _user_nofile_limit else None


def remember_nofile_limit(soft: int, hard: int) -> None:
    """The user's limit, told by the process that has raised this one's."""
    _user_nofile_limit[:] = [(soft, hard)]


def _raise_nofile_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return
    remember_nofile_limit(soft, hard)


def require_descriptors(count: int, what: str) -> None:
    """
    Complain when this process may not open ``count`` files.

    Raises:
        ConfigError: it may not.
    """
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        raise descriptor_limit_error(what, count)


def descriptor_limit_error(what: str, count: int) -> ConfigError:
    """The error for EMFILE: ``what`` needs about ``count`` descriptors in one process."""
    import resource

    from pdrun.errors import ConfigError

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(
        f"a process may open {soft} files here, and {what} needs about {count}",
        where="RLIMIT_NOFILE",
        hint=f"raise the limit: ulimit -n {max(1024, count)}",
    )


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether an error (of the system, or of zmq) means that no descriptor was left."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


# Processes and threads
# ------------------------------------------------------------------------------------------------


def is_out_of_processes(error: BaseException) -> bool:
    """Whether an error means that no process and no thread may be started any more."""
    if isinstance(error, RuntimeError):
        return "can't start new thread" in str(error)
    return isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN


def process_limit_error(what: str) -> ConfigError:
    """The error for that: ``what`` could not start one more."""
    import resource

    from pdrun.errors import ConfigError

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    return ConfigError(
        f"{what} could start no further process or thread here (ulimit -u: {limit})",
        where="RLIMIT_NPROC",
        hint="raise that limit, or pids.max of the control group (a container's --pids-limit); or end other processes",
    )


def resource_limit_error(error: BaseException, what: str, files: int) -> ConfigError | None:
    """
    Return what an error says of this machine's limits, or None: ``what`` needs about ``files``
    descriptors.
    """
    if is_out_of_descriptors(error):
        return descriptor_limit_error(what, files)
    return process_limit_error(what) if is_out_of_processes(error) else None
