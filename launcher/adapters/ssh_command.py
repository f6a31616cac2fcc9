"""
The words of one ssh connection, and what its failures mean. Pure: nothing is started here.

    ssh [--ssh-opts] -o BatchMode=yes ... -T [-p PORT] [-l USER] -- HOST 'exec PYTHON -P -m pdrun.launcher.launch.remote_main'

The remote command is the same for every job: what differs goes over stdin as data. The options of
the user stand first, for ssh takes the first value that it meets; ~/.ssh/config counts where
neither says anything.
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
    "ControlMaster=no",  # a master that stays behind would hold our pipes open
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
REMOTE_MAIN_ARGS = ("-P", "-m", "pdrun.launcher.launch.remote_main")
BOOTSTRAP_ARGS = (
    "-c",
    "import base64; exec(base64.b64decode(open(0, chr(114)+chr(98), 0, closefd=False).readline()))",
)
"""
Runs the program that stands, in base64, in the first line of stdin
(`pdrun.launcher.controller.bundle`).
"""
_SAFE_PATH = re.compile(r"[A-Za-z0-9_./+@%:=,~ -]+")


def check_python(python: str, *, where: str) -> str:
    """
    Return an interpreter's path when every login shell reads it alike inside single quotes.

    Raises:
        UsageError: it begins with ``-`` or holds anything but letters, digits, blanks and
            ``_./+@%:=,~-``.
    """
    if python.startswith("-") or not _SAFE_PATH.fullmatch(python):
        raise UsageError(
            f"{quote_text(python)} cannot be given to another host's shell",
            where=where,
            hint="use a path of letters, digits and _./+@%:=,~-",
        )
    return python


def build_remote_command(python: str, words: Sequence[str] = REMOTE_MAIN_ARGS) -> str:
    """
    Return the one line that the remote login shell reads: ``exec`` and words of our own, quoted.
    """
    return " ".join(["exec", *(_quote_word(word) for word in (python, *words))])


def _quote_word(word: str) -> str:
    """
    Quote for sh, csh and fish alike: in single quotes, all but ``'``, ``!`` and ``\\`` stand for
    themselves.
    """
    return word if re.fullmatch(r"[A-Za-z0-9_./+@%:=,-]+", word) else f"'{word}'"


def build_ssh_argv(program: str, options: Sequence[str], host: Host, command: str) -> tuple[str, ...]:
    """
    Return the argument list that runs ``command`` on a host.

    Raises:
        UsageError: the host's name or user begins with ``-``: ssh would take it for an option.
    """
    for word in (host.name, host.user):
        if word.startswith("-"):
            raise UsageError(f"{quote_text(word)} begins with '-'", where=host.where or "--hosts")
    return (
        program,
        *options,
        *(part for option in SSH_OPTIONS for part in ("-o", option)),
        "-T",
        *(("-p", str(host.port)) if host.port is not None else ()),
        *(("-l", host.user) if host.user else ()),
        "--",
        host.name,
        command,
    )


def split_options(text: str, where: str) -> tuple[str, ...]:
    """
    Split options for another program as a shell would, running nothing.

    Raises:
        UsageError: a quote is not closed, or the first word is no option.
    """
    try:
        found = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{quote_text(text)}: {error}".lower(), where=where) from None
    if found and not found[0].startswith("-"):
        raise UsageError(
            f"{quote_text(found[0])} is no option", where=where, hint=f"write {where} '-o VALUE'"
        )
    return found


def split_ssh_options(text: str, where: str) -> tuple[str, ...]:
    """As `words`; ``--`` is refused, for pdrun adds options behind these."""
    found = split_options(text, where)
    if "--" in found:
        raise UsageError(
            "'--' ends ssh's options, and pdrun adds more", where=where, hint="leave it out"
        )
    return found


_FAILURES = (
    (r"could not resolve hostname", "its name is not known", "check the name, or ~/.ssh/config"),
    (
        r"identification has changed|host key for .* has changed",
        "its host key has changed",
        "make sure that it is the same host, then: ssh-keygen -R {host}",
    ),
    (
        r"host key verification failed|no .*host key is known",
        "its host key is not known here",
        "log in once with: ssh {host}",
    ),
    (
        r"permission denied|too many authentication failures",
        "it refuses the key",
        "check that this works without a password: ssh -o BatchMode=yes {host} true",
    ),
    (r"connection refused", "nothing answers on its ssh port", "check that sshd runs there"),
    (
        r"timed out|no route to host|network is unreachable|host is down",
        "it cannot be reached",
        "check the name and the network",
    ),
    (
        r"connection (?:closed|reset)|kex_exchange|broken pipe",
        "it closed the connection",
        "look into its sshd's log",
    ),
    (
        r"no such identity|bad configuration option|bad owner or permissions|unknown option|usage: ssh",
        "ssh refuses its options",
        "check --ssh-opts and ~/.ssh/config",
    ),
)
"""What ssh says on stderr, what that means, and what to do. {host} is filled in."""


def explain_failure(host: Host, code: int | None, said: str, python: str) -> tuple[str, str]:
    """
    Return why a connection came to nothing, and a hint.

    Args:
        code: exit status of ssh; None: it was given up.
        said: what it, or the far end, wrote to stderr.
        python: the interpreter that was to be started.
    """
    low = " ".join(said.lower().split())
    last = _last_line(said)
    if code is None:
        return (
            "it did not answer in time",
            "check that the interpreter starts there: a file system may hang",
        )
    if code != 255:
        return _explain_remote_failure(code, low, last, python)
    target = f"{host.user}@{host.name}" if host.user else host.name
    for pattern, what, hint in _FAILURES:
        if re.search(pattern, low):
            return f"{what} ({last})", hint.format(host=target)
    return f"ssh failed ({last or 'it says nothing'})", f"try: ssh -o BatchMode=yes {target} true"


def _explain_remote_failure(code: int, low: str, last: str, python: str) -> tuple[str, str]:
    """The login worked, the interpreter did not."""
    if "far end:" in low:
        return (
            f"{python} has no pdrun there, and it cannot be taken along ({last.partition(': ')[2]})",
            "",
        )
    if "no module named" in low and "pdrun" in low:
        return f"{python} has no pdrun there", "install it there, or add --ship"
    if code in (126, 127) or "not found" in low or "no such file" in low:
        return f"there is no {python} there", "give the interpreter's path with --python"
    if "unknown option" in low:
        return f"{python} there is older than Python 3.11", "give a newer one with --python"
    return f"the far end ended with code {code} ({last or 'it says nothing'})", ""


def lacks_pdrun(what: str) -> bool:
    """Whether a failure is one that ``--ship`` mends."""
    return "has no pdrun there" in what or "there has pdrun" in what


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" \t\r-@#*")]
    line = lines[-1] if lines else ""
    return line if len(line) <= 160 else line[:157] + "..."
