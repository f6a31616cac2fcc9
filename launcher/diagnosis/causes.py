"""
Why did a worker end? Evidence in, a `Cause` out; pure, so that every case is a line in a table of
tests.

Evidence, strongest first: it could not be started; the kernel's count of out-of-memory kills; a Python traceback as its
last word together with a failing exit code; its exit code or signal; its last lines. An error whose text says that a
*peer* went away is `communication`: such a worker is a victim, even when it ended first. Whatever began after pdrun had
told the worker to stop is `stopped`.

A traceback alone proves nothing: a program may print one, with `logging.exception` say, and live
on. It counts

* as an `exception`, when the worker then ended by itself: with Python's code for it (1), or soon after (LINGER).
  `Group` lets a worker whose last word was a traceback do so, for a moment, before it passes on an order to stop;
* as a `suspect`, when our order ended it first, and nothing says that it had gone on (a line of a logger above the
  traceback, output after it). A suspect explains a job whose other workers only complain of a peer: it is mostly one
  that hangs in the destructors of torch.distributed. It never outranks a worker that died by itself. Time is no test
  here: the destructors may hang until the peers' timeouts, and a caught exception may be a second old;
* for nothing otherwise.

Limits. A victim is known by the words of gloo, NCCL, HCCL and torch.distributed, in the tables
below; other words are taken for an error of the worker's own, which is the safer mistake: a true
cause is never hidden. The parallel runtime says it in words of its own, in one line
(`pdrun.PeerLost`).
"""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass

from pdrun.errors import PeerLost
from pdrun.launcher.common.signals import signal_name
from pdrun.launcher.diagnosis.tracebacks import Raised, hopeless, raised, unprefixed, users_part
from pdrun.launcher.plan.model import SpawnFailed
from pdrun.rendezvous.protocol.messages import Cause, CauseKind

LINGER = 10.0
"""
Seconds between a traceback and the death that it explains, where the exit code is not Python's own
for it.
"""
PROMPT = 2.0
"""
The same for a death by SIGKILL or SIGTERM of somebody else, which a traceback rarely has to do
with.
"""
FATAL = "Fatal Python error"
"""How faulthandler's report of a deadly signal begins."""
TAIL_LINES = 20
TAIL_CHARACTERS = 500

MEANINGS = {
    "SIGHUP": "terminal closed",
    "SIGINT": "interrupted",
    "SIGQUIT": "quit",
    "SIGILL": "illegal instruction",
    "SIGTRAP": "breakpoint",
    "SIGABRT": "aborted by itself",
    "SIGBUS": "bus error: often /dev/shm or a disk is full",
    "SIGFPE": "arithmetic error",
    "SIGKILL": "killed",
    "SIGSEGV": "segmentation fault",
    "SIGPIPE": "broken pipe",
    "SIGTERM": "told to terminate",
    "SIGXCPU": "CPU time limit",
    "SIGXFSZ": "file size limit",
    "SIGSYS": "forbidden system call",
    "SIGUSR1": "no handler for it",
    "SIGUSR2": "no handler for it",
}

_PEER_GONE = re.compile(
    r"Connection closed by peer|remote process exited or there was a network error|ncclRemoteError"
    r"|Watchdog caught collective operation timeout|watchdog got stuck|EI0002|EI0006"
    r"|NCCL communicator was aborted|Some NCCL operations have failed or timed out"
    r"|Timed out waiting \d+ms for (?:recv|send) operation|connectFullMesh"
    r"|The client socket has (?:timed out|failed to connect)|Failed to recv, got 0 bytes"
    r"|Broken pipe.*(?:TCPStore|c10d)|(?:TCPStore|c10d).*Broken pipe|" + PeerLost.SIGN,
    re.DOTALL,
)
_CONNECTION = re.compile(
    r"Connection (?:reset|refused|aborted|timed out)|Broken pipe|recvBytes|sendBytes|recvValue|Socket Timeout"
    r"|[Nn]etwork (?:error|is unreachable)|failed to connect|[Tt]imed out|timeout|wait timeout"
)
_COLLECTIVE_WORDS = re.compile(
    r"gloo|c10d|NCCL|nccl|HCCL|hccl|ProcessGroup|TCPStore|torch[/.]distributed"
)
_OWN_FAULT = re.compile(
    r"Duplicate GPU|[Ii]nvalid (?:usage|argument)|unhandled cuda error|out of memory"
    r"|EADDRINUSE|[Aa]ddress already in use"
)
_DISTRIBUTED_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PIPE_ERRORS = (
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "EOFError",
)
_PIPE_FILES = re.compile(r"/torch/distributed/|/torch/multiprocessing/|/multiprocessing/")
_ABORTED = re.compile(r"^terminate called|c10::|std::|what\(\):", re.MULTILINE)
_NOT_FOUND = re.compile(
    r"can't open file .*\[Errno \d+\]|: No module named \S+$|can't find '__main__' module"
)

