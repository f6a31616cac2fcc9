"""
Which CPUs each worker of a node gets, and how many threads it should run: read once, then decided
by a pure function.

`read_cpus` looks at the affinity mask, at every cgroup bandwidth limit above this process and at
the topology in /sys. `split` deals whole cores (hyper-thread siblings stay together) to the
workers. Two workers never share a CPU: either all sets are disjoint and none is empty, or nobody is
bound and the note says why.

Limits: the distance between a core and an accelerator is not looked at; exclusive cpusets of other
jobs are seen only through the mask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

from pdrun.errors import PdrunError, UsageError
from pdrun.topology import CpuSet

T = TypeVar("T")
BindMode = Literal["auto", "cores", "numa", "none"]
CpuGroup = tuple[int, ...]
"""CPU numbers that belong together: the hyper-threads of a core, or the CPUs of a memory node."""


@dataclass(frozen=True)
class CpuBinding:
    """What `split` decided; position i belongs to the worker of local rank i."""

    sets: tuple[tuple[int, ...], ...]
    """
    CPUs of each worker, ascending; an empty tuple means: not bound. Never a mixture of bound and
    unbound.
    """
    threads: tuple[int, ...]
    """Threads that each worker should run, at least 1."""
    note: str
    """One line: what was done and why."""

    @property
    def is_bound(self) -> bool:
        """Whether workers are bound at all."""
        return any(self.sets)


def split_cpus(cpus: CpuSet, workers: int, mode: BindMode = "auto") -> CpuBinding:
    """
    Deal the CPUs of a node to its workers.

    auto: whole cores when there is at least one a worker, else unbound; one worker alone is left
    unbound, since it has the whole mask anyway. cores: the same, one worker included. numa: as
    cores, but no worker reaches over a memory node unless it owns it whole. Threads: the CPUs bound
    to the worker, or its share of what the mask and the bandwidth limit allow, whichever is less; a
    remainder goes to the first workers (3 CPUs, 2 workers: 2 + 1).

    Raises:
        UsageError: fewer than one worker, or an unknown mode.
    """
    if workers < 1:
        raise UsageError(f"{workers} worker(s) cannot share CPUs", where="--devices")
    if mode not in ("auto", "cores", "numa", "none"):
        raise UsageError(f"{mode!r} is not one of auto, cores, numa, none", where="--bind")
    cores = _list_cores(cpus)
    if mode == "none":
        return _leave_unbound(cpus, workers, "not bound: asked for none")
    if not cores:
        return _leave_unbound(cpus, workers, "not bound: the affinity mask is empty or unknown")
    if mode == "auto" and workers == 1:
        return _leave_unbound(cpus, workers, "not bound: one worker has the whole mask")
    if len(cores) < workers:
        return _leave_unbound(
            cpus, workers, f"not bound: {len(cores)} core(s) for {workers} workers"
        )
    if mode == "numa":
        nodes = _list_memory_nodes(cpus, cores)
        if not nodes:
            return _bind_workers(
                cpus,
                _split_evenly(cores, workers),
                "cores dealt in order: memory nodes are unknown",
            )
        return _bind_workers(
            cpus, _deal_nodes(nodes, workers), f"cores dealt inside {len(nodes)} memory node(s)"
        )
    return _bind_workers(
        cpus, _split_evenly(cores, workers), f"{len(cores)} core(s) dealt to {workers} worker(s)"
    )


def share_cpus(cpus: CpuSet, index: int, count: int) -> CpuSet:
    """
    Return the part of a machine that simulated node ``index`` of ``count`` may use.

    Whole cores where there is one a node; otherwise all nodes keep the whole mask and a limit of
    their share, in which case no worker should be bound (`split` sees fewer cores than it needs
    only by that limit, so pass mode ``none``).
    """
    if not 0 <= index < count:
        raise UsageError(f"{index} is not a place among {count} simulated node(s)", where="--local")
    quota = None if cpus.quota is None else cpus.quota / count
    cores = _list_cores(cpus)
    if len(cores) < count:
        return CpuSet(
            cpus.cpus, cpus.usable_cpus / count if quota is None else quota, cpus.cores, cpus.numa
        )
    mine = {cpu for core in _split_evenly(cores, count)[index] for cpu in core}
    return CpuSet(
        tuple(sorted(mine)),
        quota,
        _restrict_groups(cpus.cores, mine),
        _restrict_groups(cpus.numa, mine),
    )


def _restrict_groups(groups: Iterable[CpuGroup], wanted: set[int]) -> tuple[CpuGroup, ...]:
    """Cut groups down to the wanted CPUs; groups that have none of them go."""
    kept = (tuple(sorted(set(group) & wanted)) for group in groups)
    return tuple(group for group in kept if group)


def _is_partition(groups: Sequence[CpuGroup], cpus: set[int]) -> bool:
    """
    Whether the groups hold each of the CPUs exactly once: a /sys that lies is treated as one that
    is silent.
    """
    flat = [cpu for group in groups for cpu in group]
    return len(flat) == len(set(flat)) and set(flat) == cpus


def _list_cores(cpus: CpuSet) -> tuple[CpuGroup, ...]:
    """
    Return the cores of the mask, neighbours in memory next to each other; each CPU is a core when
    unknown.
    """
    mask = set(cpus.cpus)
    cores = _restrict_groups(cpus.cores, mask)
    if not _is_partition(cores, mask):
        cores = tuple((cpu,) for cpu in sorted(mask))
    place = {cpu: number for number, node in enumerate(cpus.numa) for cpu in node}
    return tuple(sorted(cores, key=lambda core: (place.get(core[0], -1), core)))


def _list_memory_nodes(cpus: CpuSet, cores: Sequence[CpuGroup]) -> tuple[tuple[CpuGroup, ...], ...]:
    """
    Return the cores of each memory node; empty when nodes are unknown or a core lies in two of
    them.
    """
    numa = _restrict_groups(cpus.numa, set(cpus.cpus))
    if not _is_partition(numa, set(cpus.cpus)):
        return ()
    nodes = tuple(tuple(core for core in cores if set(core) <= set(node)) for node in numa)
    return nodes if sum(map(len, nodes)) == len(cores) else ()


def _split_evenly(row: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a row into ``parts`` runs whose lengths differ by one at most, longer ones first."""
    least, extra = divmod(len(row), parts)
    starts = [part * least + min(part, extra) for part in range(parts + 1)]
    return [row[low:high] for low, high in pairwise(starts)]


