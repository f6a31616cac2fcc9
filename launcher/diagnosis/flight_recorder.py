"""
torch's flight recorder: which collectives a worker has enqueued, and which it still waits for.

torch writes a dump when something is written to a pipe (`DumpRequest`); no code of the worker runs
for that. A dump is a pickle of plain values. It comes from a process that may be broken, so nothing
is unpickled: `parse_plain_pickle` knows the few opcodes of dicts, lists, texts and numbers, and
refuses all others.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdrun.rendezvous.protocol.messages import CollectiveReport

BUFFER_ENTRIES = 2000
"""Collectives that torch remembers; its own default."""
MAX_DUMP_BYTES = 32 << 20
MAX_GROUPS_PER_RANK = 8
"""Groups of a worker that are reported, those with waiting collectives first."""
MAX_NAME_CHARS = 60
MAX_MEMBERS = 4096
SETTLE_SECONDS = 0.1
"""A dump is complete if it did not grow for this time."""
FILE_CLOCK_NANOSECONDS = 20_000_000
"""Times of files may be so much behind the clock."""
GIVE_UP_SECONDS = 10.0
"""The first dump of a process takes 5 s, because torch looks up the names of functions."""
_STEM = "collectives-"
_RANKS = re.compile(r"\d+")


def trace_variables(folder: str) -> dict[str, str]:
    """Return the variables with which torch answers to `DumpRequest`; ``folder``: the agent's."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(BUFFER_ENTRIES),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/{_STEM}",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/{_STEM}",
    }


@dataclass(frozen=True)
class CollectiveRecord:
    """What the flight recorder of one worker says."""

    states: tuple[CollectiveReport, ...]
    """The last collective of each group, for this worker alone (`ranks` is empty)."""
    newest_ns: int
    """Wall clock of the last call of any collective, in nanoseconds; 0: none."""
    waiting_since_ns: int
    """Wall clock of the first call that is not complete; 0: none."""

    @property
    def waiting(self) -> CollectiveReport | None:
        """The collective that it waits for, or None."""
        return next((state for state in self.states if state.is_waiting), None)


class DumpRequest:
    """
    A request for the dump of one worker. `poll` returns the answer; it never blocks.

    Args:
        folder: the agent's folder.
        rank: the worker's rank.
        now: monotonic time.
    """

    def __init__(self, folder: Path, rank: int, now: float) -> None:
        self._path = folder / f"{_STEM}{rank}"
        self._give_up_at = now + GIVE_UP_SECONDS
        self._size = -1
        self._grown_at = now
        self._asked_ns = time.time_ns() - FILE_CLOCK_NANOSECONDS
        self.is_over = not _write_pipe(folder / f"{_STEM}{rank}.pipe")
        """Whether nothing more is expected."""
        self.was_asked = not self.is_over

    def poll(self, now: float) -> CollectiveRecord | None:
        """Return the answer once it is complete."""
        if self.is_over:
            return None
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is None or not found.st_size or found.st_mtime_ns < self._asked_ns:
            self.is_over = now >= self._give_up_at
            return None
        if found.st_size != self._size:
            self._size = found.st_size
            self._grown_at = now
        if now - self._grown_at < SETTLE_SECONDS:
            return None
        self.is_over = True
        return read_dump(self._path)


def _write_pipe(path: Path) -> bool:
    """Write to a worker's pipe; return whether the worker reads it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # no such pipe, or no reader
        return False
    try:
        return os.write(pipe, b"1") > 0
    except OSError:
        return False
    finally:
        os.close(pipe)


def read_dump(path: Path) -> CollectiveRecord | None:
    """Return what a dump says; None if it cannot be read, or has another format."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DUMP_BYTES + 1)
    except OSError:
        return None
    if len(data) > MAX_DUMP_BYTES:
        return None
    try:
        found = json.loads(data) if data[:1] == b"{" else parse_plain_pickle(data)
    except (ValueError, RecursionError):
        return None
    return summarize_dump(found)


