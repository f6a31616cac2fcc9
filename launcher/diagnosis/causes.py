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
from pdrun.launcher.common.signals import format_signal
from pdrun.launcher.diagnosis.tracebacks import (
    RaisedException,
    extract_user_frames,
    is_permanent,
    parse_exceptions,
    strip_rank_prefix,
)
from pdrun.launcher.supervisor.events import SpawnFailed
from pdrun.rendezvous.protocol.messages import Cause, CauseKind

LINGER_SECONDS = 10.0
"""
Seconds between a traceback and the death that it explains, where the exit code is not Python's own
for it.
"""
PROMPT_SECONDS = 2.0
"""
The same for a death by SIGKILL or SIGTERM of somebody else, which a traceback rarely has to do
with.
"""
FATAL_PREFIX = "Fatal Python error"
"""How faulthandler's report of a deadly signal begins."""
TAIL_LINES = 20
TAIL_CHARS = 500

SIGNAL_MEANINGS = {
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


def find_cause(evidence: Evidence) -> Cause:
    """Return why a worker ended."""
    if evidence.spawn_failure is not None:
        return _cause_of_spawn_failure(evidence, evidence.spawn_failure)
    if evidence.status is None:
        return _make_cause(
            evidence,
            "stopped",
            128 + signal.SIGKILL,
            "could not be killed (uninterruptible sleep)",
            number=9,
        )
    code = os.waitstatus_to_exitcode(evidence.status)
    if code == 0:
        return _make_cause(evidence, "ok", 0, "")
    return _cause_of_failure(evidence, code)


def _cause_of_failure(evidence: Evidence, code: int) -> Cause:
    number = -code if code < 0 else 0
    weight = _traceback_kind(evidence, number, code)
    if evidence.traceback is not None and weight:
        return _cause_of_exception(evidence, *evidence.traceback, number, code, weight)
    crash = _faulthandler_report(
        evidence, number
    )  # faulthandler's report, if any, is older than the core dump
    ours = (
        evidence.stopped_at is not None
        and (crash[0] if crash else evidence.at) >= evidence.stopped_at
    )
    if number:
        return _cause_of_signal(evidence, number, ours, crash or (evidence.at, ""))
    if ours:
        return _make_cause(
            evidence, "stopped", code, f"exit code {code} after pdrun had told it to stop"
        )
    last = strip_rank_prefix(evidence.tail[-1]).strip() if evidence.tail else ""
    if code in (1, 2) and (_NOT_FOUND.search(last) or _UNREADABLE.match(last)):
        return _make_cause(evidence, "startup", code, last[:500], retry=False)
    said = last.removeprefix(
        "pdrun: error: "
    )  # by `pdrun.init()`, of a mistake that the script did not catch
    if said == last:
        return _make_cause(evidence, "exit", code, f"exit code {code}")
    return _make_cause(
        evidence, "communication" if PeerLost.SIGN in said else "exit", code, said[:500]
    )


def _faulthandler_report(evidence: Evidence, number: int) -> tuple[float, str] | None:
    """
    Return faulthandler's report, when it is about this death: not a child's, and not a signal of
    ours.
    """
    if evidence.traceback is None or not number or number in evidence.stop_signals:
        return None
    return evidence.traceback if evidence.traceback[1].startswith(FATAL_PREFIX) else None


def _traceback_kind(evidence: Evidence, number: int, code: int) -> CauseKind | None:
    """Return what a traceback says about this end: see the module. None: nothing."""
    if evidence.traceback is None or evidence.traceback[1].startswith(FATAL_PREFIX):
        return None
    at = evidence.traceback[0]
    told = evidence.stopped_at
    if told is not None and at >= told:
        return None
    if evidence.stop_signals:
        return None if evidence.survived else "suspect"
    if number == signal.SIGKILL and evidence.oom_kills:
        return None
    if code == 1 and told is None:
        return "exception"
    foreign = number in (signal.SIGKILL, signal.SIGTERM)
    if foreign and evidence.survived:
        return None  # it was caught, and somebody else's signal needs no such reason
    limit = PROMPT_SECONDS if foreign else LINGER_SECONDS
    return "exception" if evidence.at - at <= limit else None


def _cause_of_exception(
    evidence: Evidence, at: float, text: str, number: int, code: int, weight: CauseKind
) -> Cause:
    """The last word was a traceback, and it came before any order of ours to stop."""
    if number in evidence.stop_signals:
        # the order came while it was on its way out, with Python's code for an exception
        number = 0
        code = 1
    chain = parse_exceptions(text)
    peer = any(is_peer_error(error) for error in chain) or (
        number == signal.SIGABRT and _is_peer_abort(evidence)
    )
    return _make_cause(
        evidence,
        "communication" if peer else weight,
        _shell_code(code),
        chain[-1].summary if chain else "an exception",
        number=number,
        at=at,
        traceback=extract_user_frames(text),
        retry=not (chain and is_permanent(chain[-1])),
    )


def _cause_of_signal(
    evidence: Evidence, number: int, ours: bool, since: tuple[float, str]
) -> Cause:
    """It was killed; ``since`` is when that began, with faulthandler's report of it."""
    name = format_signal(number)
    plain = f"killed by {name}" + (
        f" ({SIGNAL_MEANINGS[name]})" if SIGNAL_MEANINGS.get(name, "killed") != "killed" else ""
    )
    code = 128 + number
    if ours and (number in evidence.stop_signals or number == signal.SIGKILL):
        return _make_cause(evidence, "stopped", code, f"ended by pdrun with {name}", number=number)
    if number == signal.SIGKILL and evidence.oom_kills:
        return _make_cause(
            evidence, "oom", code, "killed by the kernel: out of memory (SIGKILL)", number=number
        )
    if ours:
        return _make_cause(
            evidence, "stopped", code, f"{plain} after pdrun had told it to stop", number=number
        )
    if number == signal.SIGABRT and _is_peer_abort(evidence):
        return _make_cause(
            evidence, "communication", code, _abort_reason(evidence) or plain, number=number
        )
    if number in (signal.SIGKILL, signal.SIGTERM):
        plain += ", not by pdrun"
    return _make_cause(
        evidence, "signal", code, plain, number=number, at=since[0], traceback=since[1]
    )


def is_peer_error(error: RaisedException) -> bool:
    """Whether an exception says that a peer went away, rather than what went wrong here."""
    if _OWN_FAULT.search(error.text):
        return False
    if error.type in _DISTRIBUTED_ERRORS or _PEER_GONE.search(error.text):
        return True
    if error.type in _PIPE_ERRORS and error.files and _PIPE_FILES.search(error.files[-1]):
        return True
    about = error.text + "\n" + "\n".join(error.files[-3:])
    return bool(_CONNECTION.search(error.text) and _COLLECTIVE_WORDS.search(about))


def _is_peer_abort(evidence: Evidence) -> bool:
    """
    Whether an abort in C++ was about a peer: torch and NCCL end the process so when a watchdog
    gives up.
    """
    text = _abort_text(evidence)
    if _OWN_FAULT.search(text):
        return False
    connection = (
        _CONNECTION.search(text) and _COLLECTIVE_WORDS.search(text) and _ABORTED.search(text)
    )
    return bool(_PEER_GONE.search(text) or connection)


def _abort_text(evidence: Evidence) -> str:
    """
    What was printed last before the abort: from C++'s own last words on, where those are found.
    """
    text = strip_rank_prefix(evidence.recent or "\n".join(evidence.tail))
    return text[max(0, text.rfind("terminate called") - 2000) :]


def _abort_reason(evidence: Evidence) -> str:
    for line in reversed(_abort_text(evidence).split("\n")):
        if "what():" in line or _PEER_GONE.search(line):
            return (line.partition("what():")[2] or line).strip()[:500]
    return ""


def _cause_of_spawn_failure(evidence: Evidence, failure: SpawnFailed) -> Cause:
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
    return _make_cause(
        evidence,
        "startup",
        code,
        f"could not be started: {failure.message}{hint}"[:500],
        retry=passing,
    )


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _make_cause(
    evidence: Evidence,
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
        at=evidence.at if at is None else at,
        summary=summary,
        traceback=traceback,
        tail=() if kind == "ok" else _shorten_tail(evidence.tail),
        log=evidence.log,
        retry=retry,
    )


def _shorten_tail(tail: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(strip_rank_prefix(line)[:TAIL_CHARS] for line in tail[-TAIL_LINES:])
