"""
The command of one ssh connection, and the meaning of its failures. Pure.

    ssh [--ssh-opts] -o BatchMode=yes ... -T [-p PORT] [-l USER] -- HOST
        'exec PYTHON -P -m pdrun.launcher.launch.remote_main'

The remote command is the same for every job. The job is sent over stdin as data. The user's options
are first, because ssh uses the first value of an option. ~/.ssh/config applies to the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts.selection import Host

CONNECT_TIMEOUT_SECONDS = 10
SSH_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_SECONDS}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a master process that remains would keep our pipes open
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
REMOTE_MAIN_ARGS = ("-P", "-m", "pdrun.launcher.launch.remote_main")
BOOTSTRAP_ARGS = (
    "-c",
    "import base64; exec(base64.b64decode(open(0, chr(114)+chr(98), 0, closefd=False).readline()))",
)
"""
Runs the base64-encoded program in the first line of stdin (`pdrun.launcher.controller.bundle`).
"""
_SAFE_PATH = re.compile(r"[A-Za-z0-9_./+@%:=,~ -]+")


def check_python(python: str, *, where: str) -> str:
    """
    Return an interpreter's path if every login shell reads it alike inside single quotes.

    Raises:
        UsageError: the path starts with ``-`` or has a character other than letters, digits, blanks
            and ``_./+@%:=,~-``.
    """
    if python.startswith("-") or not _SAFE_PATH.fullmatch(python):
        raise UsageError(
            f"{quote_text(python)} cannot be passed to the shell of another host",
            where=where,
            hint="use a path of letters, digits and _./+@%:=,~-",
        )
    return python


def build_remote_command(python: str, words: Sequence[str] = REMOTE_MAIN_ARGS) -> str:
    """
    Return the line that the remote login shell runs: ``exec`` and the quoted command.
    """
    return " ".join(["exec", *(_quote_word(word) for word in (python, *words))])


def _quote_word(word: str) -> str:
    """
    Quote for sh, csh and fish: in single quotes only ``'``, ``!`` and ``\\`` are special.
    """
    if re.fullmatch(r"[A-Za-z0-9_./+@%:=,-]+", word):
        return word
    return f"'{word}'"


def build_ssh_argv(
    program: str, options: Sequence[str], host: Host, command: str
) -> tuple[str, ...]:
    """
    Return the argument list that runs ``command`` on a host.

    Raises:
        UsageError: the host's name or user starts with ``-``, which ssh would read as an option.
    """
    for word in (host.name, host.user):
        if word.startswith("-"):
            raise UsageError(
                f"{quote_text(word)} must not start with '-'", where=host.where or "--hosts"
            )
    argv = [program, *options]
    for option in SSH_OPTIONS:
        argv += ["-o", option]
    argv.append("-T")
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    return (*argv, "--", host.name, command)


def split_options(text: str, where: str) -> tuple[str, ...]:
    """
    Split the options of another program as a shell does. Nothing is run.

    Raises:
        UsageError: a quote is not closed, or the first item is not an option.
    """
    try:
        found = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{quote_text(text)}: {error}".lower(), where=where) from None
    if found and not found[0].startswith("-"):
        raise UsageError(
            f"must start with an option, got {quote_text(found[0])}",
            where=where,
            hint=f"use {where} '-o VALUE'",
        )
    return found


def split_ssh_options(text: str, where: str) -> tuple[str, ...]:
    """Split as `split_options` does. ``--`` is refused, because pdrun appends more options."""
    found = split_options(text, where)
    if "--" in found:
        raise UsageError(
            "'--' is not supported: pdrun appends more options", where=where, hint="remove it"
        )
    return found


SSH_FAILED = 255
"""Exit status of ssh itself, in contrast to that of the remote command."""
_DROPPED_LOGIN = (
    r"connection (?:closed|reset)|kex_exchange|ssh_exchange_identification|broken pipe"
    r"|timeout before authentication|not allowed at this time"
)
_FAILURES = (
    (
        r"could not resolve hostname",
        "its name cannot be resolved",
        "check the name, or ~/.ssh/config",
    ),
    (
        r"identification has changed|host key for .* has changed",
        "its host key has changed",
        "check that it is the same host, then run: ssh-keygen -R {key}",
    ),
    (
        r"host key verification failed|no .*host key is known",
        "its host key is unknown on this machine",
        "log in once with: {ssh}",
    ),
    (
        r"permission denied|too many authentication failures",
        "it refuses the key",
        "check that this works without a password: {batch} true",
    ),
    (r"connection refused", "its ssh port is closed", "check that sshd runs on this host"),
    (
        r"timed out|no route to host|network is unreachable|host is down",
        "it cannot be reached",
        "check the name and the network",
    ),
    (_DROPPED_LOGIN, "it closed the connection", "see the log of its sshd"),
    (
        r"no such identity|bad configuration option|bad owner or permissions|unknown option"
        r"|usage: ssh",
        "ssh refuses the options",
        "check --ssh-opts and ~/.ssh/config",
    ),
)
"""
Pattern of ssh's stderr, cause, and what to do. {ssh} is the command that reaches the host, {batch}
the same without questions, {key} the host's name in known_hosts.
"""


def is_dropped_login(stderr: str) -> bool:
    """Return whether an sshd closed a connection during the login, without another reason."""
    low = " ".join(stderr.lower().split())
    first = next((pattern for pattern, _, _ in _FAILURES if re.search(pattern, low)), "")
    return first == _DROPPED_LOGIN


def is_behind_proxy(stderr: str) -> bool:
    """Return whether ssh reached the host through another one: then it knows no address."""
    return "UNKNOWN port" in stderr


def explain_failure(
    host: Host,
    code: int | None,
    stderr: str,
    python: str,
    ssh: Sequence[str] = ("ssh",),
    *,
    logins: int = 1,
    jump: str = "",
) -> tuple[str, str]:
    """
    Return why a connection failed, and a hint.

    Args:
        host: the host.
        code: exit status of ssh; None: it did not answer in time.
        stderr: what ssh and the remote side wrote to stderr.
        python: the interpreter to start on the host.
        ssh: the program and the user's options.
        logins: attempts to log in.
        jump: host through which ssh reached it; empty: none.
    """
    target = host.name
    if host.user:
        target = f"{host.user}@{host.name}"
    port = ["-p", str(host.port)] if host.port is not None else []
    login = shlex.join([*ssh, *port, target])
    batch = shlex.join([*ssh, *port, "-o", "BatchMode=yes", target])
    key = f"'[{host.name}]:{host.port}'" if host.port not in (None, 22) else host.name
    low = " ".join(stderr.lower().split())
    last = _last_line(stderr)
    if code is None:
        return (
            "it did not answer in time",
            f"see whether this ends: {login} true. If not, a start-up file there (~/.bashrc) reads"
            " standard input or waits; if it does, a file system may hang",
        )
    if code != 255:
        return _explain_remote_failure(code, low, last, python)
    if is_dropped_login(stderr) and jump:
        times = f" {logins} times" if logins > 1 else ""
        return (
            f"its jump host, {jump}, or the host closed the connection{times} ({last})",
            "the sshd of a jump host accepts few logins at the same time (MaxStartups): use a"
            " smaller --ssh-window, or see its log",
        )
    subject = ""
    if jump and is_behind_proxy(stderr) and not re.search("forwarding failed|open failed", low):
        # The connection ended before the host itself was tried.
        subject = f"its jump host, {jump}: "
        if not re.search(r"[\s,]", jump):  # neither a command nor several hosts
            login = shlex.join([*ssh, jump])
            batch = shlex.join([*ssh, "-o", "BatchMode=yes", jump])
            key = jump.rpartition("@")[2]
    for pattern, what, hint in _FAILURES:
        if re.search(pattern, low):
            lines = [line for line in stderr.splitlines() if re.search(pattern, line.lower())]
            seen = _last_line(lines[0]) if subject and lines else last
            return f"{subject}{what} ({seen})", hint.format(ssh=login, batch=batch, key=key)
    return f"ssh failed ({last or 'no message'})", f"try: {batch} true"


def _explain_remote_failure(code: int, low: str, last: str, python: str) -> tuple[str, str]:
    """Explain a failure after the login: the interpreter did not start."""
    if "remote side:" in low:
        return (
            f"{python} has no pdrun there, and pdrun cannot be copied ({last.partition(': ')[2]})",
            "",
        )
    if "no module named" in low and "pdrun" in low:
        return f"{python} has no pdrun there", "install pdrun on this host, or add --ship"
    if code == 126:
        return (
            f"{python} cannot be executed on this host ({last or 'exit code 126'})",
            "check its permissions and its file system, or set another one with --python",
        )
    if code == 127 or "not found" in low or "no such file" in low:
        return f"there is no {python} on this host", "set the interpreter with --python"
    if "unknown option" in low:
        return f"{python} on this host is older than Python 3.11", "set a newer one with --python"
    return f"the remote side ended with exit code {code} ({last or 'no message'})", ""


def lacks_pdrun(what: str) -> bool:
    """Whether ``--ship`` can repair a failure."""
    return "has no pdrun there" in what or "there has pdrun" in what


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" \t\r-@#*")]
    line = lines[-1] if lines else ""
    return line if len(line) <= 160 else line[:157] + "..."
