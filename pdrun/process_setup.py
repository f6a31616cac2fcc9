"""
Setup of a pdrun process: what it does first.

* Descriptors 0 to 2: a closed one (``>&-``) becomes /dev/null. Otherwise the next file that is
  opened would get its number.
* SIGINT, SIGTERM, SIGQUIT, SIGHUP: they end the process with 128 + N, without a traceback, until
  `pdrun.launcher.common.signals` handles them.
* RLIMIT_NOFILE: raised towards the hard limit for pdrun itself. Workers get the user's limit.
* PDRUN_TOKEN: removed from the environment and remembered (`take_token`). Only children that need
  it get it.

Only main functions call `setup_process`, never a library: handlers and limits belong to the whole
process. Nothing that it imports takes time.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # no slow import before the handlers are set
    from collections.abc import Mapping
    from types import FrameType

    from pdrun.errors import ConfigError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
MAX_DESCRIPTORS = 1 << 16
"""Upper limit of descriptors that pdrun sets for itself; more than any node needs."""
MIN_DESCRIPTORS = 64
"""Descriptors that a small command needs."""
TOKEN_VARIABLE = "PDRUN_TOKEN"

_user_nofile_limit: list[tuple[int, int]] = []
_taken_token: list[str] = []


def setup_process() -> None:
    """
    Set up this process; see the module.

    Signals that are inherited as ignored stay ignored: SIGHUP of nohup, SIGINT of a background job.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_handler)
    take_token()
    _open_standard_fds()
    _raise_nofile_limit()


def exit_handler(number: int, frame: FrameType | None) -> None:
    """Exit on a signal. Nothing needs a cleanup yet; children notice the end of this process."""
    os._exit(128 + number)


def restore_sigint() -> None:
    """Restore KeyboardInterrupt for Ctrl-C, and defaults: for a command that redraws a screen."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not exit_handler:
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)


def handler_after(before: object) -> object:
    """
    Return the handler to set when a temporary handler is removed, given the one before it.

    After `setup_process` that is SIG_IGN: the job is over, and no signal may change its exit code.
    """
    if before is exit_handler:
        return signal.SIG_IGN
    return before


def _open_standard_fds() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one, because those below it are open.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            if getattr(sys, name) is None:
                mode = "w" if number else "r"
                setattr(sys, name, os.fdopen(opened, mode, closefd=False))


# The token
# --------------------------------------------------------------------------------------------------


def take_token() -> str | None:
    """
    Return the value of PDRUN_TOKEN and remove it from the environment; later calls return it again.

    This is the only reader of the variable. Main functions call this before they start anything,
    libraries when they need the secret. A token that was set after the last call replaces it.
    """
    if (text := os.environ.pop(TOKEN_VARIABLE, None)) is not None:
        _taken_token[:] = [text]
    if not _taken_token:
        return None
    return _taken_token[-1]


def env_without_token(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the token, for a child that does not need it."""
    return {name: value for name, value in environ.items() if name != TOKEN_VARIABLE}


def env_with_token(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the token, for a child that needs it or passes it on."""
    text = take_token()
    if text is None:
        return dict(environ)
    return {**environ, TOKEN_VARIABLE: text}


# Descriptors
# --------------------------------------------------------------------------------------------------


def user_nofile_limit() -> tuple[int, int] | None:
    """Return the user's RLIMIT_NOFILE (soft, hard); None if this process has not changed it."""
    if not _user_nofile_limit:
        return None
    return _user_nofile_limit[-1]


def remember_nofile_limit(soft: int, hard: int) -> None:
    """Remember the user's limit, received from the process that has raised this one's."""
    _user_nofile_limit[:] = [(soft, hard)]


def _raise_nofile_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return
    remember_nofile_limit(soft, hard)


def require_descriptors(count: int, what: str) -> None:
    """
    Check that this process may open ``count`` files.

    Raises:
        ConfigError: it may not; ``what`` is what needs them.
    """
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        raise descriptor_limit_error(what, count)


def descriptor_limit_error(what: str, count: int) -> ConfigError:
    """Return the error for EMFILE: ``what`` needs about ``count`` descriptors."""
    import resource

    from pdrun.errors import ConfigError

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(
        f"the limit of open files is {soft}, but {what} needs about {count}",
        where="RLIMIT_NOFILE",
        hint=f"raise the limit: ulimit -n {max(1024, count)}",
    )


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error of the system or of zmq means that no descriptor is left."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


# Processes and threads
# ------------------------------------------------------------------------------------------------


def is_out_of_processes(error: BaseException) -> bool:
    """Return whether an error means that no process or thread can be started."""
    if isinstance(error, RuntimeError):
        return "can't start new thread" in str(error)
    return isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN


def process_limit_error(what: str) -> ConfigError:
    """Return the error for that: ``what`` could not start a process or thread."""
    import resource

    from pdrun.errors import ConfigError

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = str(soft)
    if soft == resource.RLIM_INFINITY:
        limit = "no limit"
    return ConfigError(
        f"{what} could not start another process or thread (ulimit -u: {limit})",
        where="RLIMIT_NPROC",
        hint="raise that limit or pids.max of the cgroup (--pids-limit), or end other processes",
    )


def resource_limit_error(error: BaseException, what: str, files: int) -> ConfigError | None:
    """
    Return the error that names the exceeded limit of this machine, or None if there is no such one.

    ``what`` needs about ``files`` descriptors.
    """
    if is_out_of_descriptors(error):
        return descriptor_limit_error(what, files)
    if is_out_of_processes(error):
        return process_limit_error(what)
    return None
