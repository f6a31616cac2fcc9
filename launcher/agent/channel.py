"""
How workers report to their agent: datagrams through a socket file in a folder of mode 0700.

    {"rank": 3, "generation": 1, "step": 120, "busy": 0.25, "saved": 100,
     "total": 5000, "numbers": {"loss": 2.31, "grad_norm": null}, "bad": {"grad_norm": 119}}
    {"rank": 3, "generation": 1, "step": 120, "sampled": true, "numbers": {"loss": 2.31}}
    {"rank": 3, "generation": 1, "late": ["OMP_NUM_THREADS"]}
    {"rank": 0, "generation": 1, "plan": [["mesh", "dp 2 x tp 4", "argument mesh="]]}

A datagram of any other format is counted and dropped: any process of this user may have sent it.
The kernel names the sender. A worker never waits. A report that does not fit into the socket's
queue is lost, and the next one replaces it. A worker that sends too many does not keep the agent
busy: one call reads at most MAX_REPORTS_PER_READ.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from pdrun.launcher.common.agent_folder import FOLDER_PREFIX, folder_prefix
from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import PlanFact

MAX_DATAGRAM_BYTES = 32_768
"""A plan has up to 24 KiB of text (`pdrun.elastic.MAX_PLAN_BYTES`); other reports have 2 KiB."""
MAX_REPORTS_PER_READ = 64
MAX_NUMBER = 1 << 53
"""Ranks, generations and steps are smaller."""
MAX_SWEPT_FOLDERS = 64
MAX_NUMBERS = 32
MAX_FACTS = 256
"""Lines of a plan."""
_INTEGER_FIELDS = ("rank", "generation", "step", "saved", "total")
_NUMBER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")
_OTHER_FIELDS = ("bad", "busy", "late", "numbers", "paused", "plan", "sampled")
_CREDENTIALS = struct.Struct("3i")
_MAX_PATH_BYTES = 100
"""For the path of a socket; the system accepts 107."""


@dataclass(frozen=True)
class WorkerReport:
    """The content of one datagram."""

    rank: int
    generation: int
    step: int | None = None
    busy: float = 0.0
    saved: int | None = None
    pid: int = 0
    """The sender's pid, from the kernel; 0: unknown."""
    late: tuple[str, ...] = ()
    """Variables that a forked worker has set too late."""
    total: int = 0
    """Steps of the whole run; 0: not known."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """What the script reports with its step; None: not finite."""
    is_sampled: bool = False
    """The step is one of a `pdrun.Run`, which reports some of its steps only."""
    is_paused: bool = False
    """It waits in `pdrun.breakpoint`."""
    plan: tuple[PlanFact, ...] = ()
    """About its run; alone in its report."""
    bad_steps: Mapping[str, int] = field(default_factory=dict)
    """Of the numbers that are not finite: the first step with such a value."""

    @property
    def counted_step(self) -> int | None:
        """The step, if the script reports every step, so that a missing one means something."""
        return None if self.is_sampled else self.step


def parse_report(data: bytes, pid: int = 0) -> WorkerReport | None:
    """Return the report in a datagram, or None if it has another format."""
    if len(data) > MAX_DATAGRAM_BYTES:
        return None
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if not {"rank", "generation"} <= found.keys() <= {*_INTEGER_FIELDS, *_OTHER_FIELDS}:
        return None
    for name in _INTEGER_FIELDS:
        if name in found and not (type(found[name]) is int and 0 <= found[name] < MAX_NUMBER):
            return None
    busy = found.get("busy", 0.0)
    if type(busy) not in (int, float) or not 0 <= busy < 1e9:  # also refuses NaN
        return None
    late = found.get("late", [])
    if not isinstance(late, list) or not all(map(_is_variable_name, late)):
        return None
    if not all(type(found.get(name, False)) is bool for name in ("paused", "sampled")):
        return None
    numbers = found.get("numbers", {})
    if not isinstance(numbers, dict) or not _are_numbers(numbers):
        return None
    bad = found.get("bad", {})
    if not isinstance(bad, dict) or not all(
        type(step) is int and 0 <= step < MAX_NUMBER for step in bad.values()
    ):
        return None
    plan = found.get("plan", [])
    if not isinstance(plan, list) or len(plan) > MAX_FACTS or not all(map(_is_fact, plan)):
        return None
    return WorkerReport(
        found["rank"],
        found["generation"],
        found.get("step"),
        float(busy),
        found.get("saved"),
        pid,
        tuple(late),
        found.get("total", 0),
        numbers,
        found.get("sampled", False),
        found.get("paused", False),
        tuple(PlanFact(*fact) for fact in plan),
        {name: step for name, step in bad.items() if numbers.get(name, 0.0) is None},
    )


def _are_numbers(found: dict[Any, Any]) -> bool:
    return len(found) <= MAX_NUMBERS and all(
        _NUMBER_NAME.fullmatch(name)
        and (value is None or (type(value) in (int, float) and abs(value) < 1e300))
        for name, value in found.items()
    )


def _is_fact(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(one) is str for one in value)


def _is_variable_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w{1,100}", value, re.ASCII) is not None


class WorkerChannel:
    """
    The agent's end of the channel.

    Raises:
        OSError: no folder or socket can be made.
    """

    folders: ClassVar[set[Path]] = set()
    """The folders in use by this process. One that exits without `close` must remove them."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.folder = make_socket_folder()
        except OSError:
            self._socket.close()
            raise
        self.folders.add(self.folder)
        self.path = str(self.folder / "agent")
        self.rejected_count = 0
        """Datagrams that had another format."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self.path)
        except OSError:
            self.close()
            raise
        remove_stale_folders(self.folder)

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 after `close`."""
        return self._socket.fileno()

    def read_reports(self) -> list[WorkerReport]:
        """Return new reports, oldest first, at most MAX_REPORTS_PER_READ; never blocks."""
        found: list[WorkerReport] = []
        for _ in range(MAX_REPORTS_PER_READ):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    MAX_DATAGRAM_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:  # the queue is empty
                break
            report = None
            if not flags & socket.MSG_TRUNC:
                report = parse_report(data, _sender_pid(ancillary))
            if report is None:
                self.rejected_count += 1
            else:
                found.append(report)
        return found

    def close(self) -> None:
        """Close the socket and remove the folder."""
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folders.discard(self.folder)


def make_socket_folder() -> Path:
    """
    Make a folder of mode 0700 whose path is short enough for a socket.

    Raises:
        OSError: none can be made; the error of the first attempt.
    """
    wrong: OSError | None = None
    for base in (None, os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        if base is not None and not os.access(base, os.W_OK | os.X_OK):
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=folder_prefix(), dir=base))
        except OSError as error:
            wrong = wrong or error
            continue
        if len(os.fsencode(folder)) <= _MAX_PATH_BYTES - len("/agent"):
            return folder
        folder.rmdir()
    raise wrong or OSError("no folder for temporary files has a path short enough for a socket")


def remove_stale_folders(folder: Path) -> None:
    """
    Remove the folders of killed agents next to `folder`.

    These belong to this user and this kernel, and no process listens on their socket.
    """
    kernel = folder_prefix()
    if kernel == FOLDER_PREFIX:
        return
    for other in itertools.islice(folder.parent.glob(f"{kernel}*"), MAX_SWEPT_FOLDERS):
        try:
            if other == folder or other.lstat().st_uid != os.getuid():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(str(other / "agent"))
        except ConnectionRefusedError:
            shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue  # being created by another agent, or already removed


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        is_credentials = (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        if is_credentials and len(data) == _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data)[0])
    return 0
