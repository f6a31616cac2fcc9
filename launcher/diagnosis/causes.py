"""
Find why a worker ended. Evidence in, a `Cause` out; pure.

Evidence, strongest first:

1. The worker could not be started.
2. The kernel counted an out-of-memory kill.
3. The last output was a Python traceback, and the exit code shows a failure.
4. Exit code or signal.
5. The last lines.

An error whose text names a lost *peer* is `communication`: such a worker is a victim, even if it
ended first. If the end began after pdrun had sent a stop signal, the cause is `stopped`.

A traceback alone proves nothing. A program may print one, with `logging.exception` for example, and
continue. A traceback counts

* as `exception`, if the worker then ended without a signal from pdrun: with Python's exit code for
  it (1), or within LINGER_SECONDS. `WorkerGroup` delays a stop signal for a worker whose last
  output was a traceback, so that it can end.
* as `suspect`, if pdrun's signal ended it first, and nothing shows that it had continued: neither a
  logger's line above the traceback nor output after it. A suspect explains a job whose other
  workers only report a lost peer. Usually it hangs in the destructors of torch.distributed. It
  never outranks a worker that died without a signal from pdrun. Time is not considered: the
  destructors may hang until the peers time out, and a caught exception may be a second old.
* not at all otherwise.

Limits: a victim is recognised by the messages of gloo, NCCL, HCCL and torch.distributed in the
tables below. Other messages count as the worker's own error. That mistake is the safer one: it
never hides a true cause. The parallel runtime reports a lost peer in one line (`pdrun.PeerLost`).
"""

from __future__ import annotations

import errno
import os
import re
import signal

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
from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import Cause, CauseKind

LINGER_SECONDS = 10.0
"""
Maximum time between a traceback and the death that it explains, if the exit code is not Python's.
"""
PROMPT_SECONDS = 2.0
"""The same for a death by another process's SIGKILL or SIGTERM, which rarely has to do with it."""
FATAL_PREFIX = "Fatal Python error"
"""First words of faulthandler's report of a deadly signal."""
TAIL_LINES = 20
TAIL_CHARS = 500

SIGNAL_MEANINGS = {
    "SIGHUP": "terminal closed",
    "SIGINT": "interrupted",
    "SIGQUIT": "quit",
    "SIGILL": "illegal instruction",
    "SIGTRAP": "breakpoint",
    "SIGABRT": "aborted itself",
    "SIGBUS": "bus error: often /dev/shm or a disk is full",
    "SIGFPE": "arithmetic error",
    "SIGKILL": "killed",
    "SIGSEGV": "segmentation fault",
    "SIGPIPE": "broken pipe",
    "SIGTERM": "asked to terminate",
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
    r"Connection (?:reset|refused|aborted|timed out)|Broken pipe|recvBytes|sendBytes|recvValue"
    r"|Socket Timeout"
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
_ENDED_THREAD = re.compile(r"^terminate called without an active exception$", re.MULTILINE)
"""C++'s last words when Python, at its end, ends a thread that C++ still uses."""
_NOT_FOUND = re.compile(
    r"can't open file .*\[Errno \d+\]|: No module named \S+$|can't find '__main__' module"
)

_UNREADABLE = re.compile(r"SyntaxError: (?:Non-UTF-8 code|encoding problem)")
"""Python's error for a script that it cannot decode; it prints no traceback."""


@dataclass(frozen=True)
class Evidence:
    """What the agent observed of a worker's end."""

    status: int | None
    """Wait status; None if the worker never started, or SIGKILL did not end it."""
    at: float
    """Time of the end (monotonic)."""
    traceback: tuple[float, str] | None = None
    """The last traceback, if it was the last output, and the time of its first byte."""
    survived: bool = False
    """Whether the worker is known to have continued after that traceback."""
    tail: tuple[str, ...] = ()
    """The last lines of its output."""
    recent: str = ""
    """End of its stderr, longer than the tail: the reason of an abort may precede a long stack."""
    stopped_at: float | None = None
    """When pdrun first decided to stop this worker."""
    stop_signals: tuple[int, ...] = ()
    """The signals that pdrun has sent for that; empty while they are delayed."""
    spawn_failure: SpawnFailed | None = None
    oom_kills: int = 0
    """Out-of-memory kills in this cgroup since the workers started."""
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
            evidence, "stopped", code, f"exit code {code} after pdrun had asked it to stop"
        )
    last = strip_rank_prefix(evidence.tail[-1]).strip() if evidence.tail else ""
    if code in (1, 2) and (_NOT_FOUND.search(last) or _UNREADABLE.match(last)):
        return _make_cause(evidence, "startup", code, last[:500], retry=False)
    # `pdrun.init()` prints an error that the script did not catch with this prefix.
    message = last.removeprefix("pdrun: error: ")
    if message == last:
        return _make_cause(evidence, "exit", code, f"exit code {code}")
    kind: CauseKind = "exit"
    if PeerLost.SIGN in message:
        kind = "communication"
    return _make_cause(evidence, kind, code, message[:500])