_UNREADABLE = re.compile(r"SyntaxError: (?:Non-UTF-8 code|encoding problem)")
"""
What Python says of a script whose bytes it cannot decode: without a traceback, and without a line
of it.
"""


@dataclass(frozen=True)
class Evidence:
    """What the agent saw of one worker's end."""

    status: int | None
    """As waitpid gave it; None when the worker never started, or would not even die."""
    at: float
    """Monotonic seconds of the end."""
    traceback: tuple[float, str] | None = None
    """The last traceback when nothing followed it, with the time of its first byte."""
    survived: bool = False
    """Whether the worker is known to have gone on after that traceback."""
    tail: tuple[str, ...] = ()
    """The last lines that it printed."""
    recent: str = ""
    """
    The end of its stderr, longer than the tail: the reason of an abort may stand above a long
    stack.
    """
    stopped_at: float | None = None
    """When pdrun first told this worker to stop."""
    stop_signals: tuple[int, ...] = ()
    """The signals that pdrun sent for that; none while the order was still held back."""
    spawn_failure: SpawnFailed | None = None
    oom_kills: int = 0
    """Out-of-memory kills that the kernel counted in this cgroup since the workers started."""
    log: str = ""


def cause_of(seen: Evidence) -> Cause:
    """Return why a worker ended."""
    if seen.spawn_failure is not None:
        return _not_started(seen, seen.spawn_failure)
    if seen.status is None:
        return _made(
            seen,
            "stopped",
            128 + signal.SIGKILL,
            "could not be killed (uninterruptible sleep)",
            number=9,
        )
    code = os.waitstatus_to_exitcode(seen.status)
    if code == 0:
        return _made(seen, "ok", 0, "")
    return _failed(seen, code)


def _failed(seen: Evidence, code: int) -> Cause:
    number = -code if code < 0 else 0
    weight = _weight(seen, number, code)
    if seen.traceback is not None and weight:
        return _exception(seen, *seen.traceback, number, code, weight)
    crash = _crash(seen, number)  # faulthandler's report, if any, is older than the core dump
    ours = seen.stopped_at is not None and (crash[0] if crash else seen.at) >= seen.stopped_at
    if number:
        return _signalled(seen, number, ours, crash or (seen.at, ""))
    if ours:
        return _made(seen, "stopped", code, f"exit code {code} after pdrun had told it to stop")
    last = unprefixed(seen.tail[-1]).strip() if seen.tail else ""
    if code in (1, 2) and (_NOT_FOUND.search(last) or _UNREADABLE.match(last)):
        return _made(seen, "startup", code, last[:500], retry=False)
    said = last.removeprefix(
        "pdrun: error: "
    )  # by `pdrun.init()`, of a mistake that the script did not catch
    if said == last:
        return _made(seen, "exit", code, f"exit code {code}")
    return _made(seen, "communication" if PeerLost.SIGN in said else "exit", code, said[:500])


def _crash(seen: Evidence, number: int) -> tuple[float, str] | None:
    """
    Return faulthandler's report, when it is about this death: not a child's, and not a signal of
    ours.
    """
    if seen.traceback is None or not number or number in seen.stop_signals:
        return None
    return seen.traceback if seen.traceback[1].startswith(FATAL) else None


def _weight(seen: Evidence, number: int, code: int) -> CauseKind | None:
    """Return what a traceback says about this end: see the module. None: nothing."""
    if seen.traceback is None or seen.traceback[1].startswith(FATAL):
        return None
    at = seen.traceback[0]
    told = seen.stopped_at
    if told is not None and at >= told:
        return None
    if seen.stop_signals:
        return None if seen.survived else "suspect"
    if number == signal.SIGKILL and seen.oom_kills:
        return None
    if code == 1 and told is None:
        return "exception"
    foreign = number in (signal.SIGKILL, signal.SIGTERM)
    if foreign and seen.survived:
        return None  # it was caught, and somebody else's signal needs no such reason
    limit = PROMPT if foreign else LINGER
    return "exception" if seen.at - at <= limit else None


