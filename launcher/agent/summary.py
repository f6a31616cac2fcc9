"""
The last words of a job on the terminal: how it ended and, when it failed, all that one needs to
act. Pure text.

At most LINES lines. The user's traceback is shown without any decorator in the script and without
launcher frames; the last lines of the worker's output stand in where there is none. Control
characters of a worker's text are made harmless.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence

from pdrun.errors import EXIT_DEADLINE, EXIT_OK
from pdrun.rendezvous.policies.texts import CLEAN_EXIT_TEXT
from pdrun.rendezvous.protocol.messages import Cause, Failure, Verdict

MAX_LINES = 40
_MAX_TRACEBACK_LINES = 22
_MAX_TAIL_LINES = 10
_MAX_OTHER_FAILURES = 4
_MAX_LINE_CHARACTERS = 300

_EARLY_END = re.compile(rf"; (rank \d+ on [^;]* {re.escape(CLEAN_EXIT_TEXT)})")
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def format_summary(
    verdict: Verdict,
    *,
    seconds: float,
    log_dir: str = "",
    python: str = "",
    is_already_shown: bool = False,
) -> list[str]:
    """
    Return the lines that tell how a job ended, without pdrun's prefix.

    Args:
        verdict: the scheduler's.
        seconds: how long the job took on this node.
        log_dir: folder of this run's logs; empty when no files are written.
        python: the workers' interpreter on this node, for a hint; empty when it is not known.
        revealed: the first cause's last lines, or the stacks of a hang, have just been shown here,
            and are not again.
    """
    took = f"after {format_duration(seconds)}"
    if verdict.code == EXIT_OK:
        return [
            f"job done in {format_duration(seconds)}" + (f", logs in {log_dir}" if log_dir else "")
        ]
    if verdict.first is None:
        word = (
            "stopped"
            if verdict.reason.startswith("stopped") or verdict.code == EXIT_DEADLINE
            else "failed"
        )
        reason = verdict.reason.removeprefix("stopped ")
        lines = [
            sanitize_line(
                f"job {word} {took}{' ' if word == 'stopped' and reason != verdict.reason else ': '}{reason}"
            )
        ]
        lines += _other_failure_lines(verdict.others)
    else:
        reason, deserted = _split_reason(verdict.reason)
        lines = [
            sanitize_line(f"job failed {took}: {reason}"),
            *_first_cause_lines(verdict.first, is_already_shown),
        ]
        lines += _victim_lines(verdict.victims) + _other_failure_lines(verdict.others)
        lines += [f"  hint: {text}" for text in find_hints(verdict.first.cause, python, deserted)]
    logs = f", logs in {log_dir}" if log_dir else ""
    return [*lines[: MAX_LINES - 1], f"exit code {verdict.code}{logs}"]


def _split_reason(reason: str) -> tuple[str, str]:
    """
    Take out of a reason which ranks had ended well before, which is a hint here; a long reason
    would hide it.
    """
    found = _EARLY_END.search(reason)
    if found is None:
        return (reason, "")
    return (reason[: found.start()] + reason[found.end() :], found[1])


def _first_cause_lines(failure: Failure, revealed: bool) -> list[str]:
    cause = failure.cause
    evidence = _evidence_lines(failure.cause)
    who = f"rank {failure.rank} on {failure.node}"
    if cause.kind == "hang":
        where = f"where every rank was{' stands above' if revealed else ':'}"
        return [f"  {where}", *(f"    {sanitize_line(line)}" for line in evidence if not revealed)]
    if evidence and revealed:
        lines = [sanitize_line(f"  the last words of {who} ({describe_exit(cause)}) stand above")]
    elif evidence:
        what = (
            "the traceback"
            if cause.traceback.strip()
            else f"the last line{'s' * (len(evidence) > 1)}"
        )
        lines = [
            sanitize_line(f"  {what} of {who} ({describe_exit(cause)}):"),
            *(f"    {sanitize_line(line)}" for line in evidence),
        ]
    else:
        lines = (
            []
            if cause.kind == "lost"
            else [sanitize_line(f"  {who} printed nothing ({describe_exit(cause)})")]
        )
    if cause.log and (evidence or cause.kind == "lost"):
        lines.append(sanitize_line(f"  log of rank {failure.rank}: {cause.log}"))
    return lines


def describe_exit(cause: Cause) -> str:
    """``exit code 42``; ``SIGSEGV, exit code 139``: how the process ended."""
    if cause.signal:
        from pdrun.launcher.common.signals import format_signal

        return f"{format_signal(cause.signal)}, exit code {cause.code}"
    return f"exit code {cause.code}"


def _evidence_lines(cause: Cause) -> list[str]:
    """The traceback, the middle cut out of a long one, else the last lines of output."""
    if cause.kind == "hang":
        if cause.traceback.strip():
            return cause.traceback.rstrip().split("\n")[: MAX_LINES - 10]
        return []
    if not cause.traceback.strip():
        return [line for line in cause.tail if line.strip()][-_MAX_TAIL_LINES:]
    lines = cause.traceback.rstrip().split("\n")
    if len(lines) <= _MAX_TRACEBACK_LINES:
        return lines
    head = 3
    return [
        *lines[:head],
        f"... {len(lines) - _MAX_TRACEBACK_LINES + 1} lines left out, see the log ...",
        *lines[head + len(lines) - _MAX_TRACEBACK_LINES + 1 :],
    ]


def _victim_lines(count: int) -> list[str]:
    if not count:
        return []
    return [f"  {count} other worker{'s were' if count > 1 else ' was'} stopped because of it"]


def _other_failure_lines(others: Sequence[Failure]) -> list[str]:
    lines = [
        sanitize_line(
            f"  rank {other.rank} on {other.node} failed by itself too: {other.cause.summary}"
            + (f" ({other.cause.log})" if other.cause.log else "")
        )
        for other in others[:_MAX_OTHER_FAILURES]
    ]
    if len(others) > _MAX_OTHER_FAILURES:
        lines.append(f"  ... and {len(others) - _MAX_OTHER_FAILURES} more")
    return lines


def find_hints(cause: Cause, python: str = "", early_end: str = "") -> Iterable[str]:
    """
    What one can do about it, where that is known; ``deserted``: which ranks had ended well before.
    """
    text = f"{cause.summary}\n{cause.traceback[-2000:]}"
    if cause.kind == "oom":
        yield "the memory limit of this machine or container was reached: start fewer workers, or raise the limit"
    elif cause.kind == "signal" and cause.signal == 9:
        yield "something outside pdrun killed it, often the kernel for lack of memory: look at 'dmesg' on that node"
    elif cause.kind == "signal" and cause.signal == 7:
        yield "is /dev/shm full there ('df -h /dev/shm')? data loaders keep their batches in it"
    elif cause.kind == "hang":
        yield "--hang-timeout must be longer than the longest honest wait: an evaluation or a checkpoint, say"
    elif cause.kind == "communication" and early_end:
        yield f"{early_end}: does every rank make every step? a shorter data loader ends a loop too early"
    elif cause.kind == "communication":
        yield "no worker failed by itself: look for a network fault, or a timeout while one rank was busy"
    elif re.search(r"OutOfMemoryError|CUDA out of memory|NPU out of memory", text):
        yield "the device's memory is full: a smaller batch, or is another process on that device?"
    elif cause.summary.startswith("ModuleNotFoundError"):
        yield f"is it installed for the interpreter of the workers{f', {python}' if python else ''}?"
    elif cause.kind == "startup" and os.strerror(errno.EAGAIN) in cause.summary:
        yield "a limit of processes is reached on that node: ulimit -u, or pids.max of the control group"
    elif cause.kind == "startup" and cause.code == 126 and not cause.retry:
        yield "check its permissions and first line (#!); for a Python script leave --no-python out"


def format_duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 7 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def sanitize_line(line: str) -> str:
    """
    Return a line that cannot command a terminal: no colours, control or direction characters, not
    endlessly long.
    """
    line = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", _SGR.sub("", line))
    return line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[: _MAX_LINE_CHARACTERS - 4]} ..."
