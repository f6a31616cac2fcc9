"""
What the workers of a node use: CPU, memory and devices, sampled every SAMPLE_SECONDS.

A sample reads two small files per process and two of the host. nvidia-smi runs in a thread, every
DEVICE_SECONDS, only where NVIDIA devices are; one that hangs is not called again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun.launcher.common import procfs
from pdrun.rendezvous.policies.numbers import sum_numbers
from pdrun.rendezvous.protocol.messages import NodeNumber

if TYPE_CHECKING:
    from pdrun.backends.base import ToolAnswer
    from pdrun.disk import BackgroundCall
    from pdrun.topology import Device

FIRST_SECONDS = 3.0
"""Time from the start of a generation to its first sample."""
SAMPLE_SECONDS = 15.0
DEVICE_SECONDS = 30.0
SPREAD_PARTS = 61
SCAN_SECONDS = 60.0
"""Time between two searches for the descendants of a worker."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB_BYTES = 1 << 20
DEVICE_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
NVIDIA_CONTROL = Path("/dev/nvidiactl")
Workers = Sequence[tuple[int, int, int]]
"""(rank, slot, pid) of each live worker."""


class UsageSampler:
    """Samples of one generation's workers; percentages are since the sample before."""

    def __init__(
        self,
        now: float,
        first_rank: int,
        devices: Callable[[], Mapping[int, Device]],
        run_tool: Callable[[Sequence[str]], ToolAnswer] | None = None,
        slowness: float = 1.0,
    ) -> None:
        """
        Args:
            now: monotonic seconds.
            first_rank: rank that stands for the node in values of the host.
            devices: returns the device of each rank that has one.
            run_tool: calls nvidia-smi; None: no devices of NVIDIA are here.
            slowness: how much less often than usual: thousands of nodes report to one scheduler.
                Their first samples are spread, too.
        """
        spread = (slowness - 1.0) * FIRST_SECONDS * (first_rank % SPREAD_PARTS) / SPREAD_PARTS
        self.next_at = now + FIRST_SECONDS + spread
        self._interval = SAMPLE_SECONDS * slowness
        self._first_rank = first_rank
        self._devices = devices
        self._run_tool = run_tool
        self._meters: dict[int, procfs.CpuMeter] = {}
        self._seconds: dict[int, tuple[float, float]] = {}
        """Pid -> (time, CPU seconds) of the last reading."""
        self._host_ticks = procfs.read_host_ticks()
        self._query: BackgroundCall[ToolAnswer] | None = None
        self._query_at = now
        self._device_values: dict[int, dict[str, float | None]] = {}
        """Rank -> values of its device, from the last answer."""

    def begin(self, workers: Workers, now: float) -> None:
        """Take the first reading of CPU times: percentages need two."""
        for rank, _, pid in workers:
            self._read_cpu_percent(rank, pid, now)
        self._poll_devices(now)

    def take(self, workers: Workers, now: float) -> tuple[NodeNumber, ...]:
        """Return a sample, and wait for the next one."""
        self.next_at = now + self._interval
        self._poll_devices(now)
        reports: dict[int, dict[str, float | None]] = {}
        for rank, _, pid in workers:
            values: dict[str, float | None] = {}
            percent = self._read_cpu_percent(rank, pid, now)
            resident = procfs.read_resident_pages(pid)
            if percent is not None:
                values["cpu_percent"] = percent
            if resident:
                values["memory_bytes"] = float(resident * PAGE_BYTES)
            values |= self._device_values.get(rank, {})
            reports[rank] = values
        for name, value in self._read_host().items():
            reports.setdefault(self._first_rank, {})[name] = value
        return sum_numbers(reports)

    def _read_cpu_percent(self, rank: int, pid: int, now: float) -> float | None:
        meter = self._meters.get(pid)
        if meter is None:
            meter = self._meters[pid] = procfs.CpuMeter(pid, SCAN_SECONDS)
        seconds = meter.read_seconds(now)
        if seconds is None:
            return None
        before = self._seconds.get(pid)
        self._seconds[pid] = (now, seconds)
        if before is None or now <= before[0]:
            return None
        return round(max(0.0, 100 * (seconds - before[1]) / (now - before[0])), 1)

    def _read_host(self) -> dict[str, float]:
        found: dict[str, float] = {}
        before, self._host_ticks = self._host_ticks, procfs.read_host_ticks()
        if before is not None and self._host_ticks is not None:
            busy, total = (new - old for new, old in zip(self._host_ticks, before, strict=True))
            if total > 0:
                found["host_cpu_percent"] = round(min(100.0, max(0.0, 100 * busy / total)), 1)
        share = procfs.read_host_memory_share()
        if share is not None:
            found["host_memory_percent"] = round(100 * share, 1)
        return found

    def _poll_devices(self, now: float) -> None:
        """Take the answer of nvidia-smi if it is there, and call it again if that is due."""
        if self._run_tool is None:
            return
        if self._query is not None:
            if not self._query.wait(0.0):
                return
            answer, self._query = self._query.result(), None
            if answer.state != "ok":
                self._run_tool, self._device_values = None, {}
                return
            self._device_values = match_devices(answer.text, self._devices())
        if now >= self._query_at:
            from pdrun.disk import BackgroundCall

            self._query_at = now + DEVICE_SECONDS
            run_tool = self._run_tool
            self._query = BackgroundCall(lambda: run_tool(DEVICE_QUERY))


def match_devices(text: str, devices: Mapping[int, Device]) -> dict[int, dict[str, float | None]]:
    """
    Return the values of each rank's device.

    Args:
        text: answer of nvidia-smi to DEVICE_QUERY; a value that a device lacks is ``[N/A]``.
        devices: device of each rank, named by index or UUID.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 5]
    found: dict[int, dict[str, float | None]] = {}
    for rank, device in devices.items():
        name = device.name or str(device.index)
        if device.kind != "cuda" or name.startswith("MIG"):
            continue  # values of a whole device are not those of a part
        for index, uuid, busy, used, total in rows:
            if name == index or (name.startswith("GPU-") and uuid.startswith(name)):
                values: dict[str, float | None] = {}
                if _is_number(busy):
                    values["device_percent"] = float(busy)
                if _is_number(used):
                    values["device_memory_bytes"] = float(used) * MIB_BYTES
                    if _is_number(total) and float(total) > 0:
                        values["device_memory_percent"] = 100 * float(used) / float(total)
                found[rank] = values
    return found


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def choose_tool_runner() -> Callable[[Sequence[str]], ToolAnswer] | None:
    """Return what calls nvidia-smi; None: this host has no device of NVIDIA."""
    if not NVIDIA_CONTROL.exists():
        return None
    from pdrun.backends.tools import make_tool_runner

    return make_tool_runner(os.environ)