def _deal_nodes(nodes: Sequence[Sequence[CpuGroup]], workers: int) -> list[Sequence[CpuGroup]]:
    """
    Deal whole nodes when there are more of them than workers, else the cores inside each node.
    """
    if workers < len(nodes):
        return [[core for node in run for core in node] for run in _split_evenly(nodes, workers)]
    counts = [0] * len(nodes)
    for _ in range(
        workers
    ):  # each next worker goes where it gets most cores; equal nodes are filled in turn
        best = max(
            range(len(nodes)),
            key=lambda number: (len(nodes[number]) / (counts[number] + 1), -number),
        )
        counts[best] += 1
    return [
        part
        for node, count in zip(nodes, counts, strict=True)
        if count
        for part in _split_evenly(node, count)
    ]


def _bind_workers(cpus: CpuSet, parts: Sequence[Sequence[CpuGroup]], note: str) -> CpuBinding:
    sets = tuple(tuple(sorted(cpu for core in part for cpu in core)) for part in parts)
    check_disjoint(sets)
    shares = _share_threads(cpus.usable_cpus, len(sets))
    if cpus.quota is None or cpus.quota >= len(cpus.cpus):
        return CpuBinding(sets, tuple(map(len, sets)), f"bound: {note}")
    threads = tuple(min(len(own), least) for own, least in zip(sets, shares, strict=True))
    return CpuBinding(
        sets, threads, f"bound: {note}; threads by the limit of {cpus.quota:g} CPU(s)"
    )


def _leave_unbound(cpus: CpuSet, workers: int, note: str) -> CpuBinding:
    return CpuBinding(((),) * workers, _share_threads(cpus.usable_cpus, workers), note)


def _share_threads(total: int, parts: int) -> tuple[int, ...]:
    """
    Share ``total`` threads among ``parts`` workers, the remainder to the first, at least 1 each.
    """
    least, extra = divmod(total, parts)
    return tuple(max(1, least + (part < extra)) for part in range(parts))


def check_disjoint(sets: Sequence[Sequence[int]]) -> None:
    """
    Prove that no CPU was given twice and no bound worker got nothing.

    Raises:
        PdrunError: names the workers; it is a fault of pdrun, so nothing is started.
    """
    owner: dict[int, int] = {}
    for worker, own in enumerate(sets):
        if not own:
            raise PdrunError(f"local rank {worker} would be bound to no CPU")
        for cpu in own:
            if cpu in owner:
                raise PdrunError(
                    f"CPU {cpu} would be given to local ranks {owner[cpu]} and {worker}"
                )
            owner[cpu] = worker


