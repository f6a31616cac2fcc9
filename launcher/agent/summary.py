"""
The summary of a job on the terminal: how it ended and, if it failed, everything needed to act.

It has at most MAX_LINES lines. The user's traceback is shown without launcher frames, and the
script needs no decorator for it. Without a traceback the last lines of output are shown. Control
characters in a worker's text are escaped. This module only makes text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pdrun.errors import EXIT_DEADLINE, EXIT_OK
from pdrun.rendezvous.protocol.messages import Cause, Failure, Verdict
from pdrun.ui.remedies import split_early_end, suggest_remedies

MAX_LINES = 40
_MAX_TRACEBACK_LINES = 22
_HEAD_LINES = 3
"""Lines at the start of a long traceback that are kept."""
_MAX_TAIL_LINES = 10
_MAX_OTHER_FAILURES = 4
_MAX_LINE_CHARACTERS = 300

_EMPTY_INPUT = re.compile(r"EOFError\b|(bdb\.)?BdbQuit\b")
_PDB_END = "Quitting pdb will kill the process."
"""Printed by Python 3.14 at the end of the input."""
_STDIN_HINT = (
    "standard input is empty for this rank; --stdin {rank} gives it that of pdrun"
    " (on a terminal, only this rank is shown)"
)
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def format_summary(
    verdict: Verdict,
    *,
    seconds: float,
    log_dir: str = "",
    python: str = "",
    is_already_shown: bool = False,
    stdin_rank: int | None = None,
) -> list[str]:
    """
    Return the lines of the summary, without pdrun's prefix.

    Args:
        verdict: the scheduler's verdict.
        seconds: how long the job took on this node.
        log_dir: folder of this run's logs; empty if no files are written.
        python: the workers' interpreter on this node, for a hint; empty if unknown.
        is_already_shown: the last lines of the first cause, or the stacks of a hang, have just been
            printed, and are not repeated.
        stdin_rank: rank that reads the standard input of pdrun.
    """
    logs = f", logs in {log_dir}" if log_dir else ""
    duration = format_duration(seconds)
    if verdict.code == EXIT_OK:
        return [f"job done in {duration}{logs}"]
    if verdict.first is None:
        lines = [sanitize_line(_describe_end(verdict, duration))]
        lines += _other_failure_lines(verdict.others)
    else:
        reason, early_end = split_early_end(verdict.reason)
        lines = [sanitize_line(f"job failed after {duration}: {reason}")]
        lines += _first_cause_lines(verdict.first, is_already_shown)
        lines += _victim_lines(verdict.victims)
        lines += _other_failure_lines(verdict.others)
        for hint in find_hints(verdict.first.cause, python, early_end):
            lines.append(f"  hint: {hint}")
        if verdict.first.rank != stdin_rank and reads_standard_input(verdict.first.cause):
            lines.append(f"  hint: {_STDIN_HINT.format(rank=verdict.first.rank)}")
    lines = lines[: MAX_LINES - 1 - len(verdict.notes)]
    lines += [sanitize_line(f"  note: {note}") for note in verdict.notes]
    return [*lines, f"exit code {verdict.code}{logs}"]


def _describe_end(verdict: Verdict, duration: str) -> str:
    """Return how a job without a first cause ended: stopped or failed."""
    reason = verdict.reason.removeprefix("stopped ")
    if reason != verdict.reason:
        return f"job stopped after {duration} {reason}"
    is_stopped = verdict.reason.startswith("stopped") or verdict.code == EXIT_DEADLINE
    verb = "stopped" if is_stopped else "failed"
    return f"job {verb} after {duration}: {reason}"


def _first_cause_lines(failure: Failure, is_already_shown: bool) -> list[str]:
    cause = failure.cause
    evidence = _evidence_lines(cause)
    indented = [f"    {sanitize_line(line)}" for line in evidence]
    if cause.kind == "hang":
        if is_already_shown:
            return ["  the stacks of all ranks are shown above"]
        return ["  the stacks of all ranks:", *indented]
    who = f"rank {failure.rank} on {failure.node} ({describe_exit(cause)})"
    lines = []
    if evidence and is_already_shown:
        lines.append(sanitize_line(f"  the last output of {who} is shown above"))
    elif evidence:
        what = "the traceback"
        if not cause.traceback.strip():
            what = "the last line" if len(evidence) == 1 else "the last lines"
        lines += [sanitize_line(f"  {what} of {who}:"), *indented]
    elif cause.kind != "lost":
        rank = f"rank {failure.rank} on {failure.node}"
        lines.append(sanitize_line(f"  {rank} printed nothing ({describe_exit(cause)})"))
    if cause.log and (evidence or cause.kind == "lost"):
        lines.append(sanitize_line(f"  log of rank {failure.rank}: {cause.log}"))
    return lines


def describe_exit(cause: Cause) -> str:
    """Return how a process ended: ``exit code 42``, or ``SIGSEGV, exit code 139``."""
    if cause.signal:
        from pdrun.launcher.common.signals import format_signal

        return f"{format_signal(cause.signal)}, exit code {cause.code}"
    return f"exit code {cause.code}"


def _evidence_lines(cause: Cause) -> list[str]:
    """Return the traceback, a long one without its middle, or else the last lines of output."""
    has_traceback = bool(cause.traceback.strip())
    if cause.kind == "hang":
        if has_traceback:
            return cause.traceback.rstrip().split("\n")[: MAX_LINES - 10]
        return []
    if not has_traceback:
        return [line for line in cause.tail if line.strip()][-_MAX_TAIL_LINES:]
    lines = cause.traceback.rstrip().split("\n")
    left_out = len(lines) - _MAX_TRACEBACK_LINES + 1
    if left_out <= 1:
        return lines
    return [
        *lines[:_HEAD_LINES],
        f"... {left_out} lines left out, see the log ...",
        *lines[_HEAD_LINES + left_out :],
    ]


def _victim_lines(count: int) -> list[str]:
    if not count:
        return []
    if count == 1:
        return ["  1 other worker was stopped because of it"]
    return [f"  {count} other workers were stopped because of it"]


def _other_failure_lines(others: Sequence[Failure]) -> list[str]:
    lines = []
    for other in others[:_MAX_OTHER_FAILURES]:
        text = f"  rank {other.rank} on {other.node} failed independently: {other.cause.summary}"
        if other.cause.log:
            text += f" ({other.cause.log})"
        lines.append(sanitize_line(text))
    if len(others) > _MAX_OTHER_FAILURES:
        lines.append(f"  ... and {len(others) - _MAX_OTHER_FAILURES} more")
    return lines


def reads_standard_input(cause: Cause) -> bool:
    """Return whether a worker failed because its standard input is empty, as of `breakpoint`."""
    if _EMPTY_INPUT.match(cause.summary):
        return True
    return cause.kind == "exit" and any(_PDB_END in line for line in cause.tail)


def find_hints(cause: Cause, python: str = "", early_end: str = "") -> Iterable[str]:
    """
    Return what the user can do, if that is known.

    Args:
        cause: the first cause.
        python: the workers' interpreter; empty if unknown.
        early_end: which ranks had ended well before; empty: none.
    """
    return suggest_remedies(
        cause.kind,
        cause.summary,
        cause.traceback,
        code=cause.code,
        signal=cause.signal,
        can_retry=cause.retry,
        python=python,
        early_end=early_end,
    )


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 7 min``."""
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
    Return a line that is safe for a terminal.

    Colours are removed, control and direction characters are escaped, and a long line is cut.
    """
    line = _CONTROL.sub(_escape_match, _SGR.sub("", line))
    if len(line) <= _MAX_LINE_CHARACTERS:
        return line
    return f"{line[: _MAX_LINE_CHARACTERS - 4]} ..."


def _escape_match(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