def summarize_dump(dump: Any) -> CollectiveRecord | None:
    """Return the last collective of each group in the content of a dump; None: another format."""
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        return None
    config = dump.get("pg_config")
    members = _read_members(config if isinstance(config, dict) else {})
    last: dict[str, tuple[CollectiveReport, int]] = {}
    newest = 0
    waiting_since = 0
    for entry in dump["entries"]:
        state = _read_entry(entry, members)
        if state is None:
            continue
        at = entry.get("time_created_ns")
        at = at if type(at) is int else 0
        newest = max(newest, at)
        if state.is_waiting:
            waiting_since = min(waiting_since or at, at)
        before = last.get(state.group)
        # the first one that waits holds up all later ones of its group
        if before is None or not before[0].is_waiting:
            last[state.group] = (state, at)
    states = sorted(last.values(), key=lambda item: (not item[0].is_waiting, -item[1]))
    kept = tuple(state for state, _ in states[:MAX_GROUPS_PER_RANK])
    return CollectiveRecord(kept, newest, waiting_since)


def _read_entry(entry: Any, members: Mapping[str, tuple[int, ...]]) -> CollectiveReport | None:
    if not isinstance(entry, dict):
        return None
    group = entry.get("process_group")
    sequence = entry.get("collective_seq_id")
    operation = entry.get("profiling_name")
    if not isinstance(group, (tuple, list)) or not group or type(sequence) is not int:
        return None
    name = str(group[0])[:MAX_NAME_CHARS]
    about = str(group[1])[:MAX_NAME_CHARS] if len(group) > 1 else ""
    is_complete = entry.get("state") == "completed" or entry.get("retired") is True
    if entry.get("is_p2p") is True:
        # a pair of ranks, not all of a group: its number says nothing to others
        text = str(operation).rpartition(":")[2][:MAX_NAME_CHARS]
        return None if is_complete else CollectiveReport((), "", 0, text, True)
    return CollectiveReport(
        ranks=(),
        group=f"{name} ({about})" if about not in ("", "undefined", name) else name,
        sequence=max(0, sequence),
        operation=str(operation).rpartition(":")[2][:MAX_NAME_CHARS],
        is_waiting=not is_complete,
        members=members.get(name) or (members.get("", ()) if len(members) == 1 else ()),
    )


def _read_members(config: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group; empty: too many."""
    found = {}
    for name, about in config.items():
        text = about.get("ranks", "") if isinstance(about, dict) else ""
        ranks = [int(word) for word in _RANKS.findall(str(text)[: 1 << 20]) if len(word) < 9]
        found[str(name)[:MAX_NAME_CHARS]] = tuple(ranks) if len(ranks) <= MAX_MEMBERS else ()
    return found


def parse_plain_pickle(data: bytes) -> Any:
    """
    Return the value of a pickle of dicts, lists, tuples, texts, numbers, booleans and None.

    Raises:
        ValueError: it has anything else, or is damaged.
    """
    import pickletools  # with pickle 5 ms, which only a hang is worth

    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _CONTAINERS:
                stack.append(_CONTAINERS[name]())
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[int(argument or 0)] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                _build(name, stack, marks)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"damaged: {error}") from None
    raise ValueError("damaged: no end")


def _build(name: str, stack: list[Any], marks: list[int]) -> None:
    """Carry out an opcode that takes values from the stack."""
    if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif name == "SETITEM":
        value = stack.pop()
        key = stack.pop()
        stack[-1][key] = value
    elif name in ("APPENDS", "SETITEMS", "TUPLE"):
        start = marks.pop()
        values = stack[start:]
        del stack[start:]
        if name == "TUPLE":
            stack.append(tuple(values))
        elif name == "APPENDS":
            stack[-1].extend(values)
        else:
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
    else:
        raise ValueError(f"opcode {name} does not make a plain value")


_VALUES = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    }
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