# --- reading the machine -----------------------------------------------------


def read_cpus(root: Path = Path("/"), *, mask: Iterable[int] | None = None) -> CpuSet:
    """
    Read what this process may use. ``mask`` stands in for the affinity mask (tests). Never fails:
    unknown is empty.

    Files (real samples)::

        /proc/self/cgroup                                       0::/user.slice/job.scope
        /sys/fs/cgroup/.../cpu.max                              150000 100000
        /sys/fs/cgroup/cpu,cpuacct/.../cpu.cfs_quota_us         -1
        /sys/devices/system/cpu/cpu0/topology/core_cpus_list    0,64        (older kernels: thread_siblings_list)
        /sys/devices/system/node/node0/cpulist                  0-31,64-95
    """
    own = set(_read_mask() if mask is None else mask)
    system = root / "sys/devices/system"
    numa = [
        parse_cpu_list(_read_text(path / "cpulist"))
        for path in _list_numbered(system / "node", "node")
    ]
    return CpuSet(
        tuple(sorted(own)),
        _read_quota(root),
        _read_cores(system / "cpu", own),
        _restrict_groups(numa, own),
    )


def _read_mask() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _list_numbered(folder: Path, stem: str) -> list[Path]:
    """Return the entries ``stem0``, ``stem1``, ... of a folder in numeric order."""
    try:
        names = [name for name in os.listdir(folder) if re.fullmatch(stem + "[0-9]+", name)]  # noqa: PTH208
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=lambda name: int(name[len(stem) :]))]


def parse_cpu_list(text: str) -> CpuGroup:
    """Parse the kernel's ``0-3,8,10-11``; text that is no such list gives the empty tuple."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            return ()
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cpus))


def _read_cores(folder: Path, own: set[int]) -> tuple[CpuGroup, ...]:
    """Group the CPUs by core; empty when /sys does not say it for every one of them."""
    cores: list[CpuGroup] = []
    seen: set[int] = set()
    for cpu in sorted(own):
        if cpu in seen:
            continue
        place = folder / f"cpu{cpu}/topology"
        siblings = (
            set(
                parse_cpu_list(
                    _read_text(place / "core_cpus_list")
                    or _read_text(place / "thread_siblings_list")
                )
            )
            & own
        )
        if cpu not in siblings or siblings & seen:
            return ()
        seen |= siblings
        cores.append(tuple(sorted(siblings)))
    return tuple(cores)


def _read_quota(root: Path) -> float | None:
    """
    Return the smallest bandwidth limit, in CPUs, of the cgroups from this process up to the mount,
    or None.
    """
    limits = [
        limit for folder in _list_cgroups(root) if (limit := _read_cgroup_quota(folder)) is not None
    ]
    return min(limits, default=None)


def _read_cgroup_quota(folder: Path) -> float | None:
    """
    Return the limit of one cgroup of either version: ``cpu.max``, or ``cpu.cfs_quota_us /
    cpu.cfs_period_us``.
    """
    words = _read_text(folder / "cpu.max").split()
    if not words:
        words = [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
    if (
        len(words) == 2
        and all(re.fullmatch("[0-9]+", word) for word in words)
        and int(words[1]) > 0
    ):
        return int(words[0]) / int(words[1]) or None
    return None  # "max", "-1", or a file that is not there


def _list_cgroups(root: Path) -> list[Path]:
    """
    Return the folders of the cgroups with a cpu controller that hold this process, leaf first,
    ancestors after.
    """
    paths = {}
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    folders: list[Path] = []
    for kind, inner, mount in _list_cgroup_mounts(root):
        base = root / mount.lstrip("/")
        # Without a cgroup namespace a container sees the host's path, while the mount shows only
        # what is below `inner`.
        path = paths.get(kind, "/")
        rest = path[len(inner) :] if inner != "/" and (path + "/").startswith(inner + "/") else path
        leaf = base / rest.strip("/")
        if ".." in leaf.parts or not leaf.is_dir():
            leaf = base
        folders += [
            leaf,
            *(parent for parent in leaf.parents if parent == base or base in parent.parents),
        ]
    return folders


def _list_cgroup_mounts(root: Path) -> list[tuple[str, str, str]]:
    """
    Return (file system, root inside it, mount point) of the cgroup mounts that may limit CPU time.
    """
    mounts = []
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        # 30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "cpu" in kind[2].split(",")):
            mounts.append((kind[0], fields[3], fields[4]))
    return mounts
