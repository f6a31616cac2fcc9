"""Devices and CPUs of a node, as frozen values for placement and affinity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU slot, of this node."""

    kind: str
    """Name of its backend table: cpu, cuda, rocm, npu, xpu or mps."""
    index: int
    """Position among the devices visible to the launcher."""
    name: str = ""
    """
    Its name in the visibility variable: ``"4"``, ``"GPU-7a..."``, ``"MIG-..."``; empty for cpu.
    """


@dataclass(frozen=True)
class CpuSet:
    """The CPUs that this process may use."""

    cpus: tuple[int, ...]
    """Logical CPU numbers of the affinity mask, ascending."""
    quota: float | None = None
    """CPUs that the cgroup's bandwidth limit allows (cpu.max, cfs_quota_us); None: no limit."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The same CPUs grouped by physical core (hyper-thread siblings together); empty: unknown."""
    numa: tuple[tuple[int, ...], ...] = ()
    """The same CPUs grouped by NUMA node; empty: unknown."""

    @property
    def usable_cpus(self) -> int:
        """Return how many threads can run at the same time: the mask or the quota, at least 1."""
        count = max(1, len(self.cpus))
        if self.quota is None:
            return count
        return max(1, min(count, int(self.quota)))
