"""
Exposed communication of a trace: the time of a step in which a rank communicates and computes
nothing meanwhile. Pure.

On a device both are kernels; on a CPU collectives are ranges in a thread of the backend, and
computation is torch's operators in the other threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pdrun.ui.report.communication import RankCommunication

STEP_NAME = re.compile(r"step \d+ of the trace")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVE_KERNELS = re.compile(r"(nccl|rccl|hccl|hcom)", re.IGNORECASE)
_COLLECTIVE_RANGES = re.compile(r"(gloo|mpi|ucc|xccl|hccl):")
Interval = tuple[float, float]


class CommunicationMeter:
    """Collects the intervals of one rank's trace."""

    def __init__(self) -> None:
        self._steps: list[Interval] = []
        self._device_sends: list[Interval] = []
        self._device_work: list[Interval] = []
        self._host_sends: list[Interval] = []
        self._host_work: dict[str, list[Interval]] = {}
        """Thread -> intervals of torch's operators."""
        self._sending_threads: set[str] = set()

    def add(self, event: Mapping[str, Any]) -> None:
        """Note an event of a Chrome trace; times are in microseconds."""
        begin: Any = event.get("ts")
        length: Any = event.get("dur")
        if event.get("ph") != "X" or not _is_time(begin) or not _is_time(length):
            return
        span = (float(begin), float(begin) + float(length))
        name, kind = str(event.get("name", "")), event.get("cat")
        if kind in _DEVICE_WORK:
            is_sent = _COLLECTIVE_KERNELS.search(name) is not None
            (self._device_sends if is_sent else self._device_work).append(span)
        elif _COLLECTIVE_RANGES.match(name):
            self._host_sends.append(span)
            self._sending_threads.add(str(event.get("tid")))
        elif kind == "user_annotation" and STEP_NAME.fullmatch(name):
            self._steps.append(span)
        elif kind == "cpu_op" and not name.startswith("c10d::"):
            self._host_work.setdefault(str(event.get("tid")), []).append(span)

    def read(self, rank: int) -> RankCommunication | None:
        """Return the means of a step; None without a step."""
        if not self._steps:
            return None
        if self._device_work or self._device_sends:
            sends, work = self._device_sends, self._device_work
        else:
            sends = self._host_sends
            work = [
                span
                for thread, spans in self._host_work.items()
                if thread not in self._sending_threads
                for span in spans
            ]
        begin = min(first for first, _ in self._steps)
        # a device runs behind: what the last step has started counts, too
        end = max(last for _, last in [*self._steps, *sends, *work])
        sent = _join_intervals(sends, begin, end)
        exposed = _subtract(sent, _join_intervals(work, begin, end))
        count = len(self._steps)
        seconds = sum(last - first for first, last in self._steps)
        return RankCommunication(
            rank,
            seconds / count / 1e6,
            _total(sent) / count / 1e6,
            _total(exposed) / count / 1e6,
        )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18


def _total(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in spans)


def _join_intervals(spans: Iterable[Interval], low: float, high: float) -> list[Interval]:
    """Return intervals cut to a window, sorted, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted((max(a, low), min(b, high)) for a, b in spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _subtract(spans: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return what is in the first intervals and not in the others; both as `_join_intervals`."""
    found: list[Interval] = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        position = place
        while begin < end:
            if position == len(others) or others[position][0] >= end:
                found.append((begin, end))
                break
            if others[position][0] > begin:
                found.append((begin, others[position][0]))
            begin = others[position][1]
            position += 1
    return found