def _faulthandler_report(evidence: Evidence, number: int) -> tuple[float, str] | None:
    """Return faulthandler's report of this death; None if the signal was sent by pdrun."""
    if evidence.traceback is None or not number or number in evidence.stop_signals:
        return None
    if evidence.traceback[1].startswith(FATAL_PREFIX):
        return evidence.traceback
    return None


def _traceback_kind(evidence: Evidence, number: int, code: int) -> CauseKind | None:
    """Return what a traceback proves about this end (see the module); None: nothing."""
    if evidence.traceback is None or evidence.traceback[1].startswith(FATAL_PREFIX):
        return None
    at = evidence.traceback[0]
    stopped_at = evidence.stopped_at
    if stopped_at is not None and at >= stopped_at:
        return None
    if evidence.stop_signals:
        if evidence.survived:
            return None
        return "suspect"
    if number == signal.SIGKILL and evidence.oom_kills:
        return None
    if code == 1 and stopped_at is None:
        return "exception"
    limit = LINGER_SECONDS
    if number in (signal.SIGKILL, signal.SIGTERM):
        if evidence.survived:
            return None  # the exception was caught; another process's signal has another reason
        limit = PROMPT_SECONDS
    if evidence.at - at <= limit:
        return "exception"
    return None


def _cause_of_exception(
    evidence: Evidence, at: float, text: str, number: int, code: int, weight: CauseKind
) -> Cause:
    """Return the cause of a worker whose last output was a traceback, before any stop signal."""
    if number in evidence.stop_signals:
        # The signal arrived while it was exiting with Python's code for an exception.
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
    """Return the cause of a death by signal; ``since``: its begin and faulthandler's report."""
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
            evidence, "stopped", code, f"{plain} after pdrun had asked it to stop", number=number
        )
    if number == signal.SIGABRT and _is_peer_abort(evidence):
        return _make_cause(
            evidence, "communication", code, _abort_reason(evidence) or plain, number=number
        )
    if number in (signal.SIGKILL, signal.SIGTERM):
        plain += ", not by pdrun"
    if number == signal.SIGABRT and _ENDED_THREAD.search(_abort_text(evidence).rstrip()):
        plain += (
            " at its end: a thread (of torch.distributed, as a rule) still ran when Python ended;"
            " end the script with torch.distributed.destroy_process_group(), or use pdrun.init()"
        )
    return _make_cause(
        evidence, "signal", code, plain, number=number, at=since[0], traceback=since[1]
    )


def is_peer_error(error: RaisedException) -> bool:
    """Return whether an exception reports a lost peer instead of an own error."""
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
    Return whether an abort in C++ was caused by a lost peer.

    torch and NCCL abort the process when a watchdog times out.
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
    Return the last output before the abort, from C++'s ``terminate called`` on if it is found.
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
    Return the cause of a failed start, with the codes of a shell.

    127: not found; 126: not executable. Only a lack of resources may be temporary.
    """
    code = 127 if failure.errno == errno.ENOENT else 126
    passing = failure.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    hint = ""
    if failure.errno == errno.ENOEXEC:
        hint = "; no interpreter line (#!), or built for another machine?"
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