def _exception(
    seen: Evidence, at: float, text: str, number: int, code: int, weight: CauseKind
) -> Cause:
    """The last word was a traceback, and it came before any order of ours to stop."""
    if number in seen.stop_signals:
        # the order came while it was on its way out, with Python's code for an exception
        number = 0
        code = 1
    chain = raised(text)
    peer = any(is_communication(error) for error in chain) or (
        number == signal.SIGABRT and _peer_abort(seen)
    )
    return _made(
        seen,
        "communication" if peer else weight,
        _shell(code),
        chain[-1].summary if chain else "an exception",
        number=number,
        at=at,
        traceback=users_part(text),
        retry=not (chain and hopeless(chain[-1])),
    )


def _signalled(seen: Evidence, number: int, ours: bool, since: tuple[float, str]) -> Cause:
    """It was killed; ``since`` is when that began, with faulthandler's report of it."""
    name = signal_name(number)
    plain = f"killed by {name}" + (
        f" ({MEANINGS[name]})" if MEANINGS.get(name, "killed") != "killed" else ""
    )
    code = 128 + number
    if ours and (number in seen.stop_signals or number == signal.SIGKILL):
        return _made(seen, "stopped", code, f"ended by pdrun with {name}", number=number)
    if number == signal.SIGKILL and seen.oom_kills:
        return _made(
            seen, "oom", code, "killed by the kernel: out of memory (SIGKILL)", number=number
        )
    if ours:
        return _made(
            seen, "stopped", code, f"{plain} after pdrun had told it to stop", number=number
        )
    if number == signal.SIGABRT and _peer_abort(seen):
        return _made(seen, "communication", code, _abort_words(seen) or plain, number=number)
    if number in (signal.SIGKILL, signal.SIGTERM):
        plain += ", not by pdrun"
    return _made(seen, "signal", code, plain, number=number, at=since[0], traceback=since[1])


def is_communication(error: Raised) -> bool:
    """Whether an exception says that a peer went away, rather than what went wrong here."""
    if _OWN_FAULT.search(error.text):
        return False
    if error.type in _DISTRIBUTED_ERRORS or _PEER_GONE.search(error.text):
        return True
    if error.type in _PIPE_ERRORS and error.files and _PIPE_FILES.search(error.files[-1]):
        return True
    about = error.text + "\n" + "\n".join(error.files[-3:])
    return bool(_CONNECTION.search(error.text) and _COLLECTIVE_WORDS.search(about))


def _peer_abort(seen: Evidence) -> bool:
    """
    Whether an abort in C++ was about a peer: torch and NCCL end the process so when a watchdog
    gives up.
    """
    text = _abort_text(seen)
    if _OWN_FAULT.search(text):
        return False
    connection = (
        _CONNECTION.search(text) and _COLLECTIVE_WORDS.search(text) and _ABORTED.search(text)
    )
    return bool(_PEER_GONE.search(text) or connection)


def _abort_text(seen: Evidence) -> str:
    """
    What was printed last before the abort: from C++'s own last words on, where those are found.
    """
    text = unprefixed(seen.recent or "\n".join(seen.tail))
    return text[max(0, text.rfind("terminate called") - 2000) :]


def _abort_words(seen: Evidence) -> str:
    for line in reversed(_abort_text(seen).split("\n")):
        if "what():" in line or _PEER_GONE.search(line):
            return (line.partition("what():")[2] or line).strip()[:500]
    return ""


def _not_started(seen: Evidence, failure: SpawnFailed) -> Cause:
    """
    As in a shell, 127: not there, 126: there but not to be executed. Only a lack of means may pass
    by itself.
    """
    code = 127 if failure.errno == errno.ENOENT else 126
    passing = failure.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    hint = (
        "; no interpreter line (#!), or of another machine?"
        if failure.errno == errno.ENOEXEC
        else ""
    )
    return _made(
        seen, "startup", code, f"could not be started: {failure.message}{hint}"[:500], retry=passing
    )


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code


def _made(
    seen: Evidence,
    kind: CauseKind,
    code: int,
    summary: str,
    *,
    number: int = 0,
    at: float | None = None,
    traceback: str = "",
    retry: bool = True,
) -> Cause:
    return Cause(
        kind=kind,
        code=code,
        signal=int(number),
        at=seen.at if at is None else at,
        summary=summary,
        traceback=traceback,
        tail=() if kind == "ok" else _short(seen.tail),
        log=seen.log,
        retry=retry,
    )


def _short(tail: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(unprefixed(line)[:TAIL_CHARACTERS] for line in tail[-TAIL_LINES:])
