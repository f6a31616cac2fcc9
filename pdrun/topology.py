"""
What a node is made of, as plain frozen values; read by placement, affinity and (later) the cost
model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU slot, as this node sees it."""

    kind: str
    """Name of its backend table: cpu, cuda, rocm, npu, xpu or mps."""
    index: int
    """Position among the devices visible to the launcher."""
    name: str = ""
    """
    What to put in the visibility variable: ``"4"``, ``"GPU-7a..."``, ``"MIG-..."``; empty for cpu.
    """


@dataclass(frozen=True)
class CpuSet:
    """The CPUs that this node may use."""

    cpus: tuple[int, ...]
    """Logical CPU numbers of the affinity mask, ascending."""
    quota: float | None = None
    """
    CPUs that the cgroup's bandwidth limit grants (cpu.max, cfs_quota_us), or None without a limit.
    """
    cores: tuple[tuple[int, ...], ...] = ()
    """
    The same CPUs grouped by physical core (hyper-thread siblings together); empty when unknown.
    """
    numa: tuple[tuple[int, ...], ...] = ()
    """The same CPUs grouped by memory node; empty when unknown."""

    @property
    def usable_cpus(self) -> int:
        """
        How many threads can run at once: the mask, or the quota (at least 1) where that is less.
        """
        mask = max(1, len(self.cpus))
        return mask if self.quota is None else max(1, min(mask, int(self.quota)))
